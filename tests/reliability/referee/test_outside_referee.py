"""`ckpt-chaos`, which is not ours, kills trainings of every kind at file events and judges what resumes.

Each training is killed at a sample of the events; all of them, by hand:

    python -m ckpt_chaos run --max-points 1000 --step-regex 'resumed from step (\\d+)' \\
        --result-file '{out}/final.bin' --checkpoint-glob '{out}/run/*[0-9]' --ckpt-ignore-size \\
        --fail-on HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK -- python -m tests.crash.referee_jobs plain {out}
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.reliability]

ROOT = Path(__file__).parents[2]
POINTS = {"plain": 3, "lightning": 1, "accelerate": 1, "trainer": 1}
"""Kills for each kind of training; each costs two processes, which import its framework."""


@pytest.mark.parametrize("kind", POINTS)
def test_an_outside_referee_finds_no_kill_that_loses_or_changes_anything(kind, tmp_path):
    command = [
        sys.executable, "-m", "ckpt_chaos", "run",
        "--work", str(tmp_path / "referee"),
        "--max-points", str(POINTS[kind]),
        "--modes", "before",
        "--step-regex", r"resumed from step (\d+)",
        "--result-file", "{out}/final.bin",
        "--checkpoint-glob", "{out}/run/*[0-9]",
        "--ckpt-ignore-size",
        "--fail-on", "HARD_FAIL,SILENT_DIVERGENCE,LOST_WORK",
        "--timeout", "120",
        "--", sys.executable, "-m", "tests.crash.referee_jobs", kind, "{out}",
    ]  # fmt: skip
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    verdicts = [json.loads(path.read_text()) for path in (tmp_path / "referee").glob("pt_*/result.json")]
    assert sum(verdict["crashed"] for verdict in verdicts) == POINTS[kind], ended.stdout
