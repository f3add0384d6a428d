"""However a training script ends, the save in flight is finished or left out whole; none before is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage

pytestmark = pytest.mark.slow  # programs, after one cold start

PROGRAMS = Path(__file__).with_name("programs.py")


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended, and the root that it leaves."""

    returncode: int
    stdout: str
    stderr: str
    root: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Every program by its name, run to its end."""
    folder = tmp_path_factory.mktemp("endings")
    command = [sys.executable, str(PROGRAMS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return {
        name: Ended(
            returncode=code,
            stdout=(folder / f"{name}.out").read_text(),
            stderr=(folder / f"{name}.err").read_text(),
            root=folder / name,
        )
        for name, code in json.loads(done.stdout).items()
    }


def whole_steps(root):
    storage = LocalStorage(root)
    infos = Catalog(storage).committed()
    assert [verify(storage, info.name) for info in infos] == [[]] * len(infos)
    assert Catalog(storage).torn() == []
    return [info.step for info in infos]


def test_ctrl_c_drains_the_save_in_flight(ended):
    done = ended["interrupted"]
    assert done.stdout.split() == ["training"]
    assert "KeyboardInterrupt" in done.stderr
    assert whole_steps(done.root) == [1, 2]
    assert not (done.root / ".ckpt-suite/writer.json").exists(), "the root was not given back"


def test_interpreter_exit_without_close_still_commits(ended):
    done = ended["exits_without_closing"]
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["end"], "")
    assert whole_steps(done.root) == [1, 2]


@pytest.mark.parametrize("program", ["exits_before_the_last_prune", "exits_where_no_thread_begins_any_more"])
def test_the_last_prune_is_made_though_the_interpreter_ends(ended, program):
    done = ended[program]
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["end"], "")
    assert whole_steps(done.root) == [2]


def test_an_exception_without_close_still_commits(ended):
    done = ended["raises_without_closing"]
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: the training broke")
    assert whole_steps(done.root) == [1, 2]


def test_preemption_signal_saves_once_and_stops(ended):
    done = ended["preempted"]
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "step 1 not saved",
        "step 2 not saved",
        "step 3 saved",
        "step 4 not saved",
        "step 5 not saved",
        "stopped",
    ]
    assert whole_steps(done.root) == [3]


@pytest.mark.reliability
def test_a_process_whose_write_hangs_can_end_without_closing_anything(ended):
    done = ended["hangs_in_a_write"]
    assert done.returncode == 0, done.stderr
    assert list(done.root.glob(".incomplete-*-step-000000001~")), "nothing was begun"
