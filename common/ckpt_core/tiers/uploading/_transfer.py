"""The files of one rank on their way to a further tier, on a thread of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from ckpt_core.crew import give_way
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    RootBusyError,
    failure_text,
)
from ckpt_core.messages import message
from ckpt_core.storage import Throttle
from ckpt_core.tiers import CheckpointCopy, CopyProcess, CopyTerms
from ckpt_core.types import FileEntry

LASTING: Final = (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    RootBusyError,
)
"""Errors that another try would meet again."""


class _StoppedError(CheckpointError):
    """The upload was stopped; a later one continues it."""


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """How far the upload of one rank is.

    Attributes:
        done_bytes: of its files, those found at the target included.
        size_bytes: of its files.
        ended: whether all of them are there.
        left: whether this rank has stopped.
        failure: in words; "" if there is none.
        lasting: whether another try would fail alike.
    """

    done_bytes: int
    size_bytes: int
    ended: bool = False
    left: bool = False
    failure: str = ""
    lasting: bool = False


@final
class Transfer:
    """One rank's share of an upload.

    Concurrency: `stop` on any thread, the rest on one.

    Args:
        copy: what to upload from; called on the thread, as it reads the manifest.
        share: returns the entries of this rank.
        bytes_per_second: the cap of this rank; None for none.
        patience_seconds: time without progress after which it has failed.
        process: copies in place of the thread; None if it cannot.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        copy: Callable[[], CheckpointCopy],
        share: Callable[[CheckpointCopy], Sequence[FileEntry]],
        *,
        bytes_per_second: int | None,
        patience_seconds: float,
        process: CopyProcess | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._copy = copy
        self._process = process
        self._bytes_per_second = bytes_per_second
        self._share = share
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._guard = threading.Lock()
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._wake = threading.Event()
        self._pace = (
            None if bytes_per_second is None else Throttle(bytes_per_second, clock=clock, sleep=self._sleep)
        )
        self._done = self._size = 0
        self._moved_at = clock()
        self._error: BaseException | None = None
        # A daemon: the process must be able to end while storage hangs.
        self._thread = threading.Thread(target=self._run, name="ckpt-upload-copy", daemon=True)

    def start(self) -> None:
        """Begin to copy."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the interpreter is ending
            self._error = error
            self._ended.set()

    def stop(self) -> None:
        """Let the copy end at its next read; a later one continues it."""
        self._stopped.set()
        self._wake.set()

    def progress(self, seconds: float) -> RankProgress:
        """Wait until the share is there, or `seconds` have passed; return how far it is."""
        self._wake.wait(seconds)
        with self._guard:
            done, size, error = self._done, self._size, self._error
        if self._ended.is_set():
            if error is None:
                return RankProgress(done_bytes=size, size_bytes=size, ended=True)
            if isinstance(error, _StoppedError):
                return RankProgress(done_bytes=done, size_bytes=size, left=True)
            return RankProgress(
                done_bytes=done,
                size_bytes=size,
                failure=failure_text(error),
                lasting=isinstance(error, LASTING),
            )
        if self._stopped.is_set():
            return RankProgress(done_bytes=done, size_bytes=size, left=True)
        still = self._clock() - self._moved_at
        hangs = f"no progress for {still:.3g} s" if still > self._patience_seconds else ""
        return RankProgress(done_bytes=done, size_bytes=size, failure=hangs)

    def end(self, seconds: float) -> bool:
        """Stop, and return whether the thread has ended within `seconds`."""
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if self._thread.is_alive() and self._process is not None:
            self._process.close()  # it may hang before it has read its task
        return not self._thread.is_alive()

    def _run(self) -> None:
        give_way()
        try:
            copy = self._copy()
            entries = self._share(copy)
            with self._guard:
                self._size = sum(entry.size_bytes for entry in entries)
            terms = CopyTerms(pace=self._pace, progress=self._note, stop=self._raise_if_stopped)
            if not self._sent(copy, entries, terms):
                copy.copy_files(entries, terms)
        except BaseException as error:  # noqa: BLE001 - `progress` reports it to every rank
            self._error = error
        finally:
            self._ended.set()
            self._wake.set()

    def _sent(self, copy: CheckpointCopy, entries: Sequence[FileEntry], terms: CopyTerms) -> bool:
        """Return whether a process of its own has copied them."""
        process, rate = self._process, self._bytes_per_second
        return process is not None and process.copy_files(copy, entries, terms, bytes_per_second=rate)

    def _sleep(self, seconds: float) -> None:
        self._stopped.wait(seconds)

    def _note(self, size_bytes: int) -> None:
        with self._guard:
            self._done += size_bytes
            self._moved_at = self._clock()

    def _raise_if_stopped(self) -> None:
        if self._stopped.is_set():
            raise _StoppedError("the upload was stopped")
