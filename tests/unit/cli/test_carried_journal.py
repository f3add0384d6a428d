"""A run that is copied keeps its journal, and with it what was learned of its failures."""

from __future__ import annotations

import secrets

import pytest

from ckpt_core.commit import Lease
from ckpt_core.journal import add_event, failure_rate, read_events, read_history
from ckpt_core.journal._records import encode, record
from ckpt_core.names import run_file
from ckpt_core.storage import LocalStorage, open_storage
from tests.unit.cli.test_cp import ONE, save_on

DEVICES = 8


def start(run: str, at: float, step: int = 0):
    return record("run", at, run, {"event": "start", "step": step, "devices": DEVICES})


def end(run: str, at: float, event: str = "unclean", seconds: float = 3600.0):
    return record("run", at, run, {"event": event, "step": 9, "devices": DEVICES, "seconds": seconds})


def progress(run: str, at: float, step: int):
    return record("progress", at, run, {"step": step, "training_seconds": at})


HISTORY_OF_TWO = [start("a", 1.0), end("a", 10.0), start("b", 11.0), end("b", 20.0, "end")]
EVENTS_OF_TWO = [HISTORY_OF_TWO[0], *(progress("a", 1.0 + n, n) for n in range(5)), *HISTORY_OF_TWO[1:]]
A = run_file(1.0, "a")


def put(storage, events):
    """Write each run's records into its file; the end of a dead run is in that of the next."""
    for run in dict.fromkeys(each["run"] for each in events):
        own = [each for each in events if each["run"] == run]
        storage.replace(run_file(own[0]["time"], run), encode(own))


@pytest.fixture
def root(tmp_path):
    storage = LocalStorage(tmp_path / "run")
    save_on(storage, 100, ONE)
    put(storage, EVENTS_OF_TWO)
    return storage


@pytest.fixture(params=["local", "bucket"])
def target(request, tmp_path):
    return str(tmp_path / "there") if request.param == "local" else f"memory://{secrets.token_hex(6)}/run"


def test_a_copied_run_has_learned_what_the_run_had(ckpt, root, target):
    code, _, err = ckpt("cp", root.url, target)
    there = open_storage(target)

    assert (code, err) == (0, "")
    assert failure_rate(read_history(there), DEVICES) == failure_rate(read_history(root), DEVICES)
    assert read_events(there) == EVENTS_OF_TWO
    assert ckpt("cp", root.url, target)[0] == 0  # there is nothing to do
    assert read_events(there) == EVENTS_OF_TWO


def test_upload_takes_the_journal_along(ckpt, root, target):
    assert ckpt("upload", root.url, "--to", target)[0] == 0
    assert read_history(open_storage(target)) == HISTORY_OF_TWO
    assert read_events(open_storage(target)) == EVENTS_OF_TWO


def test_a_second_copy_adds_what_is_new_and_loses_nothing_of_what_was_there(ckpt, root, target):
    ckpt("cp", root.url, target)
    there = open_storage(target)
    own = [start("c", 30.0, 100), end("c", 40.0)]
    put(there, [*EVENTS_OF_TWO, *own])
    more = [start("d", 35.0, 100), progress("d", 36.0, 3), end("d", 50.0, "end")]
    put(root, [*EVENTS_OF_TWO, *more])

    assert ckpt("cp", root.url, target)[0] == 0
    assert {each["run"] for each in read_history(there)} == {"a", "b", "c", "d"}
    assert read_events(there) == [*EVENTS_OF_TWO, *own, *more]


def test_one_checkpoint_and_a_mixed_root_get_no_journal(ckpt, root, target, tmp_path):
    assert ckpt("cp", f"{root.url}@100", target)[0] == 0
    assert read_history(open_storage(target)) == []
    assert ckpt("cp", root.url, tmp_path / "archive", "--mixed")[0] == 0
    assert read_history(LocalStorage(tmp_path / "archive")) == []


def test_a_run_that_goes_on_does_not_count_as_one_that_died(ckpt, root, target):
    going_on = start("c", 30.0, 100)
    put(root, [*EVENTS_OF_TWO, going_on, progress("c", 40.0, 5)])
    with Lease.acquire(root, "train.py"):
        assert ckpt("cp", root.url, target)[0] == 0
    assert read_history(open_storage(target)) == HISTORY_OF_TWO
    assert read_events(open_storage(target)) == EVENTS_OF_TWO

    ckpt("cp", root.url, target)  # it has died since: the next run there says so
    assert read_history(open_storage(target))[-1] == going_on
    assert read_events(open_storage(target))[-1]["step"] == 5


def test_of_a_damaged_journal_is_copied_what_can_be_read(ckpt, root, target):
    content = root.read_bytes(A)
    root.replace(A, content[:150] + b"\xff\n" + content[150:])
    code, out, err = ckpt("cp", root.url, target)

    assert (code, out.count("copied  "), err) == (0, 1, "")
    assert len(read_events(open_storage(target))) == len(EVENTS_OF_TWO) - 1


def test_what_the_target_alone_knows_of_a_run_stays_there(ckpt, root, target):
    ckpt("cp", root.url, target)
    there = open_storage(target)
    add_event(there, "prune", 60.0, {"names": ["step-000000001"]})
    before = read_events(there)
    root.replace(A, root.read_bytes(A) + encode([progress("a", 9.5, 7)]))
    assert ckpt("cp", root.url, target)[0] == 0
    assert [each for each in read_events(there) if each in before] == before
    assert progress("a", 9.5, 7) in read_events(there)


def test_a_live_job_at_the_target_keeps_its_journal_and_the_copy_is_well(ckpt, root, target):
    ckpt("cp", root.url, target)
    there = open_storage(target)
    put(root, [*EVENTS_OF_TWO, start("d", 30.0), end("d", 40.0)])
    with Lease.acquire(there, "train.py"):
        code, out, err = ckpt("cp", root.url, target)
    assert (code, err) == (0, "")
    assert "there" in out
    assert read_history(there) == HISTORY_OF_TWO
