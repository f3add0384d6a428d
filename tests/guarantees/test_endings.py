"""However a training script ends, the save in flight is finished or left out whole; none before is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage

PROGRAMS = Path(__file__).with_name("programs.py")


def ended(program, root):
    """Run a program to its end."""
    command = [sys.executable, str(PROGRAMS), program, str(root)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def whole_steps(root):
    storage = LocalStorage(root)
    infos = Catalog(storage).committed()
    assert [verify(storage, info.name) for info in infos] == [[]] * len(infos)
    assert Catalog(storage).torn() == []
    return [info.step for info in infos]


def test_ctrl_c_drains_the_save_in_flight(tmp_path):
    done = ended("interrupted", tmp_path)
    assert done.stdout.split() == ["training"]
    assert "KeyboardInterrupt" in done.stderr
    assert whole_steps(tmp_path) == [1, 2]
    assert not (tmp_path / "writer.json").exists(), "the root was not given back"


def test_interpreter_exit_without_close_still_commits(tmp_path):
    done = ended("exits_without_closing", tmp_path)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["end"], "")
    assert whole_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("program", ["exits_before_the_last_prune", "exits_where_no_thread_begins_any_more"])
def test_the_last_prune_is_made_though_the_interpreter_ends(tmp_path, program):
    done = ended(program, tmp_path)
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["end"], "")
    assert whole_steps(tmp_path) == [2]


def test_an_exception_without_close_still_commits(tmp_path):
    done = ended("raises_without_closing", tmp_path)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: the training broke")
    assert whole_steps(tmp_path) == [1, 2]


def test_preemption_signal_saves_once_and_stops(tmp_path):
    done = ended("preempted", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "step 1 not saved",
        "step 2 not saved",
        "step 3 saved",
        "step 4 not saved",
        "step 5 not saved",
        "stopped",
    ]
    assert whole_steps(tmp_path) == [3]
