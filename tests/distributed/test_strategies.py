"""Saved under any strategy and number of ranks, loaded under any other: tensor by tensor, and bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_core.testing import run_ranks
from tests.distributed.manager_jobs import strategies_job

pytestmark = pytest.mark.distributed

ON_TWO = ("ddp", "fsdp1", "fsdp2", "tp")
ON_FOUR = ("fsdp2", "hsdp", "fsdp2_tp")
NAMES = ("single@1", *(f"{name}@2" for name in ON_TWO), *(f"{name}@4" for name in ON_FOUR))
FEW = ("single@1", "ddp@2", "fsdp2@2")


class Results:
    """What all ranks of several jobs found."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._found: list[dict[str, Any]] = []

    def run(
        self, ranks: int, own: tuple[str, ...], targets: tuple[str, ...], sources: tuple[str, ...]
    ) -> None:
        arguments = (self._root, own, targets, sources)
        if ranks == 1:
            self._found.append(strategies_job(*arguments))
        else:
            self._found += run_ranks(strategies_job, ranks, *arguments, timeout_seconds=240)

    def of(self, kind: str, key: Any) -> list[Any]:
        """One value for every rank that has one."""
        return [found[kind][key] for found in self._found if key in found[kind]]


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Results:
    results = Results(str(tmp_path_factory.mktemp("few")))
    results.run(1, ("single",), ("single",), ())
    results.run(2, ("ddp", "fsdp2"), ("ddp", "fsdp2"), ("single@1",))
    results.run(1, (), ("single",), ("ddp@2", "fsdp2@2"))
    return results


@pytest.fixture(scope="module")
def all_pairs(tmp_path_factory) -> Results:
    results = Results(str(tmp_path_factory.mktemp("all")))
    results.run(1, ("single",), ("single",), ())
    results.run(2, ON_TWO, ON_TWO, ("single@1",))
    results.run(4, ON_FOUR, ON_FOUR, NAMES[:5])
    results.run(2, (), ON_TWO, NAMES[5:])
    results.run(1, (), ("single",), NAMES[1:])
    return results


def assert_loaded(results: Results, source: str, target: str) -> None:
    found = results.of("loads", (source, target))
    assert len(found) == int(target.partition("@")[2])
    assert found == [[]] * len(found)


def assert_resumed(results: Results, name: str) -> None:
    trained, resumed = results.of("trained", name), results.of("resumed", name)
    assert len(trained) == int(name.partition("@")[2])
    assert resumed == trained


@pytest.mark.parametrize("target", FEW)
@pytest.mark.parametrize("source", FEW)
def test_common_strategies_load_one_another(few, source, target):
    assert_loaded(few, source, target)


@pytest.mark.parametrize("name", FEW)
def test_common_strategies_go_on_bit_for_bit_on_every_rank(few, name):
    assert_resumed(few, name)


@pytest.mark.slow
@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("source", NAMES)
def test_every_strategy_loads_what_every_other_saved(all_pairs, source, target):
    assert_loaded(all_pairs, source, target)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_goes_on_bit_for_bit_on_every_rank(all_pairs, name):
    assert_resumed(all_pairs, name)
