"""A process that is killed while it writes its journal has the checkpoints that it would have without one."""

from __future__ import annotations

import os
import shutil
import signal

import pytest

from ckpt_core.journal import Journal, read_events, read_history
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault
from tests.reliability.disk.findings import Expected, ids_of, inspect
from tests.reliability.disk.victims import ALONE, SOUND, SWEPT, prepare, train
from tests.reliability.forks import fork, gather
from tests.support.system_calls import CHANGING, SystemCalls

pytestmark = pytest.mark.reliability


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("journals") / "root"
    prepare(root, ALONE)
    train(root, ALONE, lambda _said: None, journal=True)  # no module is new to a child
    shutil.rmtree(root)
    prepare(root, ALONE)
    return root


def die(operation):
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


class Nth:
    """Kills at the nth change of a file of the journal."""

    def __init__(self, nth):
        self._left = nth

    def __call__(self, operation):
        if operation.method in CHANGING and ".jsonl" in operation.key:
            if self._left == 0:
                die(operation)
            self._left -= 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("nth", [0, 1, 3, 6])
def test_a_kill_at_a_write_of_the_journal_harms_nothing(prepared, tmp_path, nth, when):
    root = shutil.copytree(prepared, tmp_path / "root")
    runs = len([each for each in read_history(LocalStorage(root)) if each["event"] == "end"])
    damaged = frozenset({ids_of(root)["step-000000003"]})

    def act(tell):
        with SystemCalls(root, [Fault(**{when: Nth(nth)})]):
            train(root, ALONE, tell, journal=True)

    child = fork(act)
    assert gather([child], 60) == []
    assert child.killed or {"ended": True} in child.told
    saved = [each for each in child.told if "committed" in each]
    acknowledged = SWEPT if any(each["name"] is None for each in saved) else SOUND
    replaced = SWEPT if len(saved) > 1 else SOUND
    inspect(root, Expected(acknowledged=acknowledged, replaced=replaced, damaged=damaged))
    history = read_history(LocalStorage(root))
    assert len([each for each in history if each["event"] == "end"]) >= runs
    read_events(LocalStorage(root))
    journal = Journal(LocalStorage(root))
    journal.open("next", 1, lambda: None)
    journal.seen(9)
    journal.close()
    starts, ends = (
        {each["run"] for each in read_history(LocalStorage(root)) if each["event"] in kinds}
        for kinds in ({"start"}, {"end", "unclean"})
    )
    assert starts == ends
    assert not list(root.glob("*/.*.jsonl.*.tmp"))
