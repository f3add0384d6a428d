"""P3 against SIGKILL and power cuts: whoever dies wherever, what was acknowledged, or newer, is there.

A sample of each sweep; `python -m benchmarks.crash` makes all of them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
pytestmark = [pytest.mark.reliability, pytest.mark.slow]


def sample(parts, count, tmp_path, seed=20261121):
    """Outcomes of some parts; a command of its own, because it forks."""
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks.crash", "--only", parts, "--count", str(count)]
    command += ["--seed", str(seed), "--root", str(tmp_path), "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    found = json.loads(out.read_text())
    assert found["problems"] == []
    assert not any(part["failure"] for part in found["parts"])
    return found["outcomes"]


def assert_nothing_lost(outcomes):
    assert [
        each for each in outcomes if each["resumed"] is None or each["resumed"] < each["acknowledged"]
    ] == []


def test_a_kill_at_any_system_call_on_any_rank_loses_no_acknowledged_checkpoint(tmp_path):
    outcomes = sample("local", 6, tmp_path)
    assert_nothing_lost(outcomes)
    assert all(each["kills"] for each in outcomes)
    for ranks in ("1 rank", "2 ranks", "4 ranks"):
        assert len([each for each in outcomes if ranks in each["sweep"]]) == 6


def test_a_power_cut_at_any_system_call_loses_no_acknowledged_checkpoint(tmp_path):
    outcomes = sample("power,first", 4, tmp_path)
    assert_nothing_lost(outcomes)
    for fate in ("; strict", "; journal", "; random", "a power cut after the next save"):
        assert [each for each in outcomes if fate in each["point"]]


def test_kills_at_random_moments_of_a_tight_save_loop_lose_no_acknowledged_checkpoint(tmp_path):
    outcomes = sample("ambush", 25, tmp_path)
    assert_nothing_lost(outcomes)
    assert sum(each["kills"] for each in outcomes) == 25
