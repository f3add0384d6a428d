"""P3 and P4 under SIGKILL of real trainings: whatever was acknowledged is resumed from, and exactly."""

from __future__ import annotations

import pytest

from tests.reliability.outcome import table
from tests.reliability.sampling import sample
from tests.reliability.training.reference import Reference
from tests.reliability.training.sweeps import ALL_KILLS, SWEEPS

pytestmark = pytest.mark.reliability

SAMPLE = 6


@pytest.mark.slow
def test_killed_trainings_go_on_exactly_to_their_end_and_leave_nothing_behind(tmp_path):
    """…from what was acknowledged, or newer, under both adapters, after a kill of one rank or of all."""
    outcomes = sample(tmp_path, "training", count=SAMPLE)
    rows = {row["sweep"]: row for row in table(outcomes)}
    assert {sweep: row["points"] for sweep, row in rows.items()} == {
        str(sweep): sweep.kills_of(SAMPLE) for sweep in SWEEPS
    }
    assert max(each.acknowledged for each in outcomes) > 0, "the moments should cross commits"


def test_the_shares_of_all_kinds_make_a_thousand_kills():
    assert sum(sweep.share for sweep in SWEEPS) == ALL_KILLS
    assert [sweep.kills_of(1) for sweep in SWEEPS] == [1] * len(SWEEPS)


WHOLE = [
    {"rank": 0, "began": 0, "state": "s0"},
    *({"rank": 0, "step": step, "state": f"s{step}", "loss": float(step)} for step in (1, 2, 3)),
]


def test_a_life_that_goes_another_way_is_noticed_at_its_first_wrong_step():
    reference = Reference(WHOLE, seconds=1.0, steps=3)
    began = {"rank": 0, "began": 1, "state": "s1"}
    assert reference.differences([began, *WHOLE[2:]]) == []
    assert reference.differences([{**began, "state": "s2"}]) == ["rank 0 began at step 1 with other values"]
    for change in ({"state": "s9"}, {"loss": 9.0}, {"rank": 1}, {"step": 7}):
        (told,) = reference.differences([began, {**WHOLE[2], **change}, {**WHOLE[3], **change}])
        assert "made another step" in told


def test_a_training_that_did_not_make_all_its_steps_is_no_reference():
    with pytest.raises(RuntimeError, match="made 2 steps, not 3"):
        Reference(WHOLE[:3], seconds=1.0, steps=3)
