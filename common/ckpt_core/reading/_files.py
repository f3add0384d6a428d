"""The data files of a checkpoint, each opened when it is first read."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final, final

from ckpt_core.reading._kept import Budget, KeptFile
from ckpt_core.storage import RangeReader, Storage

_MAX_OPEN: Final = 128
"""With more files than this, each is closed when a pass is done with it: descriptors are few."""


@final
class Files:
    """All files of one checkpoint, and how many bytes were asked of them.

    Concurrency: `at`, `kept` and `done` may be called from several threads at once during a pass.
    """

    def __init__(self, storage: Storage, directory: str, keep_bytes: int) -> None:
        self._storage = storage
        self._directory = directory
        self._budget = None if storage.rereads_from_memory else Budget(keep_bytes)
        self._sources: dict[str, _SourceFile] = {}
        self._kept: dict[str, KeptFile] = {}
        self._left: dict[str, int] = {}
        self._guard = threading.Lock()

    @property
    def bytes_read(self) -> int:
        """Bytes asked of storage so far."""
        return sum(source.bytes_read for source in self._sources.values())

    @property
    def reopens(self) -> bool:
        """Whether what one pass has opened may be another file when the next opens it again."""
        return len(self._sources) > _MAX_OPEN

    def begin(self, requests: Mapping[str, int]) -> None:
        """Expect as many requests of each path in the pass that begins."""
        self._left = dict(requests)
        for path in requests:
            if path not in self._sources:
                key = f"{self._directory}/{path}" if self._directory else path
                self._sources[path] = _SourceFile(self._storage, key)
                if self._budget is not None:
                    self._kept[path] = KeptFile(self._sources[path], self._budget)

    def at(self, path: str) -> RangeReader:
        """The file, of a path that was announced by `begin`."""
        return self._kept.get(path) or self._sources[path]

    def kept(self, path: str) -> KeptFile | None:
        """The same, where bytes are kept from pass to pass."""
        return self._kept.get(path)

    def done(self, path: str) -> None:
        """One of the requests has been served."""
        with self._guard:
            self._left[path] -= 1
            last = self._left[path] == 0
        if last and self.reopens:
            self._sources[path].close()

    def close(self) -> None:
        """Close all files and forget what was kept."""
        self._kept.clear()
        for source in self._sources.values():
            source.close()


@final
class _SourceFile:
    """A file of a storage; opened again if it is read after `close`."""

    def __init__(self, storage: Storage, key: str) -> None:
        self._storage = storage
        self._key = key
        self._guard = threading.Lock()
        self._closing = ExitStack()
        self._reader: RangeReader | None = None
        self.bytes_read = 0

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._open().size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer with what follows `offset`."""
        try:
            reader = self._open(asked_bytes=len(buffer))
            reader.read_into(offset, buffer)
        except OSError as error:
            error.filename = error.filename or f"{self._storage.url}/{self._key}"
            raise

    def close(self) -> None:
        """Close the file, which nobody is reading."""
        with self._guard:
            self._reader = None
            self._closing.close()

    def _open(self, asked_bytes: int = 0) -> RangeReader:
        with self._guard:
            self.bytes_read += asked_bytes
            if self._reader is None:
                self._reader = self._closing.enter_context(self._storage.open_ranges(self._key))
            return self._reader
