"""Directories in which stock Accelerate writes: what becomes of them when a process is killed."""

from __future__ import annotations

import os
import signal
import tempfile

import pytest

from accelerate_ckpt._host_calls import private_directory

pytestmark = pytest.mark.reliability


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def in_a_child(act):
    """Fork: its process id, and the status with which it ended or was stopped."""
    child = os.fork()
    if child == 0:
        act()
        os._exit(0)
    return child, os.waitpid(child, os.WUNTRACED)[1]


def hold(by):
    with private_directory() as path:
        (path / "random_states_0.pkl").write_bytes(b"states")
        os.kill(os.getpid(), by)


def use():
    with private_directory() as path:
        (path / "random_states_0.pkl").write_bytes(b"states")


def test_what_a_killed_process_left_is_removed_by_the_next_unless_it_may_be_just_being_made(temporary):
    in_a_child(lambda: hold(signal.SIGKILL))
    (left,) = temporary.iterdir()
    assert list(left.iterdir())
    in_a_child(use)
    assert left in temporary.iterdir()
    os.utime(left, (0, 0))
    in_a_child(use)
    assert left not in temporary.iterdir()


def test_what_a_live_process_uses_and_what_is_not_ours_stay(temporary):
    theirs = temporary / "accelerate-theirs"
    theirs.mkdir()
    child, _ = in_a_child(lambda: hold(signal.SIGSTOP))
    try:
        used = set(temporary.iterdir())
        with private_directory() as path:
            assert path not in used
            assert used <= set(temporary.iterdir())
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_nothing_is_left_of_one_that_was_used(temporary):
    use()
    assert not list(temporary.iterdir())
