"""docs/defects.md is true: what it names exists, and nothing that we show on stock is missing from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.reliability

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "defects.md").read_text(encoding="utf-8")
ROWS = [line for line in TABLE.splitlines() if line.startswith("| ") and not line.startswith("| defect")]


def names_of(text: str) -> list[str]:
    return re.findall(r"`(test_\w+)`", text)


def defined() -> list[str]:
    found: list[str] = []
    for path in (ROOT / "tests").rglob("*.py"):
        found += re.findall(r"^\s*def (test_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    return found


@pytest.fixture(scope="module")
def tests() -> list[str]:
    return defined()


def test_every_test_that_the_table_names_exists_once(tests):
    named = set(names_of(TABLE))
    assert {name: tests.count(name) for name in named} == dict.fromkeys(named, 1)


def test_every_defect_has_a_test_that_it_does_not_happen_here():
    for row in ROWS:
        _, defect, _, ours, _ = row.split("|")
        assert [name for name in names_of(ours) if not name.startswith("test_stock_")], defect


def test_every_defect_that_is_shown_on_stock_is_in_the_table():
    shown: list[str] = []
    for path in Path(__file__).parent.glob("test_defects_of_others_*.py"):
        shown += re.findall(r"^def (test_stock_\w+)\(", path.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(set(shown) - set(names_of(TABLE))) == []
    assert len(shown) >= 20


def test_every_file_that_the_table_names_exists():
    for path in re.findall(r"`((?:tests|benchmarks)/[\w/]+\.py)`", TABLE):
        assert (ROOT / path).is_file(), path
    for page in re.findall(r"\]\((\w+\.md)\)", TABLE):
        assert (ROOT / "docs" / page).is_file(), page
