"""The README's examples run, pasted as they are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.scripts import run_python

pytestmark = pytest.mark.slow  # whole trainings, each in a process of its own

README = Path(__file__).parent.parent / "README.md"
CLI_SCRIPT = """
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule
LightningCLI(BoringModel, BoringDataModule)
"""


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)


def _block(language: str, containing: str) -> str:
    [block] = [block for block in _blocks(language) if containing in block]
    return block


def _run(directory: Path, *arguments: str) -> None:
    done = run_python(
        *arguments, cwd=directory, variables={"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _committed(root: Path) -> list[str]:
    return sorted(marker.parent.name for marker in root.glob("*/COMMITTED"))


def test_the_readme_is_short_enough_to_be_read() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


def test_the_lightning_example_saves_keeps_three_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_block("python", "import ShardedCheckpoint"))
    _run(tmp_path, "train.py")
    names = _committed(tmp_path / "runs/boring")
    assert len(names) == 3
    _run(tmp_path, "train.py")
    assert _committed(tmp_path / "runs/boring") == names


def test_the_yaml_example_saves_and_resumes_without_a_change_to_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(CLI_SCRIPT)
    (tmp_path / "run.yaml").write_text(_block("yaml", "ShardedCheckpoint"))
    _run(tmp_path, "train.py", "fit", "--config", "run.yaml")
    assert _committed(tmp_path / "runs/cli")[-1] == "step-000000020"
    _run(tmp_path, "train.py", "fit", "--config", "run.yaml", "--trainer.max_steps=30")
    names = _committed(tmp_path / "runs/cli")
    assert names[-1] == "step-000000030"
    assert not [name for name in names if ".run-" in name], "it went on with the first run's line"


def test_the_accelerate_example_saves_rotates_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_block("python", "import accelerate_ckpt"))
    _run(tmp_path, "train.py")
    names = _committed(tmp_path / "runs/accelerate")
    assert len(names) == 3
    _run(tmp_path, "train.py")
    assert _committed(tmp_path / "runs/accelerate") == names, "nothing was left to train"


def test_the_plain_example_saves_and_resumes_and_the_command_line_example_works_on_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_block("python", "TrainState(model"))
    for _ in range(2):
        _run(tmp_path, "train.py")
        names = _committed(tmp_path / "runs/plain")
        assert "step-000000020" in names
        assert 3 <= len(names) <= 5
    for line in _block("bash", "ckpt ls").splitlines():
        command = shlex.split(line, comments=True)
        _run(tmp_path, "-m", "ckpt_core.cli", *command[1:])
