"""A save or a load right after an evaluation, when FSDP2 still has whole parameters in the root."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from ckpt_core import CheckpointManager, TrainState
from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    evaluate(model)
    return model, optimizer


def evaluate(model: nn.Module) -> float:
    with torch.no_grad():
        return model(torch.ones(2, 4)).sum().item()


def save_and_resume(root: str) -> tuple[float, float]:
    model, optimizer = trained()
    with CheckpointManager(root, deadline_seconds=60) as checkpoints:
        checkpoints.save(1, TrainState(model=model, optimizer=optimizer)).result()
        expected = evaluate(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        evaluate(model)
        assert checkpoints.resume(TrainState(model=model, optimizer=optimizer)) == 1
    return expected, evaluate(model)


def test_fsdp2_saves_and_resumes_right_after_an_evaluation(tmp_path) -> None:
    for expected, found in run_ranks(save_and_resume, 2, str(tmp_path)):
        assert found == expected != 0
