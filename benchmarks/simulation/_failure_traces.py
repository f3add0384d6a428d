"""When a simulated job fails: by a distribution, or by a record of one's own."""
# ruff: noqa: ARG002 - only a record cares which run it is

from __future__ import annotations

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Final, final

import numpy as np

from ckpt_core.errors import ConfigError
from ckpt_core.validation import positive, require

LLAMA_3_DEVICE_SECONDS: Final = 54 * 86400 * 16384 / 419
"""GPU-seconds per interruption of the training of Llama 3 405B: 419 in 54 days on 16,384 GPUs."""

_AT_ONCE: Final = 64


class FailureTrace(ABC):
    """A source of the seconds from each failure of a job to the next one.

    Down time counts, too: a job may fail while it restarts. Implementations are frozen values.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def mtbf(self) -> float:
        """The mean seconds between failures."""

    @abstractmethod
    def gaps(self, draws: np.random.Generator, run: int) -> Iterator[float]:
        """Yield the seconds to the first failure and between failures, without end.

        Args:
            draws: random numbers of this run.
            run: its number, from 0.
        """


@final
@dataclass(frozen=True, slots=True)
class ExponentialFailures(FailureTrace):
    """Failures that know no past: of large jobs of many parts."""

    mean: float

    def __post_init__(self) -> None:
        require("ExponentialFailures", positive("mean", self.mean))

    @property
    def mtbf(self) -> float:
        """The mean seconds between failures."""
        return self.mean

    def gaps(self, draws: np.random.Generator, run: int) -> Iterator[float]:
        """Yield the seconds between failures, without end."""
        while True:
            yield from draws.exponential(self.mean, _AT_ONCE).tolist()


@final
@dataclass(frozen=True, slots=True)
class WeibullFailures(FailureTrace):
    """Failures that cluster where the shape is below 1."""

    mean: float
    shape: float

    def __post_init__(self) -> None:
        require("WeibullFailures", positive("mean", self.mean), positive("shape", self.shape))

    @property
    def mtbf(self) -> float:
        """The mean seconds between failures."""
        return self.mean

    def gaps(self, draws: np.random.Generator, run: int) -> Iterator[float]:
        """Yield the seconds between failures, without end."""
        scale = self.mean / math.gamma(1 + 1 / self.shape)
        while True:
            yield from (scale * draws.weibull(self.shape, _AT_ONCE)).tolist()


@final
@dataclass(frozen=True, slots=True)
class RecordedFailures(FailureTrace):
    """The gaps of a record, in their order in the first run, in others drawn from it."""

    recorded: tuple[float, ...]

    def __post_init__(self) -> None:
        problem = None if self.recorded else "a record needs at least one gap between failures"
        require("RecordedFailures", problem, *(positive("each gap", gap) for gap in self.recorded))

    @property
    def mtbf(self) -> float:
        """The mean seconds between failures."""
        return sum(self.recorded) / len(self.recorded)

    def gaps(self, draws: np.random.Generator, run: int) -> Iterator[float]:
        """Yield the seconds between failures, without end."""
        if run == 0:
            yield from self.recorded
        while True:
            yield from draws.choice(self.recorded, _AT_ONCE).tolist()


def failures_from_csv(path: Path) -> RecordedFailures:
    """Read when a job failed, from the column `time` or `seconds` of a CSV file.

    `time` is ISO 8601 or Unix seconds, a line for each failure; `seconds` are the gaps between failures.

    Raises:
        ConfigError: the file cannot be read, or has neither column, or a value means nothing.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeError, csv.Error) as error:
        raise ConfigError(f"{path}: cannot read failures: {error}") from error
    columns = set(rows[0]) if rows else set[str]()
    if not columns & {"time", "seconds"}:
        raise ConfigError(
            f"{path}: a record of failures needs a column `time` or `seconds` and lines below it"
        )
    if "seconds" in columns:
        gaps = [_number(path, line, row["seconds"]) for line, row in enumerate(rows, 2)]
    else:
        times = sorted(_moment(path, line, row) for line, row in enumerate(rows, 2))
        gaps = [after - before for before, after in pairwise(times)]
    try:
        return RecordedFailures(tuple(gaps))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _moment(path: Path, line: int, row: Mapping[str, str]) -> float:
    try:
        found = datetime.fromisoformat(row["time"])
    except (ValueError, TypeError):
        return _number(path, line, row["time"])
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _number(path: Path, line: int, text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        raise ConfigError(f"{path}, line {line}: {text!r} is no time") from None
