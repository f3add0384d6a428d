"""Who marks damaged checkpoints, and that a mark which cannot be written stops nobody."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointExistsError, CheckpointManager, KeepLatest
from ckpt_core.commit import Catalog, Owner
from ckpt_core.coordination import Solo
from ckpt_core.root._ownership import Ownership
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.ranks import run_ranks
from tests.unit.commit.checkpoints import bucket_like, posix_like, save

ONE, TWO = "step-000000001", "step-000000002"
PROBLEM = "__0_0.distcp: missing"


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request):
    made = request.param()
    save(made, 1)
    save(made, 2)
    return made


@pytest.fixture
def ownership(storage):
    made = Ownership(storage, Solo())
    yield made
    made.release()


def marked(storage):
    infos = Catalog(storage).committed(abandoned=True)
    return {info.name: info.damaged for info in infos if info.damaged is not None}


def test_damage_is_marked_with_its_words_once_the_root_is_owned(storage, ownership):
    ownership.note_damaged({ONE: PROBLEM})
    assert marked(storage) == {}
    ownership.take()
    ownership.note_damaged({ONE: PROBLEM})
    ownership.note_damaged({TWO: "other"})
    assert marked(storage) == {ONE: PROBLEM, TWO: "other"}
    ownership.note_sound(ONE)
    assert marked(storage) == {TWO: "other"}


def test_a_checkpoint_that_is_sound_after_all_is_not_moved_aside(storage, ownership):
    ownership.take()
    ownership.note_damaged({ONE: PROBLEM, TWO: PROBLEM})
    ownership.note_sound(ONE)
    if storage.supports_rename:
        assert not ownership.is_taken(ONE, replace=True)
    else:
        with pytest.raises(CheckpointExistsError):
            ownership.clear_name(ONE, 1, replace=True)
    assert ownership.is_taken(TWO, replace=True)


def test_what_has_no_readable_marker_needs_no_mark(storage, ownership, caplog):
    storage.replace(f"{ONE}/COMMITTED", b"rotten")
    ownership.take()
    ownership.note_damaged({ONE: "is malformed", TWO: PROBLEM})
    assert marked(storage) == {TWO: PROBLEM}
    assert "could not be marked" not in caplog.text
    assert ownership.is_taken(ONE, replace=True)


def test_a_job_that_has_lost_the_root_marks_nothing(storage, ownership, caplog):
    """Where locks do not work, as on an object store, a second job can take the root: it writes its claim."""
    ownership.take()
    ownership.note_damaged({ONE: PROBLEM})
    storage.replace(".ckpt-suite/writer.json", json.dumps(asdict(Owner.here("job 43"))).encode())
    ownership.note_damaged({TWO: PROBLEM})
    ownership.note_sound(ONE)
    assert marked(storage) == {ONE: PROBLEM}
    assert f"{TWO} is damaged, but could not be marked so" in caplog.text
    assert f"{ONE} verifies, but is still marked" in caplog.text
    assert ownership.is_taken(TWO, replace=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_mark_that_cannot_be_written_is_a_warning_and_resume_goes_on(tmp_path, number, caplog):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((4,), float(step))})
    flip(tmp_path / TWO / "__0_0.distcp")
    full = Fault(method="replace", key=".ckpt-suite/damaged.json", error=OSError(number, "unwell"))
    state = {"w": torch.zeros(4)}
    with CheckpointManager(FaultyStorage(LocalStorage(tmp_path), [full])) as checkpoints:
        assert checkpoints.resume(state) == 1
    assert state["w"].tolist() == [1.0] * 4
    assert f"{TWO} is damaged, but could not be marked so" in caplog.text


def test_what_resume_passed_over_is_marked_and_does_not_push_out_what_is_sound(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, {"w": torch.full((4,), float(step))})
    for step in (2, 3):
        flip(tmp_path / f"step-{step:09d}" / "__0_0.distcp")
    state = {"w": torch.zeros(4)}
    with CheckpointManager(tmp_path, keep=KeepLatest(2)) as checkpoints:
        assert checkpoints.resume(state) == 1
        assert sorted(marked(LocalStorage(tmp_path))) == [TWO, "step-000000003"]
        checkpoints.save(4, state).result()
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 4]
        assert [info.step for info in checkpoints.checkpoints(abandoned=True)] == [1, 2, 3, 4]
        plan = checkpoints.prune(dry_run=True)
    assert ([info.step for info in plan.damaged], set(plan.keep)) == ([2, 3], {1, 4})


def test_a_save_of_the_step_of_a_marked_checkpoint_stands_beside_it_and_is_not_marked(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((4,), float(step))})
    flip(tmp_path / TWO / "__0_0.distcp")
    state = {"w": torch.zeros(4)}
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(state) == 1
        made = checkpoints.save(2, state).result()
        assert [info.name for info in checkpoints.checkpoints()] == [ONE, made.name]
    assert made.name == f"{TWO}.run-{made.lineage.id}"
    assert list(marked(LocalStorage(tmp_path))) == [TWO]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def resume_counting_marks(root: str) -> tuple[int | None, int]:
    storage = FaultyStorage(LocalStorage(root))
    with CheckpointManager(storage) as checkpoints:
        step = checkpoints.resume({"w": torch.zeros(4)})
    return step, sum(
        o.key == ".ckpt-suite/damaged.json" and o.method == "replace" for o in storage.operations
    )


@pytest.mark.distributed
def test_of_all_ranks_only_the_coordinator_writes_the_mark(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": torch.full((4,), float(step))})
    flip(tmp_path / TWO / "__0_0.distcp")
    assert run_ranks(resume_counting_marks, 2, str(tmp_path)) == [(1, 1), (1, 0)]
    assert list(marked(LocalStorage(tmp_path))) == [TWO]
