"""A cap on the bandwidth that checkpoints take from whatever else needs the disk or the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import final


@final
class Throttle:
    """Holds pieces back so that on average no more than so many bytes per second go by.

    A bucket that is as large as one piece: after a pause of any length only one goes by at once.

    Concurrency: one file at a time, on one thread; several files in turn share the cap.

    Args:
        bytes_per_second: the cap, greater than 0.
        clock: seconds that never go back.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()

    def __call__(self, pieces: Iterable[memoryview]) -> Generator[memoryview]:
        """Give `pieces` on, each when what went by before it is paid for."""
        for piece in pieces:
            pause = self._free_at - self._clock()
            if pause > 0:
                self._sleep(pause)
            self._free_at = max(self._free_at, self._clock()) + len(piece) / self._bytes_per_second
            yield piece
