"""Storage in an object store: S3, GCS, Azure, or any other of fsspec."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, final

from ckpt_core.crew import run_all
from ckpt_core.disclosure import logger_of, public_url
from ckpt_core.storage._base import Lock, RangeReader, Storage, StorageEntry
from ckpt_core.storage._keys import file_key, is_plain, key_parts
from ckpt_core.storage._putting import Pace, Progress, PutSource, ReadAt, nothing, unlimited
from ckpt_core.storage.local._locks import UnguardedLock
from ckpt_core.storage.object._connect import connect
from ckpt_core.storage.object._reader import ObjectRanges, open_object
from ckpt_core.validation import integer, require

REQUEST_SECONDS: Final = 600.0
"""The default time limit of one request."""

_DELETE_THREADS: Final = 16
_LEAST_PART_BYTES_OF_S3: Final = 5 * 2**20
_PROBE: Final = ".probe"

_logger = logger_of(__name__)
_warned_odd: set[str] = set()


@final
class ObjectStorage(Storage):
    """A prefix in an object store.

    Objects appear whole or not at all, but there are no directories and no renames, so a commit is the
    creation of the marker object, after all others. On S3, GCS and Azure objects are created only if there is
    none, so that a late upload cannot overwrite an object of another job.
    """

    supports_rename = False

    def __init__(
        self,
        url: str,
        *,
        write_block_bytes: int | None = None,
        request_seconds: float = REQUEST_SECONDS,
        conditional_writes: bool = True,
        **storage_options: Any,
    ) -> None:
        """Connect lazily: nothing uses the network before the first operation.

        Args:
            url: any URL that fsspec knows, with or without a trailing slash.
            write_block_bytes: size of the parts of an upload, on S3 at least 5 MiB; None for the client's.
            request_seconds: the time limit of one request, retries included.
            conditional_writes: whether to create objects only if there is none; a store that speaks S3 but
                lacks `If-None-Match` needs False, and then two jobs must not write to one root.
            storage_options: in the words of the fsspec filesystem (credentials, endpoint…). On S3, time-outs
                and retries are set to fit into `request_seconds` unless `config_kwargs` sets them.

        Raises:
            ConfigError: the protocol is unknown or its extra is not installed, or the client does not take
                an option.
        """
        if write_block_bytes is not None:
            least = _LEAST_PART_BYTES_OF_S3 if url.startswith(("s3://", "s3a://")) else 1
            require(public_url(url), integer("write_block_bytes", write_block_bytes, minimum=least))
        self._client = connect(
            url,
            storage_options,
            request_seconds=request_seconds,
            conditional_writes=conditional_writes,
            block_bytes=write_block_bytes,
        )
        self._url = self._client.url
        self.reads_in_place = self._client.reads_in_place

    @property
    def url(self) -> str:
        """The URL, without trailing slash, user, password and query."""
        return self._url

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
            bucket = self._client.shown(self._client.bucket)
            message = f"bucket {bucket!r} does not exist; create it, or correct the URL"
            raise FileNotFoundError(errno.ENOENT, message, self._url) from error
        self._client.remove(self._client.path(_PROBE))

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        """Upload a new object; it appears on a clean exit, and not at all on an error."""
        with self._client.create(self._client.path(file_key(key))) as stream:
            yield stream

    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        """Upload a large object, in parts from memory where the client can."""
        self._client.write_pieces(self._client.path(file_key(key)), pieces)

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
        self._client.put_file(self._client.path(file_key(key)), source, identity)

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        """Open an object for reading, by ranged requests."""
        with open_object(self._client, self._client.path(file_key(key))) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open an object for ranged reads, one request each; its first byte is read."""
        path = self._client.path(file_key(key))
        size, start = self._client.read_start(path, 1)
        yield ObjectRanges(self._client, path, size, start)

    def replace(self, key: str, content: bytes) -> None:
        """Write a small object; stores replace atomically."""
        self._client.replace(self._client.path(file_key(key)), content)

    def list(self, key: str) -> list[StorageEntry]:
        """List the names below a prefix, up to the next slash, sorted; [] if none."""
        found = self._client.children(self._client.path(key))
        entries = [StorageEntry(*each) for each in found]
        odd = [entry.name for entry in entries if not is_plain(entry.name)]
        if odd:
            _warn_odd(self._url, key, odd)
            entries = [entry for entry in entries if entry.name not in odd]
        return sorted(entries, key=lambda entry: entry.name)

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        return self._client.size(self._client.path(file_key(key)))

    def delete(self, key: str) -> None:
        """Delete an object, or all objects under a prefix.

        One by one: fsspec's bulk deletions expand wildcards in keys.
        """
        path = self._client.path(file_key(key))
        # A key that is no valid path is not ours; see `list`.
        found = self._client.below(path)
        doomed = [name for name in found if name == path or _is_key(name[len(path) + 1 :])]
        if doomed:
            run_all(self._client.remove, doomed, _DELETE_THREADS, name="ckpt-delete")

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        """Abort multipart uploads that were never completed; S3 bills them."""
        return self._client.abandon_uploads(unwanted)

    def interrupt(self) -> None:
        """Cancel requests under way where the client can: botocore alone."""
        self._client.interrupt()

    def make_directory(self, key: str) -> None:
        """Do nothing but check the key: prefixes need not be created.

        Whether one exists already is unknown.
        """
        file_key(key)

    def sync_directory(self, key: str) -> None:
        """Do nothing but check the key: a completed upload is durable."""
        key_parts(key)

    def rename(self, source: str, target: str) -> None:
        """Raise NotImplementedError: it would copy every object."""
        raise NotImplementedError(f"{self._url}: object stores cannot rename ({source} to {target})")

    def exchange(self, first: str, second: str) -> None:
        """Raise NotImplementedError."""
        raise NotImplementedError(f"{self._url}: object stores cannot exchange ({first} and {second})")

    def try_lock(self, key: str) -> Lock | None:
        """Return a lock that excludes nothing: object stores do not know live processes."""
        file_key(key)
        return UnguardedLock()


def _is_key(text: str) -> bool:
    return all(map(is_plain, text.split("/")))


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
