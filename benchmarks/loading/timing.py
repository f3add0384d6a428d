"""What is measured of a load."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from benchmarks.loading.loader import Loader
from benchmarks.loading.pages import PageState, Traffic, bring_to
from benchmarks.timing import wait_for_device


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class LoadTiming:
    """One load: seconds, and bytes read meanwhile (see `Traffic`); None where the kernel does not count."""

    seconds: float
    asked_bytes: int | None
    device_bytes: int | None


MEASURES = ("seconds", "asked_bytes", "device_bytes")


def one_load(loader: Loader, state: PageState) -> LoadTiming:
    """Poison, bring the files into the state that is measured, load, verify.

    Raises:
        WrongValuesError: the load has not brought what was saved.
    """
    loader.poison()
    bring_to(state, loader.files())
    timing = time_load(loader)
    loader.check()
    return timing


def time_load(loader: Loader) -> LoadTiming:
    """The load alone."""
    wait_for_device(loader.task.device)
    before = Traffic.now()
    start = time.perf_counter()
    loader.load()
    wait_for_device(loader.task.device)
    seconds = time.perf_counter() - start
    after = Traffic.now()
    if before is None or after is None:
        return LoadTiming(seconds=seconds, asked_bytes=None, device_bytes=None)
    return LoadTiming(
        seconds=seconds, asked_bytes=after.asked - before.asked, device_bytes=after.device - before.device
    )


def of_all_ranks(timings: Sequence[LoadTiming]) -> LoadTiming:
    """One load by several ranks: the slowest one's time, and what all of them read."""
    return LoadTiming(
        seconds=max(each.seconds for each in timings),
        asked_bytes=_sum([each.asked_bytes for each in timings]),
        device_bytes=_sum([each.device_bytes for each in timings]),
    )


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
