"""The journal of managers: what it tells, and that nothing waits for it or fails with it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, OnPreemption, Optimal, Upload
from ckpt_core.errors import RootBusyError
from ckpt_core.journal import Journal, _journal, failure_rate, read_events, read_history
from ckpt_core.journal._journal import Recorder
from ckpt_core.names import OWN
from ckpt_core.storage import LocalStorage, object_storage
from ckpt_core.telemetry import Event
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.clock import FakeClock
from tests.support.system_calls import CHANGING, SystemCalls

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def state():
    return {"weights": torch.ones(8)}


def train(root, upto, **options):
    """Train as a script does; return the step resumed from."""
    with CheckpointManager(root, save=EverySteps(2), **options) as checkpoints:
        live = state()
        begin = checkpoints.resume(live) or 0
        for step in range(begin + 1, upto + 1):
            checkpoints.maybe_save(step, live)
        checkpoints.wait()
    return begin


def told(root, kind="run"):
    """The runs of a root, as pairs of event and step."""
    storage = LocalStorage(root)
    found = read_history(storage) if kind == "run" else read_events(storage)
    return [(each.get("event", kind), each["step"]) for each in found if each["kind"] == kind]


def files(root):
    """The journals of its runs, the oldest first."""
    return sorted((root / OWN).glob("run-*.jsonl"))


@pytest.fixture(autouse=True)
def earlier(monkeypatch):
    """The threads of managers that tests of other modules have not closed."""
    monkeypatch.setitem(_EARLIER, "threads", set(threading.enumerate()))


_EARLIER = {}


def threads():
    own = set(threading.enumerate()) - _EARLIER["threads"]
    return [thread.name for thread in own if thread.name == "ckpt-journal"]


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


def eventually(holds):
    """Wait for what another thread is about to do."""
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def die(root, steps, *, resumed=()):
    """Leave what a job leaves that is killed after these steps, each of which takes a second."""
    recorder = Recorder(LocalStorage(root))
    begun = time.time()
    recorder.training.first = (steps[0], 0.0, begun)
    recorder.training.last = (steps[-1], float(len(steps) - 1), begun + len(steps) - 1)
    recorder.training.resumed.extend(((step, 0.0, begun), None) for step in resumed)
    recorder.begin("dead", 1, lambda: None)
    recorder.finish()


def test_runs_that_follow_one_another_are_told_in_order(tmp_path):
    train(tmp_path, 4, keep=KeepLatest(1))
    train(tmp_path, 7)
    assert told(tmp_path) == [("start", 0), ("end", 4), ("start", 4), ("resume", 4), ("end", 7)]
    events = read_events(LocalStorage(tmp_path))
    assert [each["event"] for each in events if each["kind"] == "run"] == [e for e, _ in told(tmp_path)]
    assert [each["step"] for each in events if each["kind"] == "save"] == [2, 4, 6]
    assert {each["outcome"] for each in events if each["kind"] == "save"} == {"committed"}
    (load,) = [each for each in events if each["kind"] == "load"]
    assert (load["step"], load["tier"], load["outcome"]) == (4, "root", "done")
    assert load["size_bytes"] > 0
    (prune,) = [each for each in events if each["kind"] == "prune"]
    assert (prune["names"], prune["why"]) == (["step-000000002"], "not kept by KeepLatest(n=1)")
    first, second = [each for each in read_history(LocalStorage(tmp_path)) if each["event"] == "end"]
    assert first["run"] != second["run"]
    assert first["devices"] == first["world_size"] == 1
    assert first["seconds"] > 0
    assert all(str(tmp_path) not in each.read_text() for each in files(tmp_path))


def test_a_run_that_dies_is_unclean_and_what_it_lost_is_known(tmp_path):
    train(tmp_path, 4)
    die(tmp_path, range(5, 10), resumed=[4])
    assert told(tmp_path)[-2:] == [("start", 4), ("resume", 4)]
    train(tmp_path, 6)
    unclean = next(each for each in read_history(LocalStorage(tmp_path)) if each["event"] == "unclean")
    assert (unclean["run"], unclean["step"], unclean["lost_steps"]) == ("dead", 9, 5)
    assert unclean["seconds"] == unclean["lost_seconds"] == 4.0
    assert told(tmp_path)[-4:] == [("unclean", 9), ("start", 4), ("resume", 4), ("end", 6)]
    assert failure_rate(read_history(LocalStorage(tmp_path)), 1).source.startswith("1 failure in")


def test_a_dead_run_counts_before_the_next_one_has_trained(tmp_path):
    die(tmp_path, range(1, 6))
    journal = Journal(LocalStorage(tmp_path))
    journal.open("next", 1, lambda: None)
    assert journal.failures(1).source.startswith("1 failure in")
    journal.close()


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (RuntimeError("NCCL"), []),
        (KeyboardInterrupt(), ["end"]),
        (SystemExit(0), ["end"]),
        (SystemExit(1), []),
    ],
)
def test_an_exception_is_no_clean_end_but_a_users_stop_is(tmp_path, error, ending):
    def fail():
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.save(3, state())
            raise error

    with pytest.raises(type(error)):
        fail()
    assert [event for event, _ in told(tmp_path) if event != "start"] == ending
    assert told(tmp_path, "progress")[-1][1] == 3


def test_an_exception_that_was_over_before_training_is_no_failure(tmp_path):
    try:
        raise ImportError("an optional library")
    except ImportError:
        train(tmp_path, 2)
    assert told(tmp_path)[-1] == ("end", 2)


def test_closing_while_an_exception_is_handled_is_no_clean_end(tmp_path):
    checkpoints = CheckpointManager(tmp_path)
    try:
        checkpoints.save(1, state())
        raise RuntimeError("out of memory")
    except RuntimeError:
        checkpoints.close()
    assert told(tmp_path) == [("start", 0)]


def test_what_only_loads_or_prunes_leaves_no_run(tmp_path):
    train(tmp_path, 4)
    before = told(tmp_path)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state())
        checkpoints.prune()
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.load(state())
        checkpoints.due()
    assert told(tmp_path) == before
    die(tmp_path, [5], resumed=[4])
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.resume(state())
    assert told(tmp_path)[-1] == ("resume", 4)  # the next run that trains judges the dead one


def test_a_cell_that_is_run_twice_ends_its_first_run(tmp_path):
    first = CheckpointManager(tmp_path)
    first.save(1, state()).result()
    with CheckpointManager(tmp_path) as second:
        second.resume(state())
        second.save(2, state())
    assert told(tmp_path) == [("start", 0), ("end", 1), ("start", 1), ("resume", 1), ("end", 2)]
    first.close()
    assert told(tmp_path)[-1] == ("end", 2)


def test_a_manager_that_is_forgotten_ends_its_run(tmp_path):
    journal = Journal(LocalStorage(tmp_path))
    journal.open("a", 1, lambda: None)
    journal.seen(1)
    del journal
    assert told(tmp_path) == [("start", 0), ("end", 1)]
    assert not threads()


def test_folds_in_one_root_are_runs_with_ends(tmp_path):
    for fold in range(3):
        with CheckpointManager(tmp_path) as checkpoints:
            checkpoints.start_afresh()
            for step in (1, 2):
                checkpoints.save(step, state(), name=f"fold{fold}-{step}")
    assert [event for event, _ in told(tmp_path)] == ["start", "end"] * 3


def test_a_training_that_goes_back_says_what_it_threw_away(tmp_path):
    with CheckpointManager(tmp_path, save=EverySteps(2)) as checkpoints:
        live = state()
        for step in range(1, 6):
            checkpoints.maybe_save(step, live)
        checkpoints.load(live, step=2)
        checkpoints.maybe_save(3, live)
    back = next(each for each in read_history(LocalStorage(tmp_path)) if each["event"] == "resume")
    assert back["step"] == 2
    assert told(tmp_path)[-1] == ("end", 3)


def test_a_preemption_loses_what_its_last_save_did_not_keep(tmp_path):
    with CheckpointManager(tmp_path, save=OnPreemption(signals=("SIGUSR1",))) as checkpoints:
        checkpoints.maybe_save(1, state())
        os.kill(os.getpid(), signal.SIGUSR1)
        checkpoints.maybe_save(2, state())
    (end,) = [each for each in read_history(LocalStorage(tmp_path)) if each["event"] == "preempted"]
    assert (end["step"], end["lost_steps"]) == (2, 0)
    journal = Journal(LocalStorage(tmp_path))
    journal.open("late", 1, lambda: None)
    journal.resumed(2)
    journal.sinks[0].emit(Event(name="save.commit", phase="finished", time=1.0, attributes={"step": 4}))
    for step in (3, 4, 9):
        journal.seen(step)
    journal.end(preempted=True)
    journal.close()
    assert [e["lost_steps"] for e in read_history(LocalStorage(tmp_path)) if e["event"] == "preempted"] == [
        0,
        5,
    ]


def test_without_a_journal_nothing_is_there(tmp_path):
    train(tmp_path, 4, journal=False)
    assert not files(tmp_path)
    assert CheckpointManager(tmp_path, journal=False).options.chosen == {}


def test_after_close_no_thread_and_no_file_is_open(tmp_path):
    descriptors = open_files()
    journal = Journal(LocalStorage(tmp_path))
    journal.open("a", 1, lambda: None)
    journal.seen(1)
    eventually(lambda: files(tmp_path))
    assert threads() == ["ckpt-journal"]
    journal.close()
    assert not threads()
    assert open_files() == descriptors


def test_a_forked_child_writes_nothing_and_ends_nothing(tmp_path):
    journal = Journal(LocalStorage(tmp_path))
    journal.open("a", 1, lambda: None)
    journal.seen(1)
    eventually(lambda: told(tmp_path) == [("start", 0)])
    child = os.fork()
    if child == 0:
        try:
            journal.seen(2)
            journal.close()
            journal._finish()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert told(tmp_path) == [("start", 0)]
    journal.close()
    assert told(tmp_path) == [("start", 0), ("end", 1)]


@pytest.mark.parametrize(("method", "key"), [("replace", "*.jsonl"), ("append", "*.jsonl"), ("*", "*.jsonl")])
@pytest.mark.parametrize("error", [FULL, PermissionError(13, "denied"), ValueError("a defect")])
def test_a_journal_that_fails_is_one_warning_and_no_failed_save(tmp_path, caplog, method, key, error):
    faults = [Fault(key=key, error=error)] if method == "*" else [Fault(method=method, key=key, error=error)]
    storage = FaultyStorage(LocalStorage(tmp_path), faults)
    assert train(storage, 4) == 0
    assert train(storage, 6) == 4
    warnings = [each for each in caplog.messages if "the journal of" in each]
    assert len(warnings) == 2  # one of each run
    assert all(str(error.args[-1]) in each for each in warnings)


def test_what_could_not_be_written_is_written_later(tmp_path):
    storage = FaultyStorage(LocalStorage(tmp_path), [Fault(method="append", nth=0, error=FULL)])
    train(storage, 4)
    assert [step for _, step in told(tmp_path, "save")] == [2, 4]
    assert len(told(tmp_path)) == 2


def test_storage_that_hangs_holds_no_close_up(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(_journal, "_GRACE_SECONDS", 0.05)
    hung = threading.Event()
    fault = Fault(method="replace", key="*.jsonl", before=lambda _: hung.wait(60))
    try:
        train(FaultyStorage(LocalStorage(tmp_path), [fault]), 2)
    finally:
        hung.set()
    assert "storage has not answered for a while" in caplog.text
    eventually(lambda: not threads())


def test_what_is_no_journal_of_a_run_is_left_alone(tmp_path):
    (tmp_path / OWN).mkdir()
    theirs = {"events.jsonl": '{"loss": 1}\n', "run-1.jsonl": "", f"run-{0:016d}-a.jsonl": '{"loss": 1}\n'}
    for name, content in theirs.items():
        (tmp_path / OWN / name).write_text(content)
    train(tmp_path, 4)
    assert {name: (tmp_path / OWN / name).read_text() for name in theirs} == theirs
    assert told(tmp_path) == [("start", 0), ("end", 4)]


def test_of_many_runs_the_newest_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(_journal, "MOST_RUNS", 3)
    for upto in range(1, 7):
        train(tmp_path, upto)
    assert len(files(tmp_path)) == 3
    assert told(tmp_path)[-1] == ("end", 6)


def test_once_another_job_has_the_root_nothing_is_written(tmp_path, caplog):
    taken = threading.Event()

    def check():
        if taken.is_set():
            raise RootBusyError("taken")

    journal = Journal(LocalStorage(tmp_path))
    journal.open("a", 1, check)
    journal.seen(1)
    eventually(lambda: told(tmp_path, "progress"))
    before = files(tmp_path)[0].read_bytes()
    taken.set()
    journal.sinks[0].emit(Event(name="prune", phase="point", time=1.0))
    journal.close()
    assert files(tmp_path)[0].read_bytes() == before
    assert not caplog.messages


def test_in_a_bucket_many_events_are_few_requests(tmp_path):
    clock, storage = FakeClock(), FaultyStorage(object_storage(f"memory://paced-{tmp_path.name}"))
    recorder = Recorder(storage, clock=clock)
    recorder.training.first = recorder.training.last = (1, clock(), time.time())
    recorder.begin("a", 1, lambda: None)
    eventually(lambda: storage.list(OWN))
    clock.advance(600)
    for number in range(500):
        recorder.emit(Event(name="prune", phase="point", time=float(number)))
        if number % 100 == 0:
            eventually(lambda: not recorder._waiting)
    recorder.finish()
    writes = [each.key for each in storage.operations if each.method == "replace"]
    assert len(writes) <= 4
    assert sum(each["kind"] == "prune" for each in read_events(storage)) == 500


def test_events_beyond_what_may_wait_are_dropped_not_kept(tmp_path):
    recorder = Recorder(LocalStorage(tmp_path))
    for number in range(10_000):
        recorder.emit(Event(name="prune", phase="point", time=float(number)))
    assert len(recorder._waiting) == 2000
    recorder.drop()  # as on every rank but the coordinator
    recorder.emit(Event(name="prune", phase="point", time=1.0))
    assert not recorder._waiting


def test_an_interval_is_told_when_it_has_changed_by_a_tenth(tmp_path):
    journal = Journal(LocalStorage(tmp_path))
    journal.open("a", 1, lambda: None)
    for interval in (100.0, 105.0, 109.0, 111.0, 120.0, 90.0, 90.0):
        costs = {"stall": 0.5, "uploaded": None}
        attributes = {"rule": "Optimal()", "interval_seconds": interval, "costs": costs, "mtbf_seconds": 60.0}
        journal.sinks[0].emit(Event(name="cadence", phase="point", time=1.0, attributes=attributes))
    journal.close()
    found = [each for each in read_events(LocalStorage(tmp_path)) if each["kind"] == "cadence"]
    assert [each["interval_seconds"] for each in found] == [100.0, 111.0, 90.0]
    assert found[0]["costs"] == {"stall": 0.5, "uploaded": None}


def test_the_interval_that_a_policy_finds_is_told_with_its_numbers(tmp_path):
    policy = EverySteps(3) | Optimal(mtbf="6h")
    with CheckpointManager(tmp_path, save=policy) as checkpoints:
        for step in range(1, 14):
            checkpoints.maybe_save(step, state())
            checkpoints.wait()
    found = [each for each in read_events(LocalStorage(tmp_path)) if each["kind"] == "cadence"]
    assert found
    assert found[0]["rule"] == repr(policy)
    assert found[0]["interval_seconds"] > 0
    assert found[0]["costs"]["stall"] > 0
    assert (found[0]["mtbf_seconds"], found[0]["mtbf_source"]) == (21600.0, "given")


def test_neither_secrets_nor_the_place_of_the_root_are_written(tmp_path):
    url = "s3://key:hunter2@bucket/run?X-Amz-Signature=abcdef"
    journal = Journal(LocalStorage(tmp_path))
    journal.open("a", 1, lambda: None)
    error = f"OSError: {tmp_path}/step-000000001: 403 for {url}"
    for name, fields in (
        ("upload", {"to": url}),
        ("load", {"tier": url}),
        ("prune", {"tier": url, "why": url}),
    ):
        attributes = {"name": "step-000000001", "error": error, "storage_options": {"x": "hunter2"}, **fields}
        journal.sinks[0].emit(Event(name=name, phase="failed", time=1.0, attributes=attributes))
    journal.close()
    written = files(tmp_path)[0].read_text()
    assert len(written.splitlines()) == 3
    assert "s3://bucket/run" in written
    for secret in ("hunter2", "abcdef", "key:", str(tmp_path), "storage_options"):
        assert secret not in written


def test_a_step_costs_microseconds_and_an_event_little_more(tmp_path):
    journal = Journal(LocalStorage(tmp_path))
    journal.open("a", 1, lambda: None)
    began = time.thread_time()
    for step in range(20_000):
        journal.seen(step)
    assert (time.thread_time() - began) / 20_000 < 20e-6
    began = time.thread_time()
    for step in range(1000):
        journal.sinks[0].emit(Event(name="prune", phase="point", time=1.0, attributes={"size_bytes": step}))
    assert (time.thread_time() - began) / 1000 < 5e-3
    journal.close()


def test_a_new_disk_gets_the_history_from_the_tier(tmp_path):
    local, tier = tmp_path / "local", tmp_path / "tier"
    train(local, 4, upload=Upload(str(tier)))
    assert told(tier) == told(local) == [("start", 0), ("end", 4)]
    shutil.rmtree(local)
    train(local, 6, upload=Upload(str(tier)))
    assert [event for event, _ in told(local)] == ["start", "end", "start", "resume", "end"]
    assert told(tier) == told(local)
    uploads = [each for each in read_events(LocalStorage(local)) if each["kind"] == "upload"]
    assert {each["outcome"] for each in uploads} == {"done"}
    assert {each["tier"] for each in uploads} == {str(tier)}
    assert all(each["size_bytes"] and each["name"] for each in uploads)


def test_a_tier_that_is_down_costs_a_warning(tmp_path, caplog):
    storage = FaultyStorage(LocalStorage(tmp_path / "tier"), [Fault(error=OSError(5, "down"))])
    journal = Journal(LocalStorage(tmp_path), [storage])
    (tmp_path / "run").mkdir()
    journal.open("a", 1, lambda: None)
    journal.seen(1)
    journal.close()
    assert told(tmp_path) == [("start", 0), ("end", 1)]
    assert len(caplog.messages) == 1


def test_a_tier_that_fails_keeps_no_event_from_the_root_and_no_history_from_another_tier(tmp_path):
    down = FaultyStorage(LocalStorage(tmp_path / "down"), [Fault(error=OSError(5, "down"))])
    (tmp_path / "up").mkdir()
    journal = Journal(LocalStorage(tmp_path), [down, LocalStorage(tmp_path / "up")])
    journal.open("a", 1, lambda: None)
    journal.seen(1)
    eventually(lambda: told(tmp_path, "progress"))  # so that only the tier that is down lacks something
    (sink,) = journal.sinks
    sink.emit(
        Event(name="prune", phase="point", time=1.0, attributes={"names": ["a"], "size_bytes": 1, "why": "w"})
    )
    journal.seen(2)
    journal.end(preempted=False)
    journal.close()
    assert [each["names"] for each in read_events(LocalStorage(tmp_path)) if each["kind"] == "prune"] == [
        ["a"]
    ]
    assert told(tmp_path, "progress")[-1] == ("progress", 2)
    assert told(tmp_path / "up") == told(tmp_path) == [("start", 0), ("end", 2)]


@pytest.mark.parametrize("method", ["replace", "append", "*"])
def test_a_root_that_fails_keeps_no_history_from_a_tier(tmp_path, method):
    (tmp_path / "up").mkdir()
    root = FaultyStorage(LocalStorage(tmp_path / "run"), [Fault(method=method, key="*.jsonl", error=FULL)])
    journal = Journal(root, [LocalStorage(tmp_path / "up")])
    journal.open("a", 1, lambda: None)
    journal.seen(1)
    journal.close()
    assert told(tmp_path / "up") == [("start", 0), ("end", 1)]


def snapshots(root, act):
    """Everything that a kill may leave of the journal: before and after each change of its files."""
    found = []

    def look(operation):
        if operation.method in CHANGING and ".jsonl" in operation.key:
            found.append({each.name: each.read_bytes() for each in (root / OWN).glob("*.jsonl*")})

    with SystemCalls(root, [Fault(before=look), Fault(after=look)]):
        act()
    return found


def test_a_kill_at_any_write_leaves_a_journal_that_reads_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("ckpt_core.journal._run_files.MOST_APPENDED", 1000)
    root = tmp_path / "run"
    train(root, 2)
    left = snapshots(root, lambda: train(root, 8, keep=KeepLatest(1)))
    assert len(left) > 20
    for number, kept in enumerate(left):
        copy = tmp_path / f"killed-{number}"
        (copy / OWN).mkdir(parents=True)
        for name, content in kept.items():
            (copy / OWN / name).write_bytes(content)
        history = told(copy)
        assert history[:2] == [("start", 0), ("end", 2)]
        assert {event for event, _ in told(copy, "save")} <= {"save"}
        journal = Journal(LocalStorage(copy))
        journal.open("next", 1, lambda: None)
        journal.seen(9)
        journal.close()
        assert told(copy)[-1] == ("end", 9)
        ends = [event for event, _ in told(copy) if event in {"end", "unclean"}]
        starts = [event for event, _ in told(copy) if event == "start"]
        assert len(ends) == len(starts)
        for line in files(copy)[-1].read_bytes().splitlines():
            json.loads(line)


def test_the_exit_of_a_script_that_never_closes_is_an_end(tmp_path, monkeypatch):
    ended = threading.main_thread()
    monkeypatch.setattr(ended, "is_alive", lambda: False)
    for name, error in (("last_type", ValueError), ("last_type", KeyboardInterrupt), ("last_type", None)):
        monkeypatch.setattr(sys, name, error, raising=False)
        journal = Journal(LocalStorage(tmp_path))
        journal.open(str(error), 1, lambda: None)
        journal.seen(1)
        journal.close()
    assert [event for event, _ in told(tmp_path)] == ["start", "unclean", "start", "end", "start", "end"]
