"""Roots on disks that only one node sees."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_core import CheckpointManager
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Marker
from ckpt_core.errors import IncompatibleCheckpointError, PartialCheckpointError
from ckpt_core.formats.codec import Fields
from ckpt_core.storage import LocalStorage
from tests.distributed import node_jobs as jobs
from tests.kit.ranks import Nodes, run_ranks

pytestmark = pytest.mark.distributed

Found = list[Mapping[str, Any]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nodes")


@pytest.fixture(scope="module")
def found(base: Path) -> Found:
    return run_ranks(jobs.live, Nodes(2, per_node=1), base, timeout_seconds=120)


def both(found: Found, what: str) -> list[Any]:
    return [each[what] for each in found]


def test_a_checkpoint_on_the_disks_of_two_nodes_is_resumed_from_both(found: Found):
    assert both(found, "resumed") == [(2, True)] * 2


def test_every_node_keeps_and_prunes_the_same_checkpoints_and_leaves_nothing_else(found: Found):
    first, second = both(found, "names")
    assert first == second == [".ckpt-suite", "step-000000002"]


def test_the_coordinator_alone_keeps_the_journal_for_all_ranks(found: Found):
    assert both(found, "journal") == [[("start", 2), ("end", 2)], []]


def test_ranks_that_moved_to_another_node_find_their_files(found: Found):
    assert both(found, "moved") == both(found, "moved back") == [(3, True)] * 2


def test_a_damaged_copy_of_what_every_disk_has_costs_no_checkpoint(found: Found):
    for told in both(found, "copy damaged"):
        assert told == [((3, True), True, False)] * len(jobs.COPIES) * 2


def test_a_lost_node_is_told_at_the_resume_and_nothing_starts_afresh(found: Found):
    for told in both(found, "node lost"):
        assert "step-000000003 is part of a checkpoint on the disks of 2 nodes" in told
        assert "start on the nodes that saved it" in told


def test_the_first_save_says_what_a_lost_node_loses_unless_something_outlives_it(found: Found):
    (first, second), lost = both(found, "warnings"), "when one node is lost, no checkpoint there can be"
    assert [lost in line for line in first] == [True]
    assert second == []
    assert not any(lost in line for line in found[0]["warnings with twins"])
    assert not any(lost in line for line in found[0]["warnings with upload"])


def test_twins_lie_on_the_disk_of_another_node_so_that_one_node_may_be_lost(found: Found):
    assert both(found, "node lost, twins") == [(1, True)] * 2


def test_after_a_lost_node_only_what_it_had_is_read_from_the_durable_tier(found: Found):
    assert both(found, "node lost, upload") == [(2, True)] * 2
    assert both(found, "went on") == [(3, True)] * 2


def test_the_disk_of_the_lost_node_gets_its_part_again_from_the_durable_tier(found: Found):
    assert both(found, "repaired") == [(True, (2, True))] * 2


def test_a_file_damaged_on_the_disk_of_one_node_is_replaced_and_the_mark_removed(found: Found):
    assert both(found, "damaged, upload") == [(2, True)] * 2
    assert both(found, "repaired again") == [(True, (2, True), {})] * 2


def test_the_copy_in_one_place_is_a_checkpoint_for_older_readers(found: Found):
    assert both(found, "format of the copy") == [2, 2]


def test_the_disk_of_one_node_is_called_a_part_and_not_damaged(found: Found, base: Path, capsys: Any):
    alone = str(base / "alone")
    assert main(["ls", alone]) == 0
    assert "part of a checkpoint on the disks of 2 nodes" in capsys.readouterr().out
    for place in ([alone], [alone, "--step", "3"], [alone, "--all"], [f"{alone}/step-000000003"]):
        assert main(["verify", *place]) == 0
        assert "part of a checkpoint" in capsys.readouterr().out
    assert not (base / "alone" / ".ckpt-suite/damaged.json").exists()
    with pytest.raises(PartialCheckpointError), CheckpointManager(alone) as checkpoints:
        checkpoints.load({"x": torch.zeros(1)}, step=3)


def test_a_lost_file_of_a_part_is_damage(found: Found, base: Path, tmp_path: Path, capsys: Any):
    shutil.copytree(base / "alone", tmp_path / "alone")
    (lost,) = (tmp_path / "alone" / "step-000000003").glob("__*_0.distcp")
    lost.unlink()
    assert main(["verify", f"{tmp_path}/alone/step-000000003"]) == 1
    assert "missing" in capsys.readouterr().out


def test_a_reader_that_knows_no_parts_refuses_one(found: Found, base: Path):
    content = (base / "alone" / "step-000000003" / "COMMITTED").read_bytes()
    assert Marker.from_bytes(content).groups == 2
    with pytest.raises(IncompatibleCheckpointError, match="upgrade"), Fields.parse(content, source="x"):
        pass
    assert json.loads(content)["format_version"] == 3
    assert Catalog(LocalStorage(base / "alone")).committed() == []


def test_a_node_that_cannot_write_is_named_on_every_rank_by_the_same_error(found: Found):
    first, second = both(found, "refused")
    assert first == second
    full, read_only, unreadable, file = first
    assert full.startswith(
        "full: ConfigError: rank 1: checkpoints cannot be written to /disk/of/the/node/run"
    )
    assert "no space" in full
    assert "Free space there" in full
    assert "ConfigError: rank 1: checkpoints cannot be written" in read_only
    assert "CoordinationError" in unreadable
    assert "rank 1" in unreadable
    assert "ConfigError: rank 1: checkpoints cannot be written" in file
    assert "a file is where the checkpoint root should be" in file
