"""A plugin of pytest: of the files that are given, only the tests that a variable names.

PYTEST_DONT_REWRITE: it is imported before pytest begins.
"""

from __future__ import annotations

import os

import pytest

VARIABLE = "JUDGES_TESTS"


def is_of(case: str, test: str) -> bool:
    return case == test or case.startswith(test if "[" in test else f"{test}[")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop what is not asked for."""
    wanted = os.environ[VARIABLE].split()
    chosen = [item for item in items if any(is_of(item.name, test) for test in wanted)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen
