"""Uploads of several ranks: each uploads its own files, and what happens to one happens to all."""

from __future__ import annotations

import pytest
import torch

from ckpt_core import CheckpointManager, Upload
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import FaultyStorage
from tests.distributed.upload_jobs import cases, dies_while_uploading, written
from tests.kit.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_ranks_upload_their_own_files_and_hear_of_every_outcome_together(tmp_path):
    first, second = run_ranks(cases, 2, str(tmp_path), timeout_seconds=150)
    assert first["own files"] == {"steps": [1], "written": ["__0_0.distcp"]}
    assert second["own files"] == {"steps": [1], "written": ["__1_0.distcp"]}
    for found in (first["failure"], second["failure"]):
        assert (found["step"], found["failed"]) == (1, [1])
        assert "rank 1: OSError: the cable was pulled" in found["error"]
        assert found["raised"] == found["error"]
    assert first["overtaken"] == second["overtaken"] == [1, None, None, 4]
    assert first["left"] == second["left"] == []

    # The next run has one rank, which uploads the files of both.
    tier = FaultyStorage(LocalStorage(tmp_path / "left" / "tier"))
    state = {"w0": torch.zeros(5000), "w1": torch.zeros(5000)}
    with CheckpointManager(tmp_path / "left" / "root", upload=Upload(tier)) as manager:
        assert manager.resume(state) == 1
    assert written(tier) == ["__0_0.distcp", "__1_0.distcp"]
    (info,) = Catalog(tier).committed()
    assert verify(tier, info.name) == []


def test_a_rank_that_dies_in_its_upload_does_not_hold_up_the_end_of_the_others(tmp_path):
    error, nothing = run_ranks(dies_while_uploading, 2, str(tmp_path), timeout_seconds=100, expect_death=[1])
    assert nothing is None
    assert "rank(s) 1 did not arrive" in error
    assert [info.step for info in Catalog(LocalStorage(tmp_path / "root")).committed()] == [1]
    assert Catalog(LocalStorage(tmp_path / "tier")).committed() == []
