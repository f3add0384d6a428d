"""The demo ends with 0 only if everything was equal, and says what was not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from examples.demo.evidence import read_evidence
from examples.demo.plan import KILLED, PHASES, RESHARDED, RESUMED, UNINTERRUPTED, Plan
from examples.demo.report import judge, report

REPOSITORY = Path(__file__).parents[1]
PLAN = Plan(steps=12)
TORN = ".incomplete-0123abcd-step-000000008"


def write_losses(folder: Path, rank: int, steps: range) -> None:
    lines = [{"step": step, "loss": (1.0 / (step + rank)).hex(), "time": float(step)} for step in steps]
    (folder / f"losses-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def folder(tmp_path):
    """What the phases would leave if all went well."""
    steps = {
        UNINTERRUPTED: range(1, 13),
        KILLED: range(1, 10),
        RESUMED: range(7, 13),
        RESHARDED: range(13, 15),
    }
    for phase in PHASES:
        (tmp_path / phase).mkdir()
        for rank in range(1 if phase == RESHARDED else 2):
            write_losses(tmp_path / phase, rank, steps[phase])
        if phase != KILLED:
            (tmp_path / phase / "state.json").write_text(json.dumps({"model.w": "float32 (2,) abc"}))
    kill = {"time": 9.5, "torn": [TORN], "torn_bytes": 100, "committed": [2, 4, 6]}
    (tmp_path / "kill.json").write_text(json.dumps(kill))
    (tmp_path / RESUMED / "rank-0.log").write_text(f"removed what crashed saves left: {TORN}\n")
    return tmp_path


def equal(folder: Path) -> bool:
    return report(Console(quiet=True), read_evidence(folder), PLAN)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_equal_runs_are_called_equal(folder):
    assert equal(folder)


@pytest.mark.parametrize("phase", [KILLED, RESUMED])
def test_the_last_bit_of_one_loss_makes_a_difference(folder, phase):
    loss = 1.0 / 8
    edit(folder / phase / "losses-1.jsonl", loss.hex(), (loss + 2**-50).hex())
    assert not equal(folder)


@pytest.mark.parametrize("phase", [RESUMED, RESHARDED])
def test_another_tensor_makes_a_difference(folder, phase):
    edit(folder / phase / "state.json", "abc", "abd")
    assert not equal(folder)


def test_a_resume_from_scratch_is_not_called_a_resume(folder):
    for rank in range(2):
        write_losses(folder / RESUMED, rank, range(1, 13))
    assert not equal(folder)


def test_a_run_that_ended_early_is_not_equal(folder):
    write_losses(folder / RESUMED, 1, range(7, 12))
    assert not equal(folder)


def test_states_that_were_never_written_are_not_equal(folder):
    for phase in (UNINTERRUPTED, RESUMED, RESHARDED):
        (folder / phase / "state.json").unlink()
    assert not equal(folder)


def test_a_torn_save_must_be_seen_and_reported_and_cleared(folder):
    log = folder / RESUMED / "rank-0.log"
    words = log.read_text()
    log.write_text("")
    assert not equal(folder)
    log.write_text(words)
    (folder / "checkpoints" / TORN).mkdir(parents=True)
    assert not equal(folder)


def test_ranks_killed_in_different_steps_are_no_difference(folder):
    write_losses(folder / KILLED, 1, range(1, 11))
    assert equal(folder)


def test_the_report_names_what_differs(folder):
    edit(folder / RESUMED / "state.json", "abc", "abd")
    console = Console(record=True, file=StringIO(), width=100)
    report(console, read_evidence(folder), PLAN)
    assert "model.w: float32 (2,) abc and float32 (2,) abd" in console.export_text()


@pytest.mark.parametrize("steps", [12, 18, 24, 60])
def test_kill_and_resume_fall_into_the_middle_of_a_later_epoch(steps):
    plan = Plan(steps=steps)
    assert plan.resume_step < plan.torn_step < plan.kill_step < plan.torn_step + plan.save_every
    assert plan.resume_step > plan.steps_per_epoch
    assert plan.resume_step % plan.steps_per_epoch
    assert plan.kill_step < 2 * plan.steps_per_epoch


@pytest.mark.parametrize("steps", [0, 6, 13])
def test_a_number_of_steps_that_does_not_divide_is_refused(steps):
    with pytest.raises(ValueError, match="multiple of 6"):
        Plan(steps=steps)


def demo(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "examples.demo", "--framework", "plain", *map(str, arguments)]


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_shows_that_nothing_is_lost(tmp_path):
    command = demo("--steps", "12", "--out", tmp_path)
    finished = subprocess.run(
        command, check=False, cwd=REPOSITORY, capture_output=True, text=True, timeout=220
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "everything is equal" in finished.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    checks = judge(read_evidence(tmp_path / "plain"), PLAN)
    assert all(check.holds for check in checks)


@pytest.mark.slow
@pytest.mark.distributed
def test_ending_the_demo_leaves_no_process_behind(tmp_path):
    process = subprocess.Popen(demo("--out", tmp_path), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    log = tmp_path / "plain" / UNINTERRUPTED / "losses-0.jsonl"
    deadline = time.monotonic() + 100
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.terminate()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert log.exists(), output
    assert ranks_of(tmp_path) == []


def ranks_of(out: Path) -> list[str]:
    """The processes that write a log into this folder."""
    found = []
    for standard_output in Path("/proc").glob("[0-9]*/fd/1"):
        try:
            written = standard_output.readlink()
        except OSError:
            continue
        if written.is_relative_to(out):
            found.append(str(standard_output))
    return found
