"""Progress of a long command: how much is done, how fast, and the time left."""

from __future__ import annotations

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

    Where that is no terminal, a line now and then if `plain`, else nothing. A total of 0 is not known yet.
    Concurrency: `add` on any thread.
    """

    def __init__(self, what: str, total_bytes: int, *, plain: bool = False) -> None:
        self._what = what
        self._total_bytes = total_bytes
        self._terminal = bool(sys.stderr and sys.stderr.isatty())
        self._shown = self._terminal or plain
        self._every = _EVERY_SECONDS if self._terminal else _PLAIN_EVERY_SECONDS
        self._lock = threading.Lock()
        self._done_bytes = 0
        self._began = self._written = time.monotonic()

    def add(self, size_bytes: int) -> None:
        with self._lock:
            self._done_bytes += size_bytes
            now = time.monotonic()
            if self._shown and now - self._written >= self._every:
                self._written = now
                self._write(self._total_bytes)

    def expect(self, size_bytes: int) -> None:
        with self._lock:
            self._total_bytes = size_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._terminal and kind is None:
            self._write(0)
            say("\n")
        elif self._terminal:
            say(_CLEAR)

    def _write(self, total: int) -> None:
        done = self._done_bytes
        rate = done / max(time.monotonic() - self._began, 1e-9)
        of = f" of {bytes_text(total)}" if total else ""
        text = f"{self._what}: {bytes_text(done)}{of}, {rate / 1e9:.2f} GB/s"
        if rate and total > done:
            minutes, seconds = divmod(round((total - done) / rate), 60)
            hours, minutes = divmod(minutes, 60)
            text += f", {hours}:{minutes:02}" if hours else f", {minutes}"
            text += f":{seconds:02} left"
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
