"""Evaluate checkpoints in another process while a training saves them.

    python examples/evaluate.py                                     # both, on this machine
    python examples/evaluate.py evaluate s3://bucket/run            # the evaluator alone, anywhere

The training keeps the best by a number that it never computes.
"""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from ckpt_core import CheckpointManager, EverySteps, KeepBest, KeepLatest, TrainState, annotate, watch

STEPS = 40


def evaluate(root: str) -> None:
    model, inputs = make_model(), torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    for checkpoint in watch(root, each=True, timeout=60):
        with CheckpointManager(root) as checkpoints:
            checkpoints.load(TrainState(model=model), step=checkpoint.step, items=["model"])
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        annotate(checkpoint.path, {"val_loss": loss.item()})
        print(f"evaluated step {checkpoint.step}: val_loss {loss.item():.4f}", flush=True)
        if checkpoint.step == STEPS:
            break


def train(root: str) -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    evaluator = subprocess.Popen([sys.executable, __file__, "evaluate", root])
    keep = KeepBest("val_loss") | KeepLatest(4)  # what is to be evaluated must stay until then
    with CheckpointManager(root, save=EverySteps(10), keep=keep) as checkpoints:
        state = TrainState(model=model, optimizer=optimizer)
        for step in range(1, STEPS + 1):
            inputs = torch.randn(32, 8)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.maybe_save(step, state, total_steps=STEPS)
        evaluator.wait()
        checkpoints.prune()
        for each in checkpoints.checkpoints():
            print(f"kept step {each.step}: {dict(each.metrics)}")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["evaluate"]:
        evaluate(sys.argv[2])
    else:
        train(sys.argv[1] if len(sys.argv) > 1 else "runs/evaluated")
