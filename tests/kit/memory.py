"""Storage in a dictionary."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, final

from ckpt_core.storage import Lock, Space, Storage, StorageEntry
from ckpt_core.storage._base import file_key, key_parts


@final
class MemoryStorage(Storage):
    """A storage that behaves like a POSIX directory and is shared by all threads.

    Args:
        name: shown in `url`.
        capacity_bytes: the most bytes that all files may hold, None for no limit; may be changed at any time.
        capacity_files: the most files and directories, likewise.
    """

    supports_rename = True
    rereads_from_memory = True

    def __init__(
        self, name: str = "", *, capacity_bytes: int | None = None, capacity_files: int | None = None
    ) -> None:
        self._name = name
        self.capacity_bytes = capacity_bytes
        self.capacity_files = capacity_files
        self._guard = threading.RLock()
        self._files: dict[str, bytes] = {}
        self._directories: set[str] = set()
        self._locked: set[str] = set()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    def check_root(self) -> None:
        """Do nothing: a dictionary is always usable."""

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        """Open a new file for streaming writes; left partial on an error, as on a disk."""
        with self._guard:
            self._require_free(key)
            self._put(key, b"")
        with io.BytesIO() as stream:
            try:
                yield stream
            finally:
                with self._guard:
                    self._put(key, stream.getvalue())

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        with io.BytesIO(self._content(key)) as stream:
            yield stream

    def replace(self, key: str, content: bytes) -> None:
        with self._guard:
            self._put(file_key(key), bytes(content))

    def list(self, key: str) -> list[StorageEntry]:
        start = f"{key}/" if key_parts(key) else ""
        with self._guard:
            if key in self._files:
                raise _error(NotADirectoryError, errno.ENOTDIR, key)
            sizes: dict[str, int | None] = dict.fromkeys(self._directories)
            sizes |= {name: len(content) for name, content in self._files.items()}
        return [
            StorageEntry(name[len(start) :], is_directory=size is None, size_bytes=size or 0)
            for name, size in sorted(sizes.items())
            if name.startswith(start) and "/" not in name[len(start) :]
        ]

    def size(self, key: str) -> int:
        return len(self._content(key))

    def delete(self, key: str) -> None:
        file_key(key)
        with self._guard:
            self._files = {name: c for name, c in self._files.items() if not _is_in(name, key)}
            self._directories = {name for name in self._directories if not _is_in(name, key)}

    def make_directory(self, key: str) -> None:
        with self._guard:
            self._require_free(key)
            self._require_room(key, 0)
            self._add_parents(key)
            self._directories.add(key)

    def sync_directory(self, key: str) -> None:
        """Check that the directory exists: memory does not survive the process."""
        with self._guard:
            if key_parts(key) and key not in self._directories:
                raise _error(FileNotFoundError, errno.ENOENT, key)

    def rename(self, source: str, target: str) -> None:
        with self._guard:
            self._require_free(target)
            if file_key(source) not in {*self._files, *self._directories}:
                raise _error(FileNotFoundError, errno.ENOENT, source)
            if not self._directories.issuperset(_parents(target)):
                raise _error(FileNotFoundError, errno.ENOENT, target)
            self._files = {_moved(name, source, target): c for name, c in self._files.items()}
            self._directories = {_moved(name, source, target) for name in self._directories}

    def exchange(self, first: str, second: str) -> None:
        aside = f"{first}.exchange"
        with self._guard:
            self.rename(second, aside)
            self.rename(first, second)
            self.rename(aside, first)

    def space(self) -> Space:
        with self._guard:
            used_bytes = sum(map(len, self._files.values()))
            used_files = len(self._files) + len(self._directories)
        return Space(
            None if self.capacity_bytes is None else max(0, self.capacity_bytes - used_bytes),
            self.capacity_bytes,
            None if self.capacity_files is None else max(0, self.capacity_files - used_files),
        )

    def try_lock(self, key: str) -> Lock | None:
        with self._guard:
            if file_key(key) in self._locked:
                return None
            self._locked.add(key)
        return _MemoryLock(key, self._locked, self._guard)

    def _content(self, key: str) -> bytes:
        with self._guard:
            if file_key(key) not in self._files:
                raise _error(FileNotFoundError, errno.ENOENT, key)
            return self._files[key]

    def _put(self, key: str, content: bytes) -> None:
        self._require_room(key, len(content) - len(self._files.get(key, b"")))
        if key in self._directories:
            raise _error(IsADirectoryError, errno.EISDIR, key)
        self._add_parents(key)
        self._files[key] = content

    def _add_parents(self, key: str) -> None:
        for parent in _parents(key):
            if parent in self._files:
                raise _error(NotADirectoryError, errno.ENOTDIR, parent)
        self._directories.update(_parents(key))

    def _require_free(self, key: str) -> None:
        if file_key(key) in self._files or key in self._directories:
            raise _error(FileExistsError, errno.EEXIST, key)

    def _require_room(self, key: str, more_bytes: int) -> None:
        free_bytes, _, free_files = self.space()
        no_bytes = free_bytes is not None and more_bytes > free_bytes
        no_file = free_files == 0 and key not in self._files
        if no_bytes or no_file:
            raise _error(OSError, errno.ENOSPC, key)


@final
class _MemoryLock:
    def __init__(self, key: str, locked: set[str], guard: threading.RLock) -> None:
        self._key = key
        self._locked = locked
        self._guard = guard
        self._held = True

    def release(self) -> None:
        with self._guard:
            if self._held:
                self._locked.discard(self._key)
            self._held = False


def _is_in(name: str, key: str) -> bool:
    return name == key or name.startswith(key + "/")


def _parents(key: str) -> list[str]:
    parts = key_parts(key)
    return ["/".join(parts[:count]) for count in range(1, len(parts))]


def _moved(name: str, source: str, target: str) -> str:
    return target + name[len(source) :] if _is_in(name, source) else name


def _error(kind: type[OSError], number: int, key: str) -> OSError:
    return kind(number, os.strerror(number), key)
