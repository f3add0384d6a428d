"""Batches that are drawn and dropped to find a position, and how long that takes."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

from ckpt_core.coordination import place_in_job
from ckpt_core.disclosure import logger_of

_log = logger_of(__name__)
_SECONDS_BETWEEN_LINES: Final = 5.0
_END: Final = object()


def draw_and_drop(iterator: Iterator[Any], batches: int) -> None:
    """Draw and drop batches; show progress.

    The first rank shows a bar where standard error is a terminal and tqdm is installed, as every host
    installs it. Elsewhere lines are logged every few seconds.
    """
    for number in _shown(batches):
        if next(iterator, _END) is _END:
            _log.warning("the data set ended after %d batches, but %d were to be skipped", number, batches)
            return


def _shown(batches: int) -> Iterable[int]:
    if place_in_job()[0] == 0 and sys.stderr.isatty():
        try:
            tqdm: Any = importlib.import_module("tqdm")
        except ImportError:
            return _logged(batches)
        bar: Iterable[int] = tqdm.tqdm(range(batches), desc="skipping what was seen", unit="batch")
        return bar
    return _logged(batches)


def _logged(batches: int) -> Iterator[int]:
    begun = said = time.monotonic()
    for number in range(batches):
        yield number
        if (now := time.monotonic()) - said > _SECONDS_BETWEEN_LINES:
            said, rate = now, (number + 1) / (now - begun)
            left = (batches - number - 1) / rate
            _log.warning(
                "skipped %d of %d batches, %.1f in a second; about %.0f s to go",
                number + 1, batches, rate, left,
            )  # fmt: skip
