"""What `CheckpointManager` does when storage fails, bytes rot, or the state cannot be held."""

from __future__ import annotations

import errno
import gc
import logging
from fractions import Fraction

import pytest
import torch

from ckpt_core import CheckpointManager, KeepLatest
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    SaveError,
    UnsafeCheckpointError,
)
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import InMemorySink
from ckpt_core.testing import Fault, FaultyStorage
from tests.unit.training import LONG, Run, assert_equal, children, damage, failing

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def saved(root, *steps: int) -> dict[int, dict[str, torch.Tensor]]:
    """Checkpoints of a run at these steps, and what it was then."""
    run, found = Run.make(), {}
    with CheckpointManager(root) as checkpoints:
        for step in steps:
            run.step()
            checkpoints.save(step, run.state)
            found[step] = run.tensors()
    return found


def test_a_full_disk_is_told_at_the_next_save_and_the_one_after_it_succeeds(tmp_path):
    saved(tmp_path, 1)
    storage = failing(tmp_path, NO_SPACE)
    with CheckpointManager(storage) as checkpoints:
        failed = checkpoints.save(2, {"a": torch.ones(1)})
        with pytest.raises(SaveError, match=r"step 2 was not saved.*rank 0.*No space left") as caught:
            checkpoints.save(3, {"a": torch.ones(1)})
        assert (caught.value.step, caught.value.phase, list(caught.value.failures)) == (2, "write", [0])
        assert failed.committed.exception(0) is caught.value
        assert [info.step for info in checkpoints.checkpoints()] == [1]
        assert checkpoints.verify(1) == []
        checkpoints.save(3, {"a": torch.ones(1)}).result(LONG)
        assert checkpoints.save(4, {"a": torch.ones(1)}).result(LONG).step == 4
    assert children(tmp_path) == ["step-000000001", "step-000000003", "step-000000004"]


def test_a_step_that_failed_can_be_saved_again(tmp_path):
    with CheckpointManager(failing(tmp_path, NO_SPACE)) as checkpoints:
        checkpoints.save(1, {"a": torch.ones(1)})
        with pytest.raises(SaveError):
            checkpoints.wait()
        assert checkpoints.save(1, {"a": torch.ones(1)}).result(LONG).step == 1


@pytest.mark.parametrize("leave", ["close", "wait", "with", "load", "resume", "prune"])
def test_a_failed_save_is_told_wherever_the_manager_is_asked_next(tmp_path, leave):
    saved(tmp_path, 1)
    checkpoints = CheckpointManager(failing(tmp_path, NO_SPACE))
    checkpoints.save(2, {"a": torch.ones(1)})
    calls = {
        "close": checkpoints.close,
        "wait": checkpoints.wait,
        "with": lambda: checkpoints.__exit__(None, None, None),
        "load": lambda: checkpoints.load({}),
        "resume": lambda: checkpoints.resume({}),
        "prune": checkpoints.prune,
    }
    with pytest.raises(SaveError, match="step 2"):
        calls[leave]()
    checkpoints.close()


@pytest.mark.parametrize("leave", ["close", "wait", "with", "load", "resume", "prune", "save"])
def test_a_failed_save_that_the_handle_has_told_is_not_told_again(tmp_path, leave):
    saved(tmp_path, 1)
    checkpoints = CheckpointManager(failing(tmp_path, NO_SPACE))
    handle = checkpoints.save(2, {"a": torch.ones(1)})
    with pytest.raises(SaveError):
        handle.result(LONG)
    calls = {
        "close": checkpoints.close,
        "wait": checkpoints.wait,
        "with": lambda: checkpoints.__exit__(None, None, None),
        "load": lambda: checkpoints.load({}),
        "resume": lambda: checkpoints.resume({}),
        "prune": checkpoints.prune,
        "save": lambda: checkpoints.save(2, {"a": torch.ones(1)}).result(LONG),
    }
    calls[leave]()
    checkpoints.close()


def test_an_exception_that_ends_the_with_block_is_not_noted_beside_itself(tmp_path):
    with pytest.raises(SaveError) as caught, CheckpointManager(failing(tmp_path, NO_SPACE)) as checkpoints:
        checkpoints.save(2, {"a": torch.ones(1)}).result(LONG)
    assert not getattr(caught.value, "__notes__", None)


