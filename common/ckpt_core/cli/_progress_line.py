"""Progress of a long command, on a terminal only: bytes, and bytes per second."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Final, Self, final

from ckpt_core.options import bytes_text

_EVERY_SECONDS: Final = 0.2
_CLEAR: Final = "\r\x1b[K"


@final
class ProgressLine:
    """One line on standard error, updated in place and replaced by a summary.

    Concurrency: `add` on any thread.

    Args:
        what: what is being done.
        total_bytes: how much there is to do; 0 if that is not known.
    """

    def __init__(self, what: str, total_bytes: int) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._shown = sys.stderr.isatty()
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._began = self._written = time.monotonic()

    def add(self, size_bytes: int) -> None:
        """Add to the number of bytes done."""
        with self._lock:
            self._done_bytes += size_bytes
            now = time.monotonic()
            if self._shown and now - self._written >= _EVERY_SECONDS:
                self._written = now
                of = f" of {bytes_text(self._total_bytes)}" if self._total_bytes else ""
                self._write(f"{bytes_text(self._done_bytes)}{of}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._shown:
            return
        if kind is None:
            self._write(bytes_text(self._done_bytes))
            sys.stderr.write("\n")
        else:
            sys.stderr.write(_CLEAR)

    def _write(self, done: str) -> None:
        seconds = max(time.monotonic() - self._began, 1e-9)
        rate = self._done_bytes / seconds / 1e9
        sys.stderr.write(f"{_CLEAR}{self._what}: {done}, {rate:.2f} GB/s")
        sys.stderr.flush()
