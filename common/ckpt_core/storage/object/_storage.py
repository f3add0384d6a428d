"""Storage in an object store: S3, GCS, Azure, or any other of fsspec."""

from __future__ import annotations

import errno
import io
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, NamedTuple, final

from ckpt_core.crew import run_all
from ckpt_core.disclosure import Redaction, logger_of, public_url
from ckpt_core.storage._base import (
    Lock,
    RangeReader,
    RangeStream,
    Storage,
    StorageEntry,
    ends_early,
    file_key,
    is_plain,
    key_parts,
)
from ckpt_core.storage.local._locks import UnguardedLock

_PROBE: Final = ".probe"
_BUFFER_BYTES: Final = 4 * 2**20
_START_BYTES: Final = 2**20

_logger = logger_of(__name__)
_warned_odd: set[str] = set()


class RequestTerms(NamedTuple):
    """How requests are made; see the arguments of `object_storage`."""

    request_seconds: float
    conditional_writes: bool
    block_bytes: int | None


class ObjectStorage(Storage):
    """A prefix in an object store; `object_storage` makes one.

    Objects appear whole or not at all, but there are no directories and no renames, so a commit is the
    creation of the marker object, after all others. On S3, GCS and Azure objects are created only if there is
    none, so that a late upload cannot overwrite an object of another job.

    A client of a service says how requests are made; their `path` is its own name of an object. Its errors
    are OS errors without secrets, see `translated_errors`.

    Attributes:
        delete_threads: how many objects are deleted at a time.
    """

    supports_rename = False
    delete_threads = 16

    def __init__(self, url: str, storage_options: Mapping[str, Any]) -> None:
        """Note where the root is, without using the network."""
        self._url = public_url(url).rstrip("/")
        self.redaction = Redaction.of(url, storage_options)
        bucket, _, base = url.partition("://")[2].partition("/")
        self.bucket, self.base = bucket.partition("@")[0], base.strip("/")

    @property
    def url(self) -> str:
        return self._url

    def shown(self, text: object) -> str:
        """Remove secrets from a path or an error, for messages."""
        return self.redaction.text(str(text))

    def path(self, key: str) -> str:
        """Return the client's name of the object."""
        return "/".join(filter(None, [self.base, *key_parts(key)]))

    @abstractmethod
    def size_of(self, path: str) -> int:
        """Return the size of an object in bytes; FileNotFoundError if there is none."""

    @abstractmethod
    def children(self, path: str) -> Sequence[StorageEntry]:
        """List the names below a prefix, up to the next slash; [] if there are none.

        A name may be one that no path can have.
        """

    @abstractmethod
    def below(self, path: str) -> Sequence[str]:
        """List the paths of an object of this name and of all that are below it."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete an object by its name; no-op if there is none."""

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Read a range that is in the object; return how many bytes of it the object has."""

    def read_spread(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Read a range into several buffers; the default makes one request for each."""
        done = 0
        for buffer in buffers:
            count = self.read_into(path, offset + done, buffer)
            done += count
            if count < len(buffer):
                break
        return done

    def read_start(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return size and first bytes of an object, if possible by one request."""
        size = self.size_of(path)
        start = bytearray(min(size, most_bytes))
        count = self.read_into(path, 0, memoryview(start)) if start else 0
        return size, bytes(start[:count])

    def check_root(self) -> None:
        """Create and delete a tiny object.

        Raises:
            FileNotFoundError: the bucket does not exist.
            PermissionError: no credentials, or they do not allow writing.
        """
        try:
            # Always under the same name, so that the next job deletes the leftover of a killed one.
            self.replace(_PROBE, b"probe")
        except FileNotFoundError as error:
            message = f"bucket {self.shown(self.bucket)!r} does not exist; create it, or correct the URL"
            raise FileNotFoundError(errno.ENOENT, message, self._url) from error
        self.remove(self.path(_PROBE))

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        """Open a buffered stream over an object; a small one has been read by then.

        Small reads are served from blocks, large ones are one ranged request. fsspec's own files are not used
        because some share their position between readers, and others read tens of megabytes ahead.
        """
        path = self.path(file_key(key))
        size, start = self.read_start(path, _START_BYTES)

        def read_into(offset: int, buffer: memoryview) -> int:
            known = start[offset : offset + len(buffer)]
            buffer[: len(known)] = known
            rest = buffer[len(known) :]
            return len(known) + (self.read_into(path, offset + len(known), rest) if rest else 0)

        ranges = RangeStream(size, read_into, self.shown(path))
        with io.BufferedReader(ranges, min(_BUFFER_BYTES, max(size, 1))) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open an object for ranged reads, one request each; its first byte is read."""
        path = self.path(file_key(key))
        size, start = self.read_start(path, 1)
        yield ObjectRanges(self, path, size, start)

    def list(self, key: str) -> list[StorageEntry]:
        entries = self.children(self.path(key))
        odd = [entry.name for entry in entries if not is_plain(entry.name)]
        if odd:
            _warn_odd(self._url, key, odd)
            entries = [entry for entry in entries if entry.name not in odd]
        return sorted(entries, key=lambda entry: entry.name)

    def size(self, key: str) -> int:
        return self.size_of(self.path(file_key(key)))

    def delete(self, key: str) -> None:
        """Delete an object, or all objects under a prefix.

        One by one: fsspec's bulk deletions expand wildcards in keys.
        """
        path = self.path(file_key(key))
        # A key that is no valid path is not ours; see `list`.
        found = self.below(path)
        doomed = [
            name for name in found if name == path or all(map(is_plain, name[len(path) + 1 :].split("/")))
        ]
        if doomed:
            run_all(self.remove, doomed, self.delete_threads, name="ckpt-delete")

    def make_directory(self, key: str) -> None:
        """Do nothing but check the key: prefixes need not be created."""
        file_key(key)

    def sync_directory(self, key: str) -> None:
        """Do nothing but check the key: a completed upload is durable."""
        key_parts(key)

    def try_lock(self, key: str) -> Lock | None:
        """Return a lock that excludes nothing: object stores do not know live processes."""
        file_key(key)
        return UnguardedLock()


def _warn_odd(url: str, key: str, names: Sequence[str]) -> None:
    place = f"{url}/{key}" if key else url
    if place not in _warned_odd:
        _warned_odd.add(place)
        _logger.warning(
            "%s holds objects whose keys continue with %s, which no path may have: they are ignored and not "
            "touched; delete them by their keys",
            place,
            " and ".join(repr(name) for name in names),
        )


@final
class ObjectRanges:
    """Ranges of an object, one request each, so that several threads run in parallel."""

    def __init__(self, storage: ObjectStorage, path: str, size_bytes: int, start: bytes = b"") -> None:
        self._storage = storage
        self._start = start
        self._path = path
        self.size_bytes = size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if buffer:
            end = self._checked_end(offset, len(buffer))
            if end <= len(self._start):
                buffer[:] = self._start[offset:end]
                return
            count = self._storage.read_into(self._path, offset, buffer)
            if offset + count != end:
                raise ends_early(self._storage.shown(self._path), end, offset + count)

    def read_spread(self, offset: int, buffers: Sequence[memoryview]) -> None:
        end = self._checked_end(offset, sum(map(len, buffers)))
        count = self._storage.read_spread(self._path, offset, buffers)
        if offset + count != end:
            raise ends_early(self._storage.shown(self._path), end, offset + count)

    def _checked_end(self, offset: int, size_bytes: int) -> int:
        """Return the end of a range; stores differ in their answers to one past the end."""
        end = offset + size_bytes
        if end > self.size_bytes:
            raise ends_early(self._storage.shown(self._path), end, self.size_bytes)
        return end
