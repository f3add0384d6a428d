"""P3 and P4 under SIGKILL of real trainings: whatever was acknowledged is resumed from, and exactly."""

from __future__ import annotations

import pytest

from benchmarks.crashing import training
from benchmarks.crashing.outcome import problems, table

pytestmark = [pytest.mark.reliability, pytest.mark.slow]

SEED = 20261121
SAMPLE = 20


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """A sample of every kind of victim under both adapters."""
    return list(training.run(seed=SEED, folder=tmp_path_factory.mktemp("trainings"), count=SAMPLE))


def test_kills_at_random_moments_of_trainings_lose_no_acknowledged_checkpoint(outcomes):
    assert not [each for each in outcomes if each.lost], problems(outcomes)


def test_killed_trainings_go_on_exactly_to_their_end_and_leave_nothing_behind(outcomes):
    assert problems(outcomes) == []


def test_every_kind_of_victim_was_killed_under_both_adapters(outcomes):
    rows = {row["sweep"]: row for row in table(outcomes)}
    assert {str(sweep) for sweep in training.SWEEPS} == set(rows)
    for sweep in training.SWEEPS:
        assert rows[str(sweep)]["points"] == sweep.kills_of(SAMPLE)
    assert max(each.acknowledged for each in outcomes) > 0, "the moments should cross commits"


def test_the_shares_of_all_kinds_make_a_thousand_kills():
    assert sum(sweep.share for sweep in training.SWEEPS) == training.ALL_KILLS
    assert [sweep.kills_of(1) for sweep in training.SWEEPS] == [1] * len(training.SWEEPS)
