"""Parts of checkpoints that a lost node has left on the disks of others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ckpt_core import CheckpointManager, CheckpointOptions, KeepEvery, KeepLatest, Upload
from ckpt_core.commit import Catalog, begin, commit
from ckpt_core.coordination import Solo
from ckpt_core.names import step_name
from ckpt_core.root import Job
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import Telemetry
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.tiers import FurtherTier, Tier
from ckpt_core.tiers.uploading import RunExports, TierUploads
from tests.unit.commit.checkpoints import FILES, manifest_of, save, write_files

LOST = "__1_0.distcp"
NEWEST = KeepLatest(1)


def save_part(storage: LocalStorage, step: int) -> None:
    """Commit a checkpoint on the disks of two nodes, and lose that of the second."""
    manifest = manifest_of(step)
    manifest = replace(manifest, groups=tuple(int(entry.path == LOST) for entry in manifest.files))
    working = begin(storage, step_name(step), manifest.save_id)
    write_files(storage, working)
    storage.num_disks = 2
    commit(storage, working, step_name(step), manifest)
    storage.num_disks = 1
    storage.delete(f"{step_name(step)}/{LOST}")


@pytest.fixture
def disk(tmp_path) -> LocalStorage:
    return LocalStorage(tmp_path / "run")


def pruned(storage: LocalStorage, keep=NEWEST) -> list[str]:
    with CheckpointManager(storage, keep=keep) as manager:
        manager.prune()
    return sorted(name for name in storage.directories("") if name.startswith("step-"))


def test_a_part_goes_when_retention_would_remove_it_and_a_newer_checkpoint_is_whole(disk):
    save_part(disk, 1)
    save(disk, 2)
    assert [info.step for info in Catalog(disk).survey().parts] == [1]
    assert pruned(disk) == [step_name(2)]


def test_a_part_stays_while_it_is_the_newest(disk):
    save(disk, 1)
    save_part(disk, 2)
    assert pruned(disk) == [step_name(1), step_name(2)]


def test_a_part_stays_if_no_newer_checkpoint_is_whole(disk):
    save(disk, 1)
    save_part(disk, 2)
    save(disk, 3)
    content = bytearray(FILES["__0_0.distcp"])
    content[7] ^= 1
    disk.replace(f"{step_name(3)}/__0_0.distcp", bytes(content))
    # Step 1 is whole and older: if the lost node came back, step 2 would be the newest.
    assert pruned(disk) == [step_name(1), step_name(2), step_name(3)]


def test_a_part_that_retention_would_keep_if_it_were_whole_stays(disk):
    save_part(disk, 10)
    save_part(disk, 11)
    save(disk, 12)
    assert pruned(disk, KeepEvery(10)) == [step_name(10), step_name(12)]


def test_a_part_goes_when_its_step_was_saved_again(disk):
    save_part(disk, 1)
    save(disk, 1, name=f"{step_name(1)}.run-0123abcd")
    save(disk, 2)
    assert pruned(disk, KeepLatest(2)) == [f"{step_name(1)}.run-0123abcd", step_name(2)]


AGAIN = f"{step_name(2)}.run-0123abcd"


@pytest.mark.parametrize("older", [None, save, save_part])
def test_a_part_of_the_newest_step_goes_when_that_was_saved_again(disk, older):
    if older is not None:
        older(disk, 1)
    save_part(disk, 2)
    save(disk, 2, name=AGAIN)
    assert pruned(disk, KeepLatest(5)) == [*[step_name(1)] * (older is not None), AGAIN]


def test_a_part_of_the_newest_step_stays_beside_a_replacement_that_is_damaged(disk):
    save(disk, 1)
    save_part(disk, 2)
    save(disk, 2, name=AGAIN)
    disk.replace(f"{AGAIN}/__0_0.distcp", bytes(len(FILES["__0_0.distcp"])))
    assert pruned(disk, KeepLatest(5)) == [step_name(1), step_name(2), AGAIN]


def test_a_pinned_part_stays(disk):
    save_part(disk, 1)
    save(disk, 2)
    Catalog(disk).pin(1, "for the paper", ahead=True)
    assert pruned(disk) == [step_name(1), step_name(2)]


def test_a_part_that_is_pruned_while_another_process_lists_the_root_is_no_error(disk):
    save_part(disk, 1)
    save(disk, 2)
    markers = Fault(
        method="open",
        key=f"{step_name(1)}/manifest.json",
        after=lambda _: disk.delete(f"{step_name(1)}/COMMITTED"),
    )
    survey = Catalog(FaultyStorage(disk, [markers])).survey()
    assert [info.step for info in survey.committed] == [2]
    assert survey.parts == []


def test_a_checkpoint_of_which_the_root_has_a_part_and_a_tier_all_is_one_to_continue_from(disk, tmp_path):
    save_part(disk, 1)
    whole = LocalStorage(tmp_path / "tier")
    manifest = Catalog(disk).manifest(step_name(1))
    working = begin(whole, step_name(1), manifest.save_id)
    write_files(whole, working)
    commit(whole, working, step_name(1), manifest)
    nearest, further_tier = Tier("disk", disk), FurtherTier("tier", whole)
    job = Job(storage=disk, coordinator=Solo(), telemetry=Telemetry())
    options = CheckpointOptions(upload=Upload(tmp_path / "tier"))
    uploads = TierUploads(job, options, [nearest, further_tier], RunExports(job, options, ""))
    further, present = uploads.claim(nearest.survey())
    uploads.close(leave=True, preempted=False)
    assert [(info.step, info.lineage, info.abandoned) for info in further] == [(1, present, False)]


def test_a_save_of_the_step_of_a_part_gets_a_name_of_its_own(disk):
    save_part(disk, 2)
    with CheckpointManager(disk) as manager:
        manager.save(2, {"w": torch.zeros(3)}).result(60)
    (made,) = Catalog(disk).committed()
    assert made.step == 2
    assert made.name.startswith(f"{step_name(2)}.run-")
    assert [info.name for info in Catalog(disk).survey().parts] == [step_name(2)]
