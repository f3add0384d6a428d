"""A sweep that finds nothing must be able to find something: every broken promise is noticed."""

from __future__ import annotations

import os
import shutil

import pytest

from ckpt_core import CheckpointManager, KeepAll
from ckpt_core.names import MARKER, data_name, step_name
from ckpt_core.storage import LocalStorage
from tests.reliability.disk.findings import Expected, PromiseBrokenError, ids_of, inspect
from tests.reliability.disk.kills import Kill, conduct
from tests.reliability.disk.traps import NO_EXCHANGE, Call, Recorder, Trap
from tests.reliability.disk.victims import ALONE, LAST_NAME, SOUND, SWEPT, prepare, state_of, train
from tests.reliability.forks import fork, gather
from tests.support.system_calls import CHANGING

pytestmark = pytest.mark.reliability


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("prepared") / "root"
    prepare(root, ALONE)
    return root


@pytest.fixture
def root(prepared, tmp_path):
    return shutil.copytree(prepared, tmp_path / "root")


def expected(root, acknowledged=SOUND, replaced=SOUND):
    damaged = frozenset({ids_of(root)[step_name(SWEPT)]})
    return Expected(acknowledged=acknowledged, replaced=replaced, damaged=damaged)


def test_a_root_that_nobody_broke_keeps_every_promise(root):
    assert inspect(root, expected(root)) == SOUND


def lose_the_last(root):
    (root / LAST_NAME / MARKER).unlink()


def lose_the_newest(root):
    shutil.rmtree(root / step_name(SOUND))
    shutil.rmtree(root / LAST_NAME)


def damage_a_committed_one(root):
    with (root / step_name(1) / data_name(0, 0)).open("r+b") as file:
        file.truncate(10)


def swap_values(root):
    for name in (step_name(SOUND), LAST_NAME):
        shutil.rmtree(root / name)
        shutil.copytree(root / step_name(1), root / name)


def touch_a_stranger(root):
    (root / "notes.txt").write_bytes(b"ours now")


def remove_a_stranger(root):
    shutil.rmtree(root / f".replaced-0badc0de-{step_name(1)}")


def leave_something(root):
    (root / "scratch").mkdir()


@pytest.mark.parametrize(
    ("breaks", "told"),
    [
        (lose_the_last, "last.ckpt is of step -1"),
        (lose_the_newest, "are sound|last.ckpt is of step"),
        (damage_a_committed_one, "committed and damaged"),
        (swap_values, "last.ckpt is of step 1"),
        (touch_a_stranger, "notes.txt is not ours"),
        (remove_a_stranger, "is not ours and was changed"),
        (leave_something, "left over: .'scratch'"),
    ],
)
def test_every_broken_promise_is_noticed(root, breaks, told):
    promised = expected(root)
    breaks(root)
    with pytest.raises(PromiseBrokenError, match=told):
        inspect(root, promised)


def test_an_acknowledged_step_that_is_gone_is_noticed(root):
    with pytest.raises(PromiseBrokenError, match="step 7 was acknowledged, 2 was resumed"):
        inspect(root, expected(root, acknowledged=7))


def test_wrong_values_are_noticed(root):
    promised = expected(root)
    lose_the_newest(root)
    with CheckpointManager(LocalStorage(root), keep=KeepAll()) as checkpoints:
        for name in (None, LAST_NAME):
            checkpoints.save(SOUND, state_of(1), name=name).result()
    with pytest.raises(PromiseBrokenError, match="step 2 holds other values"):
        inspect(root, promised)


def test_a_rehearsal_sees_every_deed_of_a_job(root):
    calls = Recorder(root).record(lambda: train(root, ALONE, lambda _said: None))
    assert {call.method for call in calls} <= CHANGING
    assert {call.deed for call in calls} == {
        "take and give back the root",
        "collect orphans",
        "mark",
        "save",
        "prune",
        "replace",
        "save among the user's files",
    }
    assert "exchange" in {call.method for call in calls}


def test_a_rehearsal_without_exchange_sees_the_renames_instead(root):
    calls = Recorder(root, [NO_EXCHANGE]).record(lambda: train(root, ALONE, lambda _said: None))
    replaced = [call for call in calls if call.deed == "replace"]
    assert [call.succeeded for call in replaced if call.method == "exchange"] == [False]
    moved = [call for call in replaced if call.method == "rename"]
    assert len([call for call in moved if "tokenizer.json" not in call.key]) == 3
    assert len(moved) == 4, "and the user's file goes along"


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [0, 1, 2, 3, None])
def test_a_trap_kills_at_the_nth_change_and_nowhere_else(tmp_path, nth, when):
    root = tmp_path / "root"
    root.mkdir()

    def act():
        for name in ("a", "b", "c"):
            (root / name).mkdir()
            list(root.iterdir())

    child = fork(lambda _tell: Trap(nth, when, everyone=False).spring(root, act))
    assert gather([child], 60) == []
    reached = nth is not None and nth < 3
    assert child.killed == reached
    done = len(list(root.iterdir()))
    assert done == (nth + (when == "after") if reached else 3)


def kill(**changes):
    call = Call(method="fsync", key="", succeeded=True, deed="save")
    fields = {"world_size": 2, "rank": 0, "everyone": False, "number": 0, "when": "before", "call": call}
    return Kill(**{**fields, **changes})


def dies(_tell):
    os.kill(os.getpid(), 9)


def ended(*acts):
    children = [fork(act) for act in acts]
    gather(children, 60)
    return children


def test_ranks_that_do_not_end_as_documented_are_noticed():
    fails, ends = (lambda tell: tell({"failed": "why"})), (lambda tell: tell({"ended": True}))
    raises, silent = (lambda _tell: 1 / 0), (lambda _tell: None)
    assert conduct(kill(), ended(dies, fails), []) == ""
    assert conduct(kill(), ended(dies, ends), []) == ""
    assert "ZeroDivisionError" in conduct(kill(), ended(dies, raises), [])
    assert "documented" in conduct(kill(), ended(dies, silent), [])
    assert "rank 0 was not killed" in conduct(kill(), ended(ends, ends), [])
    assert "outlived" in conduct(kill(everyone=True), ended(dies, fails), [])
    assert conduct(kill(everyone=True), ended(dies, ends), []) == "", "it may have ended just before"
    assert "outlived" in conduct(kill(), ended(dies, dies), [])
    assert "still ran" in conduct(kill(), ended(dies, fails), [1])


def test_a_process_that_hangs_is_ended_and_named():
    reader, _writer = os.pipe()
    children = [fork(lambda _tell: None), fork(lambda _tell: os.read(reader, 1))]
    assert gather(children, 0.2) == [1]
    assert children[1].killed
