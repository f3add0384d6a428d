"""P3 against SIGKILL: wherever a process dies, the last acknowledged checkpoint, or a newer one, is there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

VICTIMS = Path(__file__).with_name("victims.py")
SAMPLE = 12


def outcomes(kind, folder, count, number=0, timeout_seconds=240):
    command = [sys.executable, str(VICTIMS), kind, str(folder), str(count), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def assert_nothing_lost(found, *, at_least):
    broken = [f"{outcome['label']}:\n{outcome['error']}" for outcome in found if "error" in outcome]
    assert not broken, "\n".join(broken)
    assert sum(outcome["killed"] for outcome in found) >= at_least


def test_a_kill_at_sampled_storage_operations_loses_no_acknowledged_checkpoint(tmp_path):
    assert_nothing_lost(outcomes("sweep", tmp_path, SAMPLE), at_least=15)


@pytest.mark.slow
def test_a_kill_at_every_storage_operation_loses_no_acknowledged_checkpoint(tmp_path):
    found = outcomes("sweep", tmp_path, 1)
    assert_nothing_lost(found, at_least=200)
    assert {outcome["resumed"] for outcome in found} == {2, 3}, "the sweep should cross the commit"


@pytest.mark.slow
def test_kills_at_random_moments_of_a_tight_save_loop_lose_no_acknowledged_checkpoint(tmp_path):
    assert_nothing_lost(outcomes("ambush", tmp_path, 30, 20260101), at_least=30)
