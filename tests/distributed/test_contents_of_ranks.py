"""Only what is trained, over ranks: the checksums of the base are the same however it is sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from ckpt_core import CheckpointManager
from tests.distributed.contents_jobs import KINDS, plain, save_and_resume, state_of
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed


def test_what_is_trained_resumes_exactly_under_every_strategy_and_any_other(tmp_path: Path) -> None:
    problems = run_ranks(save_and_resume, 2, tmp_path)
    assert problems == [[], []]
    weights = []
    for kind in KINDS:
        names = FileSystemReader(tmp_path / kind / "step-000000004").read_metadata().state_dict_metadata
        assert {name for name in names if name.startswith("model.")} == {
            "model.2.weight", "model.4.weight", "model.4.bias"
        }  # fmt: skip
        model = plain()
        with CheckpointManager(tmp_path / kind) as checkpoints:
            checkpoints.load(state_of(model)[0])
        weights.append(model[4].weight)
    assert all(torch.allclose(each, weights[0], atol=1e-4) for each in weights)
