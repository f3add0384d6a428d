"""A limit on the rate of bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from typing import final


@final
class Throttle:
    """Rate limiter for the pieces of files; any thread, all files share the cap.

    A token bucket of the size of one piece: after a pause of any length, one piece passes without waiting.
    `clock` gives monotonic seconds.
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
        self._guard = threading.Lock()

    def __call__(self, pieces: Iterable[memoryview]) -> Generator[memoryview]:
        """Yield each of `pieces` as soon as the average rate permits it."""
        for piece in pieces:
            # Asleep, too: a file that waits its turn is as slow as the cap demands.
            with self._guard:
                pause = self._free_at - self._clock()
                if pause > 0:
                    self._sleep(pause)
                self._free_at = max(self._free_at, self._clock()) + len(piece) / self._bytes_per_second
            yield piece
