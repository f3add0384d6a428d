"""What two jobs, a pruner, a reader, a predecessor that still lives and a clock may do to one another."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ckpt_core import (
    CheckpointError,
    CheckpointManager,
    CheckpointNotFoundError,
    EverySeconds,
    KeepFor,
    KeepLatest,
    LoadError,
    RootBusyError,
)
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Owner, remove, verify
from ckpt_core.root import _ownership
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.guarantees.isolation_jobs import STEPS
from tests.unit.commit.checkpoints import save as save_small

pytestmark = pytest.mark.reliability

JOBS = Path(__file__).with_name("isolation_jobs.py")
DAY = 86_400.0
COMMITTED = "when it is committed"


class Process:
    """A job of `isolation_jobs`, started and ready."""

    def __init__(self, job, root):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)}
        self._child = subprocess.Popen(
            [sys.executable, str(JOBS), job, str(root)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._child.stdout.readline() == "ready\n"
        self.pid = self._child.pid

    def go_on(self):
        self._child.stdin.write("\n")
        self._child.stdin.flush()

    def end(self):
        _, errors = self._child.communicate(timeout=60)
        assert self._child.returncode == 0, errors

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._child.poll() is None:
            self.go_on()
        self.end()


@pytest.fixture
def without_locks(monkeypatch):
    """A filesystem that cannot lock, such as NFS without its lock service."""

    def refused(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", refused)


def state_of(number):
    return {"x": torch.full((5000,), float(number)), "number": number}


def number_in(state):
    """The one number that all of a state is made of."""
    numbers = {*state["x"].tolist(), float(state["number"])}
    assert len(numbers) == 1, f"a mixture: {numbers}"
    return numbers.pop()


def saved(root, *numbers, **options):
    with CheckpointManager(root, **options) as checkpoints:
        if checkpoints.latest() is not None:
            checkpoints.continue_from()
        for number in numbers:
            checkpoints.save(number, state_of(number)).result()


def steps(root):
    storage = LocalStorage(root)
    infos = Catalog(storage).committed()
    assert [verify(storage, info.name) for info in infos] == [[]] * len(infos)
    return [info.step for info in infos]


def test_a_second_job_is_refused_and_told_who_holds_the_root(tmp_path):
    saved(tmp_path, 1)
    with Process("hold", tmp_path) as holder, CheckpointManager(tmp_path) as checkpoints:
        told = rf"is being written by train\.py \(host .*, pid {holder.pid}, started .*another root"
        with pytest.raises(RootBusyError, match=told):
            checkpoints.save(2, state_of(2))
        with pytest.raises(RootBusyError, match=told):
            checkpoints.resume(state_of(0))
        state = state_of(0)
        assert checkpoints.load(state).step == 1, "anybody may read"
        holder.go_on()
        holder.end()
        checkpoints.save(2, state_of(2)).result()
    assert steps(tmp_path) == [1, 2]


def test_a_prune_by_hand_beside_a_live_job_is_refused_and_removes_nothing(tmp_path, capsys):
    saved(tmp_path, 1, 2, 3)
    with Process("hold", tmp_path) as holder:
        assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 1
        assert f"pid {holder.pid}" in capsys.readouterr().err
        assert main(["prune", str(tmp_path), "--keep-latest", "1", "--dry-run"]) == 0
        assert steps(tmp_path) == [1, 2, 3]
    assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 0
    assert steps(tmp_path) == [3]


def test_without_locks_a_prune_by_hand_asks_before_it_stops_a_job(tmp_path, without_locks, capsys):
    with CheckpointManager(tmp_path) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, state_of(number)).result()
        assert main(["prune", str(tmp_path), "--keep-latest", "1"]) == 1
        assert "add --take-over" in capsys.readouterr().err
        checkpoints.save(3, state_of(3)).result()
        assert main(["prune", str(tmp_path), "--keep-latest", "1", "--take-over"]) == 0
        checkpoints.save(4, state_of(4))
        with pytest.raises(RootBusyError, match="no longer belongs to this job"):
            checkpoints.wait()
    assert steps(tmp_path) == [3]


def operations_of(root, act):
    storage = FaultyStorage(LocalStorage(root))
    act(storage)
    return storage.operations


def read_two(storage):
    state = state_of(0)
    with CheckpointManager(storage) as reader:
        reader.load(state, step=2)
    return number_in(state)


# A point takes tens of milliseconds, and many are alike; both together are all.
SAMPLED = [
    pytest.param({0}, id="a sample"),
    pytest.param({1, 2}, id="the others", marks=pytest.mark.slow),
]


def chosen(points, sample):
    """The last of the points in time, and those of the sample before it."""
    return [point for at, point in enumerate(reversed(points)) if at == 0 or at % 3 in sample]


@pytest.mark.parametrize("sample", SAMPLED)
def test_a_reader_of_what_is_being_pruned_gets_all_of_it_or_is_told(tmp_path, sample):
    saved(tmp_path / "template", 1, 2, 3)
    endings = []
    for operation in chosen(operations_of(tmp_path / "template", read_two), sample):
        root = tmp_path / f"at-{operation.number}"
        shutil.copytree(tmp_path / "template", root)
        local = LocalStorage(root)
        storage = FaultyStorage(
            local,
            [Fault(nth=operation.number, before=lambda _, at=local: remove(at, Catalog(at).find(step=2)))],
        )
        state, ending = state_of(0), ""
        with CheckpointManager(storage) as reader:
            try:
                reader.load(state, step=2)
            except (CheckpointNotFoundError, LoadError) as error:
                ending = type(error).__name__
        endings.append(ending)
        if ending != "LoadError":
            assert number_in(state) == (0 if ending else 2), f"{operation}: {ending}"
        assert Catalog(local).committed()[-1].damaged is None
    # Not half-way: what was verified stays open until it is read.
    assert set(endings) == {"", "CheckpointNotFoundError"}


@pytest.mark.parametrize("sample", SAMPLED)
def test_a_reader_of_the_newest_that_is_overtaken_gets_a_newer_one(tmp_path, sample):
    """A job that keeps one checkpoint commits the next, and prunes, while another process loads."""
    saved(tmp_path / "template", 1)

    def read_newest(storage):
        state = state_of(0)
        with CheckpointManager(storage) as reader:
            assert reader.load(state).step == number_in(state)
        return number_in(state)

    found = set()
    for operation in chosen(operations_of(tmp_path / "template", read_newest), sample):
        root = tmp_path / f"at-{operation.number}"
        shutil.copytree(tmp_path / "template", root)
        overtake = Fault(nth=operation.number, before=lambda _, at=root: saved(at, 2, keep=KeepLatest(1)))
        found.add(read_newest(FaultyStorage(LocalStorage(root), [overtake])))
        assert steps(root) == [2]
    assert found == {1, 2}


def test_a_verification_that_is_overtaken_by_a_prune_is_not_told_as_damage(tmp_path):
    saved(tmp_path / "template", 1, 2)
    for operation in operations_of(tmp_path / "template", lambda at: verify(at, "step-000000001")):
        root = tmp_path / f"at-{operation.number}"
        shutil.copytree(tmp_path / "template", root)
        local = LocalStorage(root)
        prune = Fault(nth=operation.number, before=lambda _, at=local: remove(at, Catalog(at).find(step=1)))
        failures = verify(FaultyStorage(local, [prune]), "step-000000001")
        assert [failure.path for failure in failures] in ([], ["COMMITTED"]), str(operation)


def predecessor(root, stalled, go_on, moment):
    """A job that stands still at one moment of its second save, as a process that was stopped does."""

    def stand_still(_):
        stalled.set()
        assert go_on.wait(60)

    when = "after" if moment == COMMITTED else "before"
    nth = 0 if moment == COMMITTED else moment
    method = "rename" if moment == COMMITTED else "*"
    fault = Fault(method=method, key="*step-000000002*", nth=nth, **{when: stand_still})
    return CheckpointManager(FaultyStorage(LocalStorage(root), [fault]), on_error="raise")


def ended(checkpoints):
    """What became of the save in flight."""
    try:
        checkpoints.wait()
    except CheckpointError as error:
        return error
    return None


def moments_of_a_save(root):
    """Before each of its operations, and when it is committed but not acknowledged."""
    storage = FaultyStorage(LocalStorage(root))
    saved(storage, 1, 2)
    return [*range(sum("step-000000002" in o.key for o in storage.operations)), COMMITTED]


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLED)
def test_a_predecessor_that_wakes_up_late_can_neither_commit_nor_touch_what_came_after(
    tmp_path, without_locks, sample
):
    """On a filesystem without locks, where the second job cannot be refused."""
    verdicts = []
    for moment in chosen(moments_of_a_save(tmp_path / "rehearsal"), sample):
        root, stalled, go_on = tmp_path / str(moment), threading.Event(), threading.Event()
        old = predecessor(root, stalled, go_on, moment)
        old.save(1, state_of(1)).result()
        old.save(2, state_of(-2))
        assert stalled.wait(60), f"at {moment}"
        _ownership._held.clear()  # the older job stands for one of another process
        with CheckpointManager(root) as new:
            state = state_of(0)
            resumed = new.resume(state)
            assert number_in(state) in {1, -2}
            new.save(resumed + 1, state_of(resumed + 1)).result()
            go_on.set()
            error = ended(old)
            new.save(resumed + 2, state_of(resumed + 2)).result()
        with pytest.raises(RootBusyError):
            old.save(9, state_of(9)).result()
        assert isinstance(ended(old), RootBusyError | None)
        old.close()
        verdicts.append((type(error).__name__, resumed))
        assert (error is None) == (resumed == 2), f"at {moment}: {error}"
        assert steps(root) == list(range(1, resumed + 3))
        final = state_of(0)
        with CheckpointManager(root) as reader:
            for step in range(resumed + 1, resumed + 3):
                reader.load(final, step=step)
                assert number_in(final) == step, f"at {moment}: the older job touched the newer one's"
    assert {resumed for _, resumed in verdicts} == {1, 2}, "the sweep should cross the commit"


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [("pin_even", "pin_odd_and_unpin"), ("mark_even", "mark_odd_and_unmark")])
def test_two_processes_that_change_pins_or_marks_at_once_lose_nothing(tmp_path, jobs):
    storage = LocalStorage(tmp_path)
    for step in STEPS:
        save_small(storage, step)
    started = [Process(job, tmp_path) for job in jobs]
    for process in started:
        process.go_on()
    for process in started:
        process.end()
    infos = Catalog(storage).committed()
    expected = ["odd" if info.step % 2 else "even" for info in infos]
    assert [info.pinned or info.damaged for info in infos] == expected


def test_pins_and_marks_may_be_changed_while_a_job_owns_the_root(tmp_path):
    saved(tmp_path, 1, 2)
    with Process("hold", tmp_path) as holder:
        assert main(["pin", f"{tmp_path}@1", "--reason", "paper"]) == 0
        Catalog(LocalStorage(tmp_path)).mark_damaged("step-000000002", "a bit")
        assert main(["verify", str(tmp_path), "--all"]) == 0
        assert Owner.of(LocalStorage(tmp_path)).pid == holder.pid
    assert [(i.pinned, i.damaged) for i in Catalog(LocalStorage(tmp_path)).committed()] == [
        ("paper", None),
        (None, None),
    ]


@pytest.fixture
def clock(monkeypatch):
    """Puts the time of day forward or back."""

    class Clock:
        shift = 0.0

    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + Clock.shift)
    return Clock


@pytest.mark.parametrize("jump", [-DAY, DAY])
def test_a_clock_that_jumps_neither_forces_nor_prevents_timed_saves(tmp_path, clock, jump):
    with CheckpointManager(tmp_path / "rare", save=EverySeconds(3600)) as checkpoints:
        assert checkpoints.due(1) is None
        clock.shift = jump
        assert checkpoints.due(2) is None
    clock.shift = 0.0
    with CheckpointManager(tmp_path / "often", save=EverySeconds(1e-6)) as checkpoints:
        for number in (1, 2, 3):
            assert checkpoints.maybe_save(number, state_of(number)), "a microsecond has passed"
            clock.shift += jump
    assert steps(tmp_path / "often") == [1, 2, 3]


@pytest.mark.parametrize("jump", [-DAY, DAY])
def test_the_newest_is_told_by_steps_whatever_clocks_said(tmp_path, clock, jump):
    with CheckpointManager(tmp_path, keep=KeepLatest(2)) as checkpoints:
        for number in (1, 2, 3, 4):
            checkpoints.save(number, state_of(number)).result()
            clock.shift += jump
    assert steps(tmp_path)[-2:] == [3, 4]
    state = state_of(0)
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.latest().step == 4
        assert checkpoints.resume(state) == 4 == number_in(state)


@pytest.mark.parametrize("keep", [KeepLatest(1), KeepFor(3600)])
def test_what_was_just_committed_survives_its_prune_although_the_clock_was_put_back(tmp_path, clock, keep):
    """Training went back to an earlier step, too: nothing but the job itself knows what came last."""
    with CheckpointManager(tmp_path, keep=keep) as checkpoints:
        checkpoints.save(100, state_of(100)).result()
        clock.shift = -DAY
        for number in (10, 20):
            checkpoints.save(number, state_of(number)).result()
            checkpoints.wait()
            assert number in steps(tmp_path)
            clock.shift += DAY / 8
    assert 100 in steps(tmp_path)


def test_a_clock_put_forward_does_not_empty_a_root(tmp_path, clock):
    with CheckpointManager(tmp_path, keep=KeepFor(3600)) as checkpoints:
        for number in (1, 2, 3):
            checkpoints.save(number, state_of(number)).result()
            clock.shift += DAY
        assert [info.step for info in checkpoints.prune().keep and checkpoints.checkpoints()] == [3]
    assert steps(tmp_path) == [3]
