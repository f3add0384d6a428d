"""A clock that moves when told to."""

from __future__ import annotations

import threading
from typing import final


@final
class FakeClock:
    """Stands in for `time.time` or `time.monotonic`."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self._now = now
        self._guard = threading.Lock()

    def __call__(self) -> float:
        """Return the present, in seconds."""
        with self._guard:
            return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass.

        Raises:
            ValueError: time does not run backwards.
        """
        if seconds < 0:
            raise ValueError(f"time does not run backwards ({seconds} s)")
        with self._guard:
            self._now += seconds
