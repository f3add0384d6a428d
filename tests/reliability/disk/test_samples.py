"""P3 against SIGKILL and power cuts: what was acknowledged, or newer, is there, wherever a process dies.

A sample of each sweep; `python -m tests.reliability` makes all of them.
"""

from __future__ import annotations

import pytest

from tests.reliability.sampling import sample

pytestmark = [pytest.mark.reliability, pytest.mark.slow]


def test_a_kill_at_any_system_call_on_any_rank_loses_no_acknowledged_checkpoint(tmp_path):
    outcomes = sample(tmp_path, "local", count=6)
    assert all(each.kills for each in outcomes)
    for ranks in ("1 rank", "2 ranks"):
        assert len([each for each in outcomes if ranks in each.sweep]) == 6


def test_a_power_cut_at_any_system_call_loses_no_acknowledged_checkpoint(tmp_path):
    outcomes = sample(tmp_path, "power,first", count=3)
    for fate in ("; strict", "; journal", "; random", "a power cut after the next save"):
        assert [each for each in outcomes if fate in each.point]


def test_kills_at_random_moments_of_a_tight_save_loop_lose_no_acknowledged_checkpoint(tmp_path):
    assert sum(each.kills for each in sample(tmp_path, "ambush", count=25)) == 25
