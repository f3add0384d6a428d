"""How `CheckpointManager` behaves beside saving and loading: waiting, telling, closing, refusing."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest
import torch

from ckpt_core import (
    CheckpointManager,
    CheckpointOptions,
    EverySteps,
    KeepLatest,
    OnPreemption,
)
from ckpt_core.errors import (
    CheckpointExistsError,
    ConfigError,
    RootBusyError,
    SaveError,
)
from ckpt_core.root import _ownership
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import InMemorySink
from tests.unit.training import LONG, Gate, children, failing


def steps(checkpoints: CheckpointManager) -> list[int]:
    return [info.step for info in checkpoints.checkpoints()]


def test_back_pressure_skip_returns_none_while_a_save_is_in_flight(tmp_path):
    gate, sink = Gate(), InMemorySink()
    storage = gate.before(LocalStorage(tmp_path))
    with CheckpointManager(storage, back_pressure="skip", sinks=[sink]) as checkpoints:
        first = checkpoints.save(1, {"a": torch.ones(1)})
        gate.reached.wait(LONG)
        assert checkpoints.save(2, {"a": torch.ones(1)}) is None
        gate.open()
        first.result(LONG)
        assert checkpoints.save(3, {"a": torch.ones(1)}).result(LONG).step == 3
        assert steps(checkpoints) == [1, 3]
    assert [event.attributes["step"] for event in sink.events if event.name == "save.skipped"] == [2]


@pytest.mark.reliability
def test_back_pressure_never_leaves_out_the_save_before_a_preemption(tmp_path):
    gate = Gate()
    options = {"save": OnPreemption(("SIGUSR1",)), "back_pressure": "skip"}
    with CheckpointManager(gate.before(LocalStorage(tmp_path)), **options) as checkpoints:
        checkpoints.save(1, {"a": torch.ones(1)})
        gate.reached.wait(LONG)
        signal.raise_signal(signal.SIGUSR1)
        assert checkpoints.due() == "preemption"
        handles = []
        last = threading.Thread(
            target=lambda: handles.append(checkpoints.maybe_save(2, {"a": torch.ones(1)}))
        )
        last.start()
        last.join(0.3)  # long enough for a save that is left out to be left out
        gate.open()
        last.join()
        assert handles[0].result(LONG).step == 2
        assert checkpoints.maybe_save(3, {"a": torch.ones(1)}) is None
        assert checkpoints.preempted
    assert steps(CheckpointManager(tmp_path)) == [1, 2]


@pytest.mark.reliability
def test_a_failed_save_does_not_keep_the_one_before_a_preemption_from_being_made(tmp_path, caplog):
    storage = failing(tmp_path, OSError(28, "No space left on device"))
    with CheckpointManager(storage, save=OnPreemption(("SIGUSR1",))) as checkpoints:
        checkpoints.save(1, {"a": torch.ones(1)})
        signal.raise_signal(signal.SIGUSR1)
        assert checkpoints.maybe_save(2, {"a": torch.ones(1)}).result(LONG).step == 2
    assert "No space left on device" in caplog.text
    assert steps(CheckpointManager(tmp_path)) == [2]


def test_two_arenas_let_two_saves_be_in_flight(tmp_path):
    gate = Gate()
    storage = gate.before(LocalStorage(tmp_path))
    with CheckpointManager(storage, back_pressure="skip", arenas=2) as checkpoints:
        saved = [checkpoints.save(step, {"a": torch.full((9,), step)}) for step in (1, 2, 3)]
        assert saved[2] is None
        gate.open()
        checkpoints.wait()
        for step in (1, 2):
            loaded = {"a": torch.zeros(9, dtype=torch.int64)}
            checkpoints.load(loaded, step=step)
            assert loaded["a"].tolist() == [step] * 9


def test_a_state_that_does_not_fit_into_staging_memory_fails_its_save_with_figures(tmp_path):
    with CheckpointManager(tmp_path, staging_memory="1 MiB") as checkpoints:
        handle = checkpoints.save(1, {"a": torch.ones(1 << 20)})
        with pytest.raises(SaveError, match=r"needs 4\.0 MiB more .* take only 1\.0 MiB"):
            checkpoints.wait()
        assert handle.staged.exception(LONG) is not None
        assert checkpoints.save(2, {"a": torch.ones(9)}).result(LONG).step == 2


def test_back_pressure_wait_saves_everything(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        for step in range(5):
            checkpoints.save(step, {"a": torch.ones(1)})
        checkpoints.wait()
        assert steps(checkpoints) == [0, 1, 2, 3, 4]


def test_a_handle_tells_when_staged_and_when_committed(tmp_path):
    gate = Gate()
    with CheckpointManager(gate.before(LocalStorage(tmp_path))) as checkpoints:
        handle = checkpoints.save(5, {"a": torch.ones(1)}, metrics={"x": 2})
        assert handle.staged.result(LONG) is None
        assert not handle.done()
        with pytest.raises(TimeoutError):
            handle.result(0.01)
        gate.open()
        info = handle.result(LONG)
    assert (info.step, info.name, info.metrics) == (5, "step-000000005", {"x": 2})
    assert handle.uploaded.result(0) == info


@pytest.mark.parametrize(
    "call",
    [
        lambda m: m.save(1, {"a": 1}),
        lambda m: m.maybe_save(1, {"a": 1}),
        lambda m: m.load({"a": 1}),
        lambda m: m.resume({"a": 1}),
        lambda m: m.due(1),
        lambda m: m.prune(),
        lambda m: m.pin(1, "x"),
        lambda m: m.unpin(1),
    ],
    ids=["save", "maybe_save", "load", "resume", "due", "prune", "pin", "unpin"],
)
def test_a_closed_manager_says_so(tmp_path, call):
    checkpoints = CheckpointManager(tmp_path)
    checkpoints.close()
    checkpoints.close()
    with pytest.raises(ConfigError, match="closed; make a new one"):
        call(checkpoints)


def test_an_exception_in_the_loop_passes_and_the_save_in_flight_is_finished(tmp_path):
    def job() -> None:
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(1, {"a": torch.ones(1)})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        job()
    assert children(tmp_path) == ["step-000000001"]


def test_the_root_is_given_back_on_close_and_refused_before(tmp_path):
    first, second = CheckpointManager(tmp_path), CheckpointManager(tmp_path)
    first.save(1, {"a": 1})
    first.wait()
    _ownership._held.clear()  # the first stands for one of another process
    with pytest.raises(RootBusyError, match="is held by"):
        second.save(2, {"a": 1})
    target = {"a": None}
    second.load(target)
    assert target == {"a": 1}
    first.close()
    assert second.save(2, {"a": 1}).result(LONG).step == 2
    second.close()


def test_events_tell_the_story_of_a_save_and_a_load(tmp_path):
    sink = InMemorySink()
    with CheckpointManager(tmp_path, keep=KeepLatest(1), sinks=[sink]) as checkpoints:
        checkpoints.save(1, {"a": torch.ones(1000)})
        checkpoints.save(2, {"a": torch.ones(1000)})
        checkpoints.wait()
        checkpoints.load({"a": torch.ones(1000)})
    finished = [event.name for event in sink.events if event.phase == "finished"]
    assert sorted(finished) == sorted(
        ["save.stall", "save.write", "save.commit"] * 2 + ["prune.remove", "load", "load.verify", "load.read"]
    )
    (first, second) = sink.finished("save.write")
    assert (first.attributes["step"], second.attributes["step"]) == (1, 2)
    assert 4000 <= first.attributes["size_bytes"] < 4000 + 8192
    assert all(event.duration_seconds >= 0 for event in sink.finished("save.stall"))


def test_why_a_step_was_saved_is_in_its_manifest(tmp_path):
    with CheckpointManager(tmp_path, save=EverySteps(2)) as checkpoints:
        assert checkpoints.maybe_save(1, {"a": 1}) is None
        checkpoints.maybe_save(2, {"a": 1}, annotations={"run": "x"})
        checkpoints.wait()
    content = (tmp_path / "step-000000002" / "manifest.json").read_text()
    assert '"reason":"every 2 steps"' in content
    assert '"run":"x"' in content


def test_a_signal_is_noticed_and_the_handler_put_back_on_close(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    with CheckpointManager(tmp_path, save=OnPreemption(signals=("SIGUSR1",))) as checkpoints:
        assert checkpoints.maybe_save(1, {"a": 1}) is None
        signal.raise_signal(signal.SIGUSR1)
        assert checkpoints.maybe_save(2, {"a": 1}).step == 2
        assert checkpoints.preempted
        assert checkpoints.maybe_save(3, {"a": 1}) is None
    assert signal.getsignal(signal.SIGUSR1) is before


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda root: CheckpointManager(root, options=CheckpointOptions(), verify=False), "not both: verify"),
        (lambda root: CheckpointManager(root, sav=EverySteps(1)), "sav"),
        (lambda root: CheckpointManager(root).save(-1, {"a": 1}), "step"),
        (lambda root: CheckpointManager(root).save(1, [1, 2]), "list is no training state"),
        (lambda root: CheckpointManager(root).save(1, {"a": 1}, name="a/b"), "a/b"),
        (lambda root: CheckpointManager(root).save(1, {"a": 1}, name=".."), r"\.\."),
        (lambda root: CheckpointManager(root).save(1, {"a": 1}, annotations={"x": object()}), "annotations"),
    ],
    ids=["two ways", "unknown", "negative step", "no state", "path", "parent", "annotations"],
)
def test_wrong_arguments_are_refused_by_name(tmp_path, make, told):
    with pytest.raises((ConfigError, SaveError), match=told):
        make(tmp_path / "root")


def test_a_root_that_is_a_file_is_refused_with_the_reason(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written to"):
        CheckpointManager(tmp_path / "file").save(1, {"a": 1})


def test_a_step_saved_again_after_a_rewind_is_not_taken_for_the_first_save(tmp_path):
    state = {"w": torch.zeros(2)}
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, state)
        first = checkpoints.save(2, state)
        assert checkpoints.save(2, state) is first
        checkpoints.load(state, step=1)
        second = checkpoints.save(2, state)
        assert (second is first, second.name) == (False, f"step-000000002.run-{second.result().lineage.id}")
        checkpoints.load(state, step=2)
        with pytest.raises(CheckpointExistsError):
            checkpoints.save(2, state)
