"""P3 against SIGKILL and power cuts: what was acknowledged, or newer, is there, wherever a process dies.

A sample of each sweep; `python -m tests.reliability` makes all of them.
"""

from __future__ import annotations

import pytest

from tests.reliability.sampling import sample

pytestmark = [pytest.mark.reliability, pytest.mark.slow]


KILLS = 3


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of every sweep a few, in one command: they share its imports."""
    return sample(
        tmp_path_factory.mktemp("samples"), "local,power,first,ambush,copies,demotions", count=KILLS
    )


def of(outcomes, *sweeps):
    return [each for each in outcomes if each.sweep.startswith(sweeps)]


def test_a_kill_at_any_system_call_on_any_rank_loses_no_acknowledged_checkpoint(outcomes):
    moments = of(outcomes, "local disk, 1 rank: random moments")
    alone = [each for each in of(outcomes, "local disk, 1 rank", "disk without") if each not in moments]
    several = of(outcomes, "local disk, 2 ranks")
    assert len(alone) == len(several) == KILLS
    assert all(each.kills for each in alone + several)


def test_a_power_cut_at_any_system_call_loses_no_acknowledged_checkpoint(outcomes):
    for sweep in ("power cut, 1 rank", "power cut, 2 ranks", "the first save"):
        cuts = of(outcomes, sweep)
        assert sum(bool(each.kills) for each in cuts) == KILLS
        for fate in ("; strict", "; journal", "; random"):
            assert [each for each in cuts if fate in each.point.replace("power cut: ", "")]
    assert of(outcomes, "the first save, 1 rank: kill, and a power cut after the next save")


def test_kills_at_random_moments_of_a_tight_save_loop_lose_no_acknowledged_checkpoint(outcomes):
    assert sum(each.kills for each in of(outcomes, "local disk, 1 rank: random moments")) == KILLS


def test_a_copy_killed_at_any_system_call_counts_for_nothing_or_is_whole_and_is_completed(outcomes):
    killed = of(outcomes, "ckpt cp to a local disk")
    assert sum(each.kills for each in killed) == len(killed) == KILLS


def test_a_demotion_killed_at_any_system_call_leaves_the_whole_or_its_weights_and_is_completed(outcomes):
    killed = of(outcomes, "a demotion on a local disk")
    assert sum(each.kills for each in killed) == len(killed) == KILLS
