"""A state of one value, by which a checkpoint is recognised."""

from __future__ import annotations

from ckpt_core import TrainState


def state_of(value, columns=8):
    import torch

    model = torch.nn.Linear(columns, 2, bias=False)
    with torch.no_grad():
        model.weight.fill_(value)
    return TrainState(model=model, rng=False)


def value_of(state):
    return float(state.model.weight.detach().min())
