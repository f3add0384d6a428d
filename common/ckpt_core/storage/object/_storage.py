"""Storage in an object store: S3, GCS, Azure, or any other of fsspec."""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, NamedTuple

from ckpt_core.crew import run_all
from ckpt_core.disclosure import Redaction, logger_of, public_url
from ckpt_core.storage._base import Lock, RangeReader, Storage, StorageEntry
from ckpt_core.storage._keys import file_key, is_plain, key_parts
from ckpt_core.storage._putting import Pace, Progress, PutSource, ReadAt, nothing, unlimited
from ckpt_core.storage.local._locks import UnguardedLock
from ckpt_core.storage.object._reader import ObjectRanges, open_object

_PROBE: Final = ".probe"

_logger = logger_of(__name__)
_warned_odd: set[str] = set()


class Found(NamedTuple):
    """One name below a prefix; it may be one that no path can have."""

    name: str
    is_directory: bool
    size_bytes: int


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
        """The URL, without trailing slash, user, password and query."""
        return self._url

    def shown(self, text: object) -> str:
        """Remove secrets from a path or an error, for messages."""
        return self.redaction.text(str(text))

    def path(self, key: str) -> str:
        """Return the client's name of the object."""
        return "/".join(filter(None, [self.base, *key_parts(key)]))

    @abstractmethod
    def size_of(self, path: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            FileNotFoundError: there is none.
        """

    @abstractmethod
    def children(self, path: str) -> Sequence[Found]:
        """List the names below a prefix, up to the next slash; [] if there are none."""

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
        """Return the size and first bytes of an object, if possible by one request.

        Raises:
            FileNotFoundError: there is none.
        """
        size = self.size_of(path)
        start = bytearray(min(size, most_bytes))
        count = self.read_into(path, 0, memoryview(start)) if start else 0
        return size, bytes(start[:count])

    @abstractmethod
    def put_source(self, path: str, source: PutSource, identity: str) -> None:
        """Create an object from a source; see `Storage.put_file`."""

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

    def put_file(
        self,
        key: str,
        size_bytes: int,
        read: ReadAt,
        *,
        identity: str,
        pace: Pace | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Upload a file, without parts that an earlier call has sent where the client can."""
        source = PutSource(size_bytes, read, pace or unlimited, progress or nothing)
        self.put_source(self.path(file_key(key)), source, identity)

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        """Open an object for reading, by ranged requests."""
        with open_object(self, self.path(file_key(key))) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open an object for ranged reads, one request each; its first byte is read."""
        path = self.path(file_key(key))
        size, start = self.read_start(path, 1)
        yield ObjectRanges(self, path, size, start)

    def list(self, key: str) -> list[StorageEntry]:
        entries = [StorageEntry(*each) for each in self.children(self.path(key))]
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
        """Do nothing but check the key: prefixes need not be created.

        Whether one exists already is unknown.
        """
        file_key(key)

    def sync_directory(self, key: str) -> None:
        """Do nothing but check the key: a completed upload is durable."""
        key_parts(key)

    def try_lock(self, key: str) -> Lock | None:
        """Return a lock that excludes nothing: object stores do not know live processes."""
        file_key(key)
        return UnguardedLock()


def _warn_odd(url: str, key: str, names: Sequence[str]) -> None:
    """Warn once per prefix: listings are frequent."""
    place = f"{url}/{key}" if key else url
    if place not in _warned_odd:
        _warned_odd.add(place)
        _logger.warning(
            "%s holds objects whose keys continue with %s, which no path may have: they are ignored and not "
            "touched; delete them by their keys",
            place,
            " and ".join(repr(name) for name in names),
        )
