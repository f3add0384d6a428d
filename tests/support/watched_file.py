"""Files as `open` gives them, whose every read and write of the kernel is an operation."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, cast, final

from typing_extensions import override

T = TypeVar("T")


class Watcher(Protocol):
    """What logs the operations."""

    def watches(self, path: Any, /) -> str | None:
        """The key of what is to be logged; None for everything else."""
        ...

    def operation(self, method: str, key: str, paths: Any = ()) -> AbstractContextManager[int | None]:
        """Log an operation and apply its faults around the block."""
        ...

    def write_some(self, descriptor: int, content: Any, write: Callable[[Any], int]) -> int:
        """Write the content, or as much of it as a fault allows."""
        ...


# The signature of `io.open`.
def open_watched(
    watcher: Watcher,
    key: str,
    file: Any,
    mode: str,
    buffering: int = -1,
    encoding: str | None = None,
    errors: str | None = None,
    newline: str | None = None,
    closefd: bool = True,
    opener: Callable[[str, int], int] | None = None,
) -> Any:
    """As `io.open`: the same buffers, over a raw file that is watched."""
    raw_mode = "".join(letter for letter in mode if letter in "rwxa+")
    if opener is None:
        with watcher.operation("open" if raw_mode[:1] == "r" else "create", key, [file]):
            raw = WatchedFile(watcher, file, raw_mode, closefd=closefd)
    else:
        # By `os.open`, which is an operation itself.
        raw = WatchedFile(watcher, file, raw_mode, closefd=closefd, opener=opener)
    try:
        return _dressed(raw, mode, buffering, (encoding, errors, newline))
    except BaseException:
        raw.close()
        raise


@final
class WatchedFile(io.FileIO):
    """A raw file. Python's buffers call these methods for what they need of the kernel."""

    def __init__(
        self,
        watcher: Watcher,
        file: Any,
        mode: str,
        *,
        closefd: bool = True,
        opener: Callable[[str, int], int] | None = None,
    ) -> None:
        super().__init__(file, mode, closefd, opener)
        self._watcher = watcher

    @override
    def write(self, content: Any, /) -> int:
        return self._watcher.write_some(self.fileno(), content, super().write)

    @override
    def readinto(self, buffer: Any, /) -> int:
        return self._watched("read", lambda: super(WatchedFile, self).readinto(buffer))

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        return self._watched("read", lambda: super(WatchedFile, self).read(-1 if size is None else size))

    @override
    def readall(self) -> bytes:
        return self._watched("read", super().readall)

    @override
    def truncate(self, size: int | None = None, /) -> int:
        return self._watched("truncate", lambda: super(WatchedFile, self).truncate(size))

    def _watched(self, method: str, act: Callable[[], T]) -> T:
        key = self._watcher.watches(self.fileno())
        if key is None:
            return act()
        with self._watcher.operation(method, key):
            return act()


def _dressed(
    raw: WatchedFile, mode: str, buffering: int, text: tuple[str | None, str | None, str | None]
) -> Any:
    """The raw file with what `io.open` would put around it."""
    if buffering == 0:
        return raw
    buffered = _buffered(raw, buffering)
    if "b" in mode:
        return buffered
    file = io.TextIOWrapper(buffered, *text, line_buffering=buffering == 1)
    cast("Any", file).mode = mode
    return file


def _buffered(raw: WatchedFile, buffering: int) -> Any:
    block = os.fstat(raw.fileno()).st_blksize
    size = buffering if buffering > 1 else max(block, 512)
    if raw.readable() and raw.writable():
        return io.BufferedRandom(raw, size)
    return io.BufferedWriter(raw, size) if raw.writable() else io.BufferedReader(raw, size)
