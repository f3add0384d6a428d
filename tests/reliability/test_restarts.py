"""A job whose ranks are killed comes back in place, under torch's elastic agent, and goes on exactly."""

from __future__ import annotations

import pytest

from tests.reliability.restarts import KILLS, cases
from tests.reliability.sampling import sample
from tests.support.thorough import THOROUGH

pytestmark = [pytest.mark.reliability, pytest.mark.slow]

SAMPLE = () if THOROUGH else ("loop, c10d, again and again", "loop, static, in a save")


def test_ranks_killed_at_any_moment_are_started_again_in_place_and_end_with_the_same_weights(tmp_path):
    outcomes = sample(tmp_path, "restarts", cases=SAMPLE)
    assert len(outcomes) == (len(SAMPLE) or len(list(cases())))
    assert all(outcome.kills for outcome in outcomes)


def test_the_moments_are_steps_and_saves_of_each_rank_alone_and_of_all():
    kills = [kill for moments in KILLS.values() for kill in moments]
    assert {kill.ranks for kill in kills} == {(0,), (1,), (0, 1)}
    assert {kill.point.split()[0] for kill in kills} == {"start", "step", "write", "commit"}
