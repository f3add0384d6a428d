"""Uploads of several ranks: one of them, or one on each node, uploads, and all hear how it ends."""

from __future__ import annotations

import pytest
import torch

from ckpt_core import CheckpointManager, Upload
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import FaultyStorage
from tests.distributed.upload_jobs import (
    cases,
    dies_on_its_node,
    dies_while_uploading,
    disks_of_nodes,
    written,
)
from tests.kit.ranks import Nodes, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def test_the_coordinator_uploads_the_files_of_all_ranks_and_all_hear_of_every_outcome(tmp_path):
    first, second = run_ranks(cases, 2, str(tmp_path), timeout_seconds=150)
    assert first["files of all"] == {"steps": [1], "written": ["__0_0.distcp", "__1_0.distcp"]}
    assert second["files of all"] == {"steps": [1], "written": []}
    for found in (first["failure"], second["failure"]):
        assert (found["step"], found["failed"]) == (1, [1])
        assert "rank 0: OSError: the cable was pulled" in found["error"]
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


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_during_an_upload_does_not_hold_up_the_end_of_the_other(tmp_path, victim):
    found = run_ranks(
        dies_while_uploading, 2, str(tmp_path), victim, timeout_seconds=100, expect_death=[victim]
    )
    assert found == ([None, None] if victim == 0 else [1, None])
    assert [info.step for info in Catalog(LocalStorage(tmp_path / "root")).committed()] == [1]
    uploaded = [info.step for info in Catalog(LocalStorage(tmp_path / "tier")).committed()]
    assert uploaded == ([] if victim == 0 else [1])


def test_a_node_that_dies_during_an_upload_does_not_hold_up_the_end_of_the_others(tmp_path):
    found = run_ranks(
        dies_on_its_node, Nodes(2, per_node=1), str(tmp_path), timeout_seconds=100, expect_death=[1]
    )
    assert found == [None, None]
    assert Catalog(LocalStorage(tmp_path / "tier")).committed() == []


def test_one_rank_of_each_node_uploads_what_lies_on_its_disk_and_all_hear_of_every_failure(tmp_path):
    found = run_ranks(disks_of_nodes, Nodes(2, per_node=2), str(tmp_path), timeout_seconds=150)
    own = [["__0_0.distcp", "__1_0.distcp"], [], ["__2_0.distcp", "__3_0.distcp"], []]
    for case in ("whole", "again"):
        assert [each[case] for each in found] == [(1, files) for files in own]
        (info,) = Catalog(LocalStorage(tmp_path / case / "tier")).committed()
        assert verify(LocalStorage(tmp_path / case / "tier"), info.name) == []
    problems = {each["never"][0] for each in found}
    assert len(problems) == 1
    assert "rank 2: OSError: the cable was pulled" in problems.pop()
    assert "__3_0.distcp" in found[2]["next run"]
    (info,) = Catalog(LocalStorage(tmp_path / "never" / "tier")).committed()
    assert verify(LocalStorage(tmp_path / "never" / "tier"), info.name) == []
