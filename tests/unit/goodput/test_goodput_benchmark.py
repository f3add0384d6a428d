"""A small run of the benchmark that compares `Optimal` with the best fixed interval."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.goodput import CASES, JOB, compare


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[-1]], ids=lambda case: case.name)
def test_the_optimum_is_as_near_the_best_as_it_must_be(case) -> None:
    line = compare(case, 20, replace(JOB, work=JOB.work / 2))
    assert line.passed, line
    assert 0.6 < line.best_seconds / line.formula_seconds < 1.7
