"""Progress of a long command: how much is done, how fast, and the time left."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from types import TracebackType
from typing import Final, Self, final

from ckpt_core.options import bytes_text

_EVERY_SECONDS: Final = 0.2
_PLAIN_EVERY_SECONDS: Final = 10.0
_CLEAR: Final = "\r\x1b[K"


@final
class ProgressLine:
    """One line on standard error, updated in place and replaced by a summary.

    Concurrency: `add` on any thread.
    """

    def __init__(
        self,
        what: str,
        total_bytes: int,
        *,
        plain: bool = False,
        seconds: float | None = None,
        unit: str = "",
    ) -> None:
        self._seconds = math.inf if seconds is None else seconds
        self._what = what
        self._total_bytes = total_bytes
        self._unit = unit
        self._terminal = bool(sys.stderr and sys.stderr.isatty())
        self._shown = self._terminal or plain
        self._every = _EVERY_SECONDS if self._terminal else _PLAIN_EVERY_SECONDS
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._began = self._written = time.monotonic()

    def add(self, size_bytes: int) -> None:
        """Add to the number of bytes done."""
        with self._lock:
            self._done_bytes += size_bytes
            now = time.monotonic()
            if self._shown and now - self._written >= self._every:
                self._written = now
                self._write(self._amount(of=self._total_bytes), left=True)

    def expect(self, size_bytes: int) -> None:
        """Set how much there is to do, once it is known."""
        with self._lock:
            self._total_bytes = size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._terminal:
            return
        if kind is None:
            self._write(self._amount(of=0))
            say("\n")
        else:
            say(_CLEAR)

    def _amount(self, *, of: int) -> str:
        amounts = [self._done_bytes, of] if of else [self._done_bytes]
        if self._unit:
            return f"{' of '.join(f'{each:,}' for each in amounts)} {self._unit}"
        return " of ".join(map(bytes_text, amounts))

    def _write(self, done: str, *, left: bool = False) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = self._done_bytes / seconds
        text = f"{self._what}: {done}" if self._unit else f"{self._what}: {done}, {rate / 1e9:.2f} GB/s"
        if left and rate and self._total_bytes > self._done_bytes:
            ends = min((self._total_bytes - self._done_bytes) / rate, self._seconds - seconds)
            text += f", {_duration(max(ends, 0.0))} left"
        say(f"{_CLEAR}{text}" if self._terminal else f"ckpt: {text}\n")


def say(text: str) -> None:
    """Write to standard error, if it can be: no work ends because nobody reads it."""
    if not sys.stderr:  # closed by the caller (`2>&-`)
        return
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        # What Python still holds of it must not become an error when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def _duration(seconds: float) -> str:
    """Format a time for people: `1:05` for minutes, `2:01:05` for hours."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