def test_a_failed_save_does_not_hide_the_exception_of_the_loop(tmp_path):
    def job() -> None:
        with CheckpointManager(failing(tmp_path, NO_SPACE)) as checkpoints:
            checkpoints.save(2, {"a": torch.ones(1)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        job()
    assert any("step 2 was not saved" in note for note in caught.value.__notes__)


def test_training_goes_on_after_a_failed_save_if_errors_are_to_be_warnings(tmp_path, caplog):
    with CheckpointManager(failing(tmp_path, NO_SPACE), on_error="warn") as checkpoints:
        failed = checkpoints.save(1, {"a": torch.ones(1)})
        checkpoints.save(2, {"a": torch.ones(1)})
        checkpoints.wait()
        assert isinstance(failed.committed.exception(0), SaveError)
        assert [info.step for info in checkpoints.checkpoints()] == [2]
    assert "training continues without the checkpoint of step 1" in caplog.text


@pytest.mark.parametrize(
    "fault",
    [
        Fault(method="create", key=".incomplete-*/__0_0.distcp", error=NO_SPACE),
        Fault(method="write", key="*.distcp", error=NO_SPACE, nth=0),
        Fault(method="close", key="*.distcp", error=OSError(errno.EIO, "Input/output error")),
        Fault(method="create", key="*/rank-00000.json", error=NO_SPACE),
        Fault(method="create", key="*/.metadata", error=NO_SPACE),
        Fault(method="create", key="*/manifest.json", error=NO_SPACE),
        Fault(method="close", key="*/COMMITTED", error=NO_SPACE),
        Fault(method="sync_directory", key=".incomplete-*", error=OSError(errno.EIO, "Input/output error")),
        Fault(method="rename", key="*", error=OSError(errno.EIO, "Input/output error")),
    ],
    ids=lambda fault: f"{fault.method} {fault.key}",
)
def test_whatever_fails_in_a_save_nothing_is_committed_and_nothing_is_lost(tmp_path, fault):
    before = saved(tmp_path, 1)[1]
    with CheckpointManager(FaultyStorage(LocalStorage(tmp_path), [fault]), keep=KeepLatest(1)) as checkpoints:
        run = Run.make(seed=8)
        checkpoints.save(2, run.state)
        with pytest.raises(SaveError, match=r"step 2 was not saved.*rank 0"):
            checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1]
    assert children(tmp_path) == ["step-000000001"]
    resumed = Run.make(seed=3)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(resumed.state) == 1
        checkpoints.save(2, resumed.state).result(LONG)
    assert_equal(resumed.tensors(), before)


def test_a_prune_that_fails_leaves_the_new_checkpoint_and_is_tried_again(tmp_path, caplog):
    sink, denied = InMemorySink(), OSError(errno.EACCES, "Permission denied")
    storage = FaultyStorage(
        LocalStorage(tmp_path), [Fault(method="rename", key="* -> .trash-*", error=denied, nth=0)]
    )
    with CheckpointManager(storage, keep=KeepLatest(1), sinks=[sink]) as checkpoints:
        checkpoints.save(1, {"a": 1})
        checkpoints.save(2, {"a": 1})
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2]
        checkpoints.save(3, {"a": 1})
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints()] == [3]
    assert "were not all removed" in caplog.text
    assert [event.name for event in sink.events if event.name == "prune.failed"] == ["prune.failed"]


@pytest.mark.parametrize(
    "file", ["__0_0.distcp", ".metadata", "rank-00000.json", "shared.json", "manifest.json"]
)
def test_resume_passes_over_a_damaged_checkpoint_aloud_and_takes_the_one_before(tmp_path, caplog, file):
    then = saved(tmp_path, 1, 2, 3)
    size = (tmp_path / "step-000000003" / file).stat().st_size
    damage(tmp_path, "step-000000003", file, place=size // 2)
    run, sink = Run.make(seed=5), InMemorySink()
    with CheckpointManager(tmp_path, sinks=[sink]) as checkpoints, caplog.at_level(logging.ERROR):
        assert checkpoints.resume(run.state) == 2
        assert_equal(run.tensors(), then[2])
        assert "step-000000003" in caplog.text
        assert file in caplog.text
        assert [event.attributes["step"] for event in sink.events if event.name == "load.rejected"] == [3]
        run.step()
        made = checkpoints.save(3, run.state).result(LONG)
        assert checkpoints.verify(3) == []
    assert made.name == f"step-000000003.run-{made.lineage.id}"
    assert "step-000000003" in children(tmp_path), "it is kept for a person to look at"
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(Run.make().state) == 3


def test_if_every_checkpoint_is_damaged_nothing_is_loaded_and_all_are_named(tmp_path):
    saved(tmp_path, 1, 2)
    for name in ("step-000000001", "step-000000002"):
        damage(tmp_path, name)
    run = Run.make(seed=5)
    before = run.tensors()
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CorruptCheckpointError, match=r"every committed.*step-000000002, step-000000001"):
            checkpoints.resume(run.state)
        with pytest.raises(
            CorruptCheckpointError, match=r"step-000000001 is damaged.*__0_0\.distcp"
        ) as caught:
            checkpoints.load(run.state, step=1)
    assert [failure.path for failure in caught.value.failures] == ["__0_0.distcp"]
    assert_equal(run.tensors(), before)


