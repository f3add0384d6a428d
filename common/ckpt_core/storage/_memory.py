"""Storage in a dictionary, for tests and notebooks."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, final

from ckpt_core.storage._base import Lock, RangeReader, Storage, StorageEntry
from ckpt_core.storage._keys import BytesRanges, file_key, key_parts, parent_keys


@final
class MemoryStorage(Storage):
    """A storage that behaves like a POSIX directory and is shared by all threads.

    Args:
        name: shown in `url`.
        capacity_bytes: the most bytes that all files may hold; None for no limit.
        capacity_files: the most files and directories; None for no limit.

    Attributes:
        capacity_bytes: may be changed at any time.
        capacity_files: may be changed at any time.
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
        self._tree = _Tree()
        self._locked: set[str] = set()

    @property
    def url(self) -> str:
        """`memory://<name>`."""
        return f"memory://{self._name}"

    def check_root(self) -> None:
        """Do nothing: a dictionary is always usable."""

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        """Open a new file for streaming writes; left partial on an error, as on a disk."""
        with self._guard:
            self._tree.require_unoccupied(file_key(key))
            self._put(key, b"")
        with io.BytesIO() as stream:
            try:
                yield stream
            finally:
                with self._guard:
                    self._put(key, stream.getvalue())

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        """Open a file for reading."""
        with self._guard:
            content = self._tree.get(file_key(key))
        with io.BytesIO(content) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open a file for ranged reads."""
        with self._guard:
            content = self._tree.get(file_key(key))
        yield BytesRanges(content, f"{self.url}/{key}")

    def replace(self, key: str, content: bytes) -> None:
        """Write a small file atomically, over an existing one."""
        with self._guard:
            self._put(file_key(key), bytes(content))

    def list(self, key: str) -> list[StorageEntry]:
        """List a directory, sorted by name; [] if it does not exist."""
        depth = len(key_parts(key)) + 1
        with self._guard:
            below = self._tree.below(key)
        return [
            StorageEntry(name=parts[-1], is_directory=size is None, size_bytes=size or 0)
            for parts, size in sorted((key_parts(name), size) for name, size in below.items())
            if len(parts) == depth
        ]

    def size(self, key: str) -> int:
        """Return the size of a file in bytes."""
        with self._guard:
            return len(self._tree.get(file_key(key)))

    def delete(self, key: str) -> None:
        """Delete a file, or a directory with its content."""
        with self._guard:
            self._tree.remove(file_key(key))

    def make_directory(self, key: str) -> None:
        """Create a directory and its parents."""
        with self._guard:
            self._tree.require_unoccupied(file_key(key))
            self._require_room(key, 0)
            self._tree.add_directory(key)

    def sync_directory(self, key: str) -> None:
        """Check that the directory exists: memory does not survive the process."""
        with self._guard:
            if key_parts(key) and key not in self._tree.directories:
                raise _error(FileNotFoundError, errno.ENOENT, key)

    def rename(self, source: str, target: str) -> None:
        """Rename atomically, onto a free name only."""
        with self._guard:
            self._tree.require_unoccupied(file_key(target))
            self._tree.move(file_key(source), target)

    def exchange(self, first: str, second: str) -> None:
        """Exchange two directories."""
        with self._guard:
            self._tree.exchange(file_key(first), file_key(second))

    def free_bytes(self) -> int | None:
        """Return the unused part of `capacity_bytes`; None without a limit."""
        with self._guard:
            used = sum(map(len, self._tree.files.values()))
            return None if self.capacity_bytes is None else max(0, self.capacity_bytes - used)

    def total_bytes(self) -> int | None:
        """Return `capacity_bytes`."""
        return self.capacity_bytes

    def free_files(self) -> int | None:
        """Return the unused part of `capacity_files`; None without a limit."""
        with self._guard:
            used = len(self._tree.files) + len(self._tree.directories)
            return None if self.capacity_files is None else max(0, self.capacity_files - used)

    def try_lock(self, key: str) -> Lock | None:
        """Lock `key` among the users of this object."""
        with self._guard:
            if file_key(key) in self._locked:
                return None
            self._locked.add(key)
        return _MemoryLock(key, self._locked, self._guard)

    def _put(self, key: str, content: bytes) -> None:
        before = len(self._tree.files.get(key, b""))
        self._require_room(key, len(content) - before)
        self._tree.put(key, content)

    def _require_room(self, key: str, more_bytes: int) -> None:
        free_bytes, free_files = self.free_bytes(), self.free_files()
        no_bytes = free_bytes is not None and more_bytes > free_bytes
        no_file = free_files == 0 and key not in self._tree.files
        if no_bytes or no_file:
            raise _error(OSError, errno.ENOSPC, key)


@final
class _Tree:
    """Files and directories by key; not locked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.directories: set[str] = set()

    def get(self, key: str) -> bytes:
        if key not in self.files:
            raise _error(FileNotFoundError, errno.ENOENT, key)
        return self.files[key]

    def put(self, key: str, content: bytes) -> None:
        if key in self.directories:
            raise _error(IsADirectoryError, errno.EISDIR, key)
        self._add_parents(key)
        self.files[key] = content

    def add_directory(self, key: str) -> None:
        self._add_parents(key)
        self.directories.add(key)

    def below(self, key: str) -> dict[str, int | None]:
        """Return everything below a directory: size of files, None for directories."""
        if key in self.files:
            raise _error(NotADirectoryError, errno.ENOTDIR, key)
        directories = {name: None for name in self.directories if _is_below(name, key)}
        return directories | {name: len(c) for name, c in self.files.items() if _is_below(name, key)}

    def remove(self, key: str) -> None:
        self.files = {n: c for n, c in self.files.items() if n != key and not _is_below(n, key)}
        self.directories = {n for n in self.directories if n != key and not _is_below(n, key)}

    def move(self, source: str, target: str) -> None:
        if source not in self.files and source not in self.directories:
            raise _error(FileNotFoundError, errno.ENOENT, source)
        if any(parent not in self.directories for parent in parent_keys(target)):
            raise _error(FileNotFoundError, errno.ENOENT, target)
        self.files = {_moved(n, source, target): c for n, c in self.files.items()}
        self.directories = {_moved(n, source, target) for n in self.directories}

    def exchange(self, first: str, second: str) -> None:
        aside = f"{first}.exchange"
        self.move(second, aside)
        self.move(first, second)
        self.move(aside, first)

    def require_unoccupied(self, key: str) -> None:
        if key in self.files or key in self.directories:
            raise _error(FileExistsError, errno.EEXIST, key)

    def _add_parents(self, key: str) -> None:
        for parent in parent_keys(key):
            if parent in self.files:
                raise _error(NotADirectoryError, errno.ENOTDIR, parent)
        self.directories.update(parent_keys(key))


@final
class _MemoryLock:
    def __init__(self, key: str, locked: set[str], guard: threading.RLock) -> None:
        self._key = key
        self._locked = locked
        self._guard = guard
        self._held = True

    def release(self) -> None:
        """Release the lock; harmless when repeated."""
        with self._guard:
            if self._held:
                self._locked.discard(self._key)
            self._held = False


def _is_below(name: str, directory: str) -> bool:
    return directory == "" or name.startswith(directory + "/")


def _moved(name: str, source: str, target: str) -> str:
    return target + name[len(source) :] if name == source or _is_below(name, source) else name


def _error(kind: type[OSError], number: int, key: str) -> OSError:
    return kind(number, os.strerror(number), key)
