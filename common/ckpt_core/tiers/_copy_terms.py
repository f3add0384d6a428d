"""The terms of a copy: its rate, who hears of its progress, what ends it early."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, final

Pace: TypeAlias = Callable[[Iterable[memoryview]], Iterable[memoryview]]
"""Hands on pieces of files no faster than a rate, as `Throttle` does."""


def _ignore(_: int) -> None:
    """Ignore progress."""


def _go_on() -> None:
    """Let the copy continue."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTerms:
    """How a copy is made; all of it may be called on several threads.

    Attributes:
        pace: limits the rate of what is sent; None for no limit.
        progress: called with bytes done, those that were there already included.
        stop: called before every read; raises to end the copy, which a later one continues.
    """

    pace: Pace | None = None
    progress: Callable[[int], None] = _ignore
    stop: Callable[[], None] = _go_on