def test_a_missing_file_is_damage_too(tmp_path):
    saved(tmp_path, 1, 2)
    (tmp_path / "step-000000002" / "__0_0.distcp").unlink()
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(Run.make().state) == 1


def test_a_checkpoint_that_cannot_be_read_is_passed_over_aloud_and_left_where_it_is(tmp_path, caplog):
    saved(tmp_path, 1, 2)
    unreadable = Fault(
        method="read_into", key="step-000000002/*.distcp", error=OSError(errno.EIO, "I/O error")
    )
    with CheckpointManager(FaultyStorage(LocalStorage(tmp_path), [unreadable])) as checkpoints:
        assert checkpoints.resume(Run.make().state) == 1
    assert "step-000000002" in caplog.text
    assert "I/O error" in caplog.text
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.resume(Run.make().state) == 2


def test_a_root_that_cannot_be_listed_is_an_error_and_not_an_empty_root(tmp_path):
    saved(tmp_path, 1)
    down = Fault(method="list", key="", error=OSError(errno.EIO, "I/O error"))
    run = Run.make(seed=5)
    before = run.tensors()
    storage = FaultyStorage(LocalStorage(tmp_path), [down])
    with CheckpointManager(storage) as checkpoints, pytest.raises(CheckpointError, match="I/O error"):
        checkpoints.resume(run.state)
    assert_equal(run.tensors(), before)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [quantised, lambda: torch.eye(3).to_sparse(), lambda: torch.empty(3, device="meta")],
    ids=["quantised", "sparse", "meta"],
)
def test_tensors_that_no_checkpoint_can_hold_are_refused_before_anything_is_written(tmp_path, make):
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises((ConfigError, SaveError), match=r"layer\.weight is "):
            checkpoints.save(1, {"layer": {"weight": make()}})
        assert children(tmp_path) == []
        assert checkpoints.save(1, {"layer": {"weight": torch.ones(1)}}).result(LONG).step == 1


def test_a_capture_that_fails_is_told_at_once_and_nothing_is_written(tmp_path):
    class Broken:
        def state_dict(self) -> dict[str, object]:
            raise KeyError("lost")

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(SaveError, match=r"step 1 was not saved.*phase plan.*rank 0: KeyError: 'lost'"):
            checkpoints.save(1, {"broken": Broken()})
        assert children(tmp_path) == []


def test_what_only_pickle_can_hold_is_refused_at_load_unless_allowed(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"w": torch.ones(2), "odd": Fraction(1, 3)})
        target = {"w": torch.zeros(2), "odd": None}
        with pytest.raises(UnsafeCheckpointError, match=r"odd.*allow_pickle=True"):
            checkpoints.load(target)
        assert target["w"].tolist() == [0, 0]
        # What is not asked for is not opened.
        checkpoints.load(target, items=["w"])
        assert target["w"].tolist() == [1, 1]
    with CheckpointManager(tmp_path, allow_pickle=True) as checkpoints:
        checkpoints.load(target)
        assert target["odd"] == Fraction(1, 3)


def test_a_torn_save_of_a_crashed_job_is_cleared_away_and_never_counted(tmp_path, caplog):
    saved(tmp_path, 1)
    torn = tmp_path / ".incomplete-0123abcd-step-000000002"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"half")
    with CheckpointManager(tmp_path) as checkpoints:
        assert [info.step for info in checkpoints.checkpoints()] == [1]
        assert checkpoints.resume(Run.make().state) == 1
    assert children(tmp_path) == ["step-000000001"]
    assert torn.name in caplog.text


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_after_a_load_and_after_one_that_fails(tmp_path, enabled):
    """It rests meanwhile: the objects of a plan are no garbage."""
    saved(tmp_path, 1)
    run, had = Run.make(), gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.load(run.state)
            assert gc.isenabled() == enabled
            with pytest.raises(CheckpointError):
                checkpoints.load({"other": torch.ones(1)})
            assert gc.isenabled() == enabled
    finally:
        (gc.enable if had else gc.disable)()
