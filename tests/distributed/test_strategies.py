"""Saved under any strategy and number of ranks, loaded under any other: tensor by tensor, and bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.manager_jobs import strategies_job
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

SOURCES = {
    "single@1": ("single@1", "ddp@2", "fsdp1@2", "fsdp2@2", "tp@2", "fsdp2@4", "hsdp@4", "fsdp2_tp@4"),
    "ddp@2": ("single@1", "ddp@2", "fsdp2@2", "tp@2", "fsdp2_tp@4"),
    "fsdp1@2": ("single@1", "ddp@2", "fsdp1@2", "tp@2", "fsdp2@4"),
    "fsdp2@2": ("single@1", "ddp@2", "fsdp2@2", "tp@2", "hsdp@4"),
    "tp@2": ("single@1", "fsdp2@2", "tp@2", "fsdp2_tp@4"),
    "fsdp2@4": ("single@1", "fsdp2@2", "tp@2", "fsdp2@4", "fsdp2_tp@4"),
    "hsdp@4": ("ddp@2", "fsdp1@2", "tp@2", "fsdp2@4", "hsdp@4"),
    "fsdp2_tp@4": ("single@1", "tp@2", "fsdp2@4", "hsdp@4", "fsdp2_tp@4"),
}
"""Target -> what is loaded into it: its own, and one or more of every kind that there is on disk."""
ON_DISK = {
    "whole": {"single@1", "ddp@2"},
    "rows": {"fsdp1@2", "fsdp2@2", "fsdp2@4", "hsdp@4"},
    "columns, or a grid": {"tp@2", "fsdp2_tp@4"},
}
PAIRS = [(source, target) for target, sources in SOURCES.items() for source in sources]


def ranks_of(name: str) -> int:
    return int(name.partition("@")[2])


class Results:
    """What all ranks of several jobs found."""

    def __init__(self, root: str) -> None:
        self._root = root
        self._saved: list[str] = []
        self._loaded: list[tuple[str, str]] = []
        self._found: list[dict[str, Any]] = []

    def run(self, ranks: int, own: list[str]) -> None:
        """Save under `own`; load, of what there is, what these ranks have not loaded yet."""
        self._saved += own
        loads = [
            (source, target)
            for source, target in PAIRS
            if ranks_of(target) == ranks and source in self._saved and (source, target) not in self._loaded
        ]
        self._loaded += loads
        arguments = (self._root, own, loads)
        if ranks == 1:
            self._found.append(strategies_job(*arguments))
        else:
            self._found += run_ranks(strategies_job, ranks, *arguments, timeout_seconds=240)

    def of(self, kind: str, key: Any) -> list[Any]:
        """One value for every rank that has one."""
        return [found[kind][key] for found in self._found if key in found[kind]]


@pytest.fixture(scope="module")
def every(tmp_path_factory) -> Results:
    results = Results(str(tmp_path_factory.mktemp("strategies")))
    results.run(1, ["single@1"])
    results.run(2, ["ddp@2", "fsdp1@2", "fsdp2@2", "tp@2"])
    results.run(4, ["fsdp2@4", "hsdp@4", "fsdp2_tp@4"])
    results.run(2, [])
    results.run(1, [])
    return results


def assert_loaded(results: Results, source: str, target: str) -> None:
    found = results.of("loads", (source, target))
    assert len(found) == ranks_of(target)
    assert found == [[]] * len(found)


def assert_resumed(results: Results, name: str) -> None:
    trained, resumed = results.of("trained", name), results.of("resumed", name)
    assert len(trained) == ranks_of(name)
    assert resumed == trained


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_strategy_loads_what_others_saved(every, source, target):
    assert_loaded(every, source, target)


@pytest.mark.parametrize("name", SOURCES)
def test_every_strategy_goes_on_bit_for_bit_on_every_rank(every, name):
    assert_resumed(every, name)


@pytest.mark.parametrize("target", SOURCES)
def test_each_strategy_loads_its_own_and_every_kind_and_is_loaded(target):
    assert target in SOURCES[target]
    assert all(kind & set(SOURCES[target]) for kind in ON_DISK.values())
    assert target in SOURCES["single@1"]
