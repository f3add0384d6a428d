"""The budget of the house: every room has the lines and names that it was granted, and it only falls."""

from __future__ import annotations

import pytest

from tests.judges.figures import MODULES_IN_A_PACKAGE, Room, budget, crowded, rooms

LOWER = "lower the budget: python -m tests.judges form --write"
SLACK = {"lines": 40, "public": 3, "others": 3}
"""So much below its budget, or 2 % of it, a room may be: what it won beyond that is not to be spent again."""


@pytest.fixture(scope="module")
def most() -> dict[str, Room]:
    return budget()[0]


@pytest.fixture(scope="module")
def now() -> dict[str, Room]:
    return rooms()


@pytest.mark.parametrize("name", SLACK)
def test_no_room_has_more_than_its_budget_and_none_keeps_what_it_won(most, now, name):
    told = []
    for room in sorted({*most, *now}):
        if room not in now or room not in most:
            told.append(f"{room}: {'gone' if room in most else 'new'}; {LOWER}")
            continue
        allowed, there = getattr(most[room], name), getattr(now[room], name)
        if there > allowed:
            told.append(f"{room}: {there} {name}, and its budget is {allowed}")
        elif allowed - there > max(SLACK[name], allowed // 50):
            told.append(f"{room}: {there} {name} of {allowed}; {LOWER}")
    assert told == []


def test_packages_are_read_in_one_sitting():
    """Those that are not yet lose modules only."""
    allowed, there = budget()[1], crowded()
    assert [
        f"{package}: {number} modules"
        for package, number in there.items()
        if number > allowed.get(package, MODULES_IN_A_PACKAGE)
    ] == []
    assert [
        f"{package}: {LOWER}" for package, number in allowed.items() if there.get(package, 0) < number
    ] == []
