"""Tests trust faults to happen where they say."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys

import pytest

from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.clock import FakeClock
from tests.kit.memory import MemoryStorage


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_operations_are_numbered_in_order():
    storage = FaultyStorage(MemoryStorage())
    storage.make_directory(".incomplete-1-step")
    storage.write_bytes(".incomplete-1-step/a", b"x")
    storage.rename(".incomplete-1-step", "step")
    assert storage.read_bytes("step/a") == b"x"
    assert [(op.number, op.method, op.key) for op in storage.operations] == [
        (0, "make_directory", ".incomplete-1-step"),
        (1, "create", ".incomplete-1-step/a"),
        (2, "write", ".incomplete-1-step/a"),
        (3, "close", ".incomplete-1-step/a"),
        (4, "rename", ".incomplete-1-step -> step"),
        (5, "open", "step/a"),
        (6, "read", "step/a"),
    ]


def test_the_nth_matching_operation_fails_and_only_that():
    storage = FaultyStorage(MemoryStorage(), [Fault(method="create", key="*.distcp", nth=1, error=full())])
    storage.write_bytes("manifest.json", b"")
    storage.write_bytes("0.distcp", b"")
    with pytest.raises(OSError, match="No space"):
        storage.write_bytes("1.distcp", b"")
    storage.write_bytes("2.distcp", b"")
    assert [entry.name for entry in storage.list("")] == ["0.distcp", "2.distcp", "manifest.json"]


@pytest.mark.parametrize("number", range(4))
def test_faults_can_be_placed_by_number_alone(number):
    storage = FaultyStorage(MemoryStorage(), [Fault(nth=number, error=full())])
    with pytest.raises(OSError, match="No space"):
        _save(storage)
    assert len(storage.operations) == number + 1


def test_a_failing_close_is_an_error_exit_of_the_inner_storage():
    inner = MemoryStorage()
    storage = FaultyStorage(inner, [Fault(method="close", error=full())])
    with pytest.raises(OSError, match="No space"):
        storage.write_bytes("a", b"x")


def test_callbacks_surround_the_operation():
    inner, seen = MemoryStorage(), []
    fault = Fault(
        method="close",
        before=lambda op: seen.append(("before", inner.size(op.key))),
        after=lambda op: seen.append(("after", inner.size(op.key))),
    )
    FaultyStorage(inner, [fault]).write_bytes("a", b"123")
    assert seen == [("before", 0), ("after", 3)]


def test_the_process_can_be_killed_at_an_operation(tmp_path):
    program = (
        "import sys\n"
        "from ckpt_core.storage import LocalStorage\n"
        "from ckpt_core.testing import Fault, FaultyStorage\n"
        "from tests.kit.faults import kill_process\n"
        "storage = FaultyStorage(LocalStorage(sys.argv[1]), [Fault(method='rename', before=kill_process)])\n"
        "storage.make_directory('.incomplete-1-step')\n"
        "storage.rename('.incomplete-1-step', 'step')\n"
    )
    answer = subprocess.run([sys.executable, "-c", program, tmp_path], timeout=60, check=False)
    assert answer.returncode == -signal.SIGKILL
    assert [entry.name for entry in LocalStorage(tmp_path).list("")] == [".incomplete-1-step"]


def test_the_clock_moves_only_forward_and_only_when_told():
    clock = FakeClock(100.0)
    assert clock() == clock() == 100.0
    clock.advance(2.5)
    assert clock() == 102.5
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def _save(storage: FaultyStorage) -> None:
    storage.make_directory("step")
    storage.write_bytes("step/a", b"x")
