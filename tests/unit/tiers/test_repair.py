"""The local tier is made whole again from the durable one, while training goes on."""

from __future__ import annotations

import shutil
import threading

import pytest

from ckpt_core import CheckpointManager, KeepLatest
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.unit.tiers.two_tiers import THREE, Two, marks, state
from tests.unit.training import LONG, Gate, children, damage

WRITES = {"create", "close", "replace", "delete", "make_directory", "sync_directory", "rename", "exchange"}


@pytest.fixture
def two(tmp_path):
    """Steps 1 to 3 in both tiers."""
    made = Two(tmp_path)
    made.save(1, 2, 3)
    made.upload(*children(made.local))
    return made


def is_whole(root):
    return verify(LocalStorage(root), THREE) == []


def repaired(two, **options):
    """Resume step 3 and wait until the repair has ended."""
    with two.manager(**options) as checkpoints:
        loaded = state()
        assert checkpoints.resume(loaded) == 3
        assert loaded["model"]["w"][0] == 3
        assert two.repaired.wait(LONG)
        two.repaired.clear()


def test_a_damaged_local_copy_is_made_whole_again_and_loses_its_mark(two, caplog):
    (two.local / THREE / "notes.txt").write_text("mine")
    damage(two.local, THREE)
    two.durable.joinpath(THREE, "chunks-00000.json.z").unlink()
    repaired(two)
    assert is_whole(two.local)
    assert marks(two.local) == {}
    assert (two.local / THREE / "notes.txt").read_text() == "mine"
    assert len(children(two.local)) == 3
    assert not is_whole(two.durable)


@pytest.mark.parametrize("lost", ["COMMITTED", "manifest.json"])
def test_a_local_copy_that_does_not_even_count_is_made_whole_again(two, lost):
    path = two.local / THREE / lost
    path.write_bytes(path.read_bytes()[:-9])
    repaired(two)
    assert is_whole(two.local)
    assert sum(name.startswith(".replaced-") for name in children(two.local)) == (lost == "COMMITTED")


def test_the_checkpoint_resumed_is_fetched_to_an_empty_disk_if_retention_keeps_it(two):
    two.lose_local()
    repaired(two, keep=KeepLatest(2))
    assert children(two.local) == [THREE]
    assert is_whole(two.local)
    two.lose_local()
    with two.manager(keep=KeepLatest(1)) as checkpoints:
        assert checkpoints.resume(state()) == 3
    assert children(two.local) == []


@pytest.mark.parametrize(("keep", "left"), [(2, [5, 6]), (4, [3, 4, 5, 6])])
def test_training_saves_while_the_copy_is_made(two, keep, left):
    """Saves and prunes pass the repair; it is given up once retention would remove its checkpoint."""
    two.lose_local()
    gate = Gate()
    slow = FaultyStorage(
        LocalStorage(two.durable), [Fault(method="read_into", key="*.distcp", before=_Only(gate))]
    )
    with two.manager(durable=slow, keep=KeepLatest(keep)) as checkpoints:
        checkpoints.resume(state())
        assert gate.reached.wait(LONG)
        for step in (4, 5, 6):
            checkpoints.save(step, state(step))
        checkpoints.wait()
        gate.open()
        assert two.repaired.wait(LONG)
    assert [info.step for info in Catalog(LocalStorage(two.local)).committed()] == left
    assert not [name for name in children(two.local) if name.startswith(".")]


class _Only:
    """Lets all but the threads of a repair pass."""

    def __init__(self, then):
        self.then = then

    def __call__(self, operation):
        if threading.current_thread().name.startswith(("ckpt-repair", "ckpt-send")):
            self.then(operation)


def test_close_does_not_wait_for_a_repair(two):
    two.lose_local()
    reached, closing = threading.Event(), threading.Event()

    def hold(operation):
        reached.set()
        assert closing.wait(LONG)

    slow = FaultyStorage(
        LocalStorage(two.durable), [Fault(method="read_into", key="*.distcp", before=_Only(hold))]
    )
    with two.manager(durable=slow) as checkpoints:
        checkpoints.resume(state())
        assert reached.wait(LONG)
        ending = threading.Thread(target=checkpoints.close)
        ending.start()
        closing.set()
        ending.join(LONG)
    assert not ending.is_alive()
    assert children(two.local) == [THREE] or children(two.local) == []


def test_a_failed_repair_leaves_the_training_and_the_root_as_they_were(two):
    damage(two.local, THREE)
    full = FaultyStorage(
        LocalStorage(two.local), [Fault(method="close", key="*__0_0.distcp", error=OSError(28, "full"))]
    )
    repaired(two, local=full)
    assert two.repairs == ["failed"]
    assert marks(two.local).keys() == {THREE}
    assert len(children(two.local)) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_repair_killed_at_any_operation_leaves_what_the_next_run_repairs(two, tmp_path):
    damage(two.local, THREE)
    before = tmp_path / "before"
    two.local.rename(before)

    def killed_at(number: int) -> bool:
        """Run a repair whose threads end at one operation on the local tier; whether one did."""
        shutil.copytree(before, two.local)
        counted = iter(range(number))
        killed = threading.Event()

        def count(operation):
            # A kill before a read leaves what one before the next write leaves.
            if operation.method in WRITES and next(counted, None) is None:
                killed.set()
                raise SystemExit

        storage = FaultyStorage(LocalStorage(two.local), [Fault(before=_Only(count))])
        repaired(two, local=storage)
        return killed.is_set()

    number = 0
    while killed_at(number):
        with two.manager() as checkpoints:
            loaded = state()
            assert checkpoints.resume(loaded) == 3
            assert loaded["model"]["w"][0] == 3
            if not is_whole(two.local):
                assert two.repaired.wait(LONG)
            two.repaired.clear()
        assert is_whole(two.local), number
        assert len(children(two.local)) == 3, number
        assert marks(two.local) == {}, number
        shutil.rmtree(two.local)
        number += 1
    assert number > 20
    assert is_whole(two.local)


def test_nothing_is_repaired_where_nothing_is_lost(two):
    with CheckpointManager(two.local) as checkpoints:
        assert checkpoints.resume(state()) == 3
    with two.manager() as checkpoints:
        assert checkpoints.resume(state()) == 3
    assert two.repairs == []
