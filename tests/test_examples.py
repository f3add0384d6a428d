"""The examples are short, run as they are, and run again where they left off."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts import run_python

pytestmark = pytest.mark.slow  # whole trainings, each in a process of its own

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MAX_LINES = 80

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


def run(*command: str | Path, cwd: Path) -> str:
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    finished = run_python(*command, cwd=cwd, variables=settings)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@each_script
def test_an_example_fits_on_one_screen(script):
    assert len(script.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@each_script
def test_an_example_runs(script, tmp_path):
    run(script, cwd=tmp_path)


@pytest.mark.distributed
def test_the_plain_loop_goes_on_where_it_was_and_on_more_ranks(tmp_path):
    script = EXAMPLES / "plain_loop.py"
    assert "rank 0: starting afresh" in run(script, "run", cwd=tmp_path)
    committed = tmp_path / "run" / "step-000000040"
    committed.rename(tmp_path / "set-aside")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run(*torchrun, script, "run", cwd=tmp_path)
    assert "rank 0: resumed from step 30" in output
    assert "rank 1: resumed from step 30" in output
    assert committed.is_dir()
