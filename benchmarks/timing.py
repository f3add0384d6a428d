"""What is measured of a save, and how the figures of many saves become three."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, final

import torch

from benchmarks.contenders import Contender


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds since the call; None where a contender does not do that.

    `stall_s`: the training may go on (the call has returned; on CUDA the compute stream is free again).
    `staged_s`: the training may change the state. `durable_s`: the bytes are on the device, by fsync.
    """

    stall_s: float | None
    staged_s: float | None
    durable_s: float | None


MEASURES = ("stall_s", "staged_s", "durable_s")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median, minimum and maximum."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """The spread of those values that are known; None if there is none."""
        known = [value for value in values if value is not None and not math.isnan(value)]
        if not known:
            return None
        return cls(median=statistics.median(known), low=min(known), high=max(known))

    def __str__(self) -> str:
        return f"{short(self.median)} [{short(self.low)}, {short(self.high)}]"

    def as_json(self) -> dict[str, Any]:
        """For the file."""
        return {"median": self.median, "min": self.low, "max": self.high}


def short(value: float) -> str:
    """Three decimals, and more where a value would come out as nothing."""
    return (
        f"{value:.3f}"
        if value >= 0.0995 or value <= 0
        else f"{value:.2g}"
        if value < 0.001
        else f"{value:.4f}"
    )


def wait_for_device(device: torch.device) -> None:
    """Let everything enqueued so far end."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def end_of(future: Future[Any]) -> Future[float]:
    """When `future` ends, by `time.perf_counter`, whoever waits for it and however late."""
    seen: Future[float] = Future()
    future.add_done_callback(lambda _: seen.set_result(time.perf_counter()))
    return seen


def time_save(contender: Contender, number: int) -> Timing:
    """One save, from the call to the fsync."""
    device = contender.task.device
    wait_for_device(device)
    start = time.perf_counter()
    flight = contender.start(number)
    if device.type == "cuda":
        # A copy may have been enqueued in the way of the training without holding the call.
        torch.cuda.current_stream(device).synchronize()
    stall = time.perf_counter() - start
    staged = None
    if flight.staged is not None:
        staged_at = end_of(flight.staged)
        flight.staged.result()
        staged = staged_at.result() - start
    flight.durable.result()
    durable = time.perf_counter() - start
    return Timing(
        stall_s=stall if contender.has_stall else None,
        staged_s=staged,
        durable_s=durable if contender.has_durable else None,
    )


def settle(contender: Contender, number: int) -> None:
    """Delete what was saved and write back all dirty pages, so that nobody pays for another's bytes."""
    contender.clean(number)
    os.sync()
