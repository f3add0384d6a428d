"""A referee that is not ours kills trainings of every kind, and finds nothing lost and nothing changed."""

from __future__ import annotations

import pytest

from tests.reliability.referee.jobs import JOBS
from tests.reliability.sampling import sample

pytestmark = [pytest.mark.slow, pytest.mark.reliability]


def test_an_outside_referee_finds_no_kill_that_loses_or_changes_anything(tmp_path):
    outcomes = sample(tmp_path, "referee", count=2)
    assert all(each.kills for each in outcomes)
    assert {each.sweep for each in outcomes} == {f"outside referee, {kind}" for kind in JOBS}
    assert len(outcomes) == 2 * len(JOBS)
