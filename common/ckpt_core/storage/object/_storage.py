"""Storage in an object store: S3, GCS, or any other of fsspec."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final, final

from ckpt_core.crew import run_all
from ckpt_core.disclosure import logger_of
from ckpt_core.storage._base import Lock, RangeReader, Storage, StorageEntry
from ckpt_core.storage._keys import file_key, is_plain, key_parts
from ckpt_core.storage.local._locks import UnguardedLock
from ckpt_core.storage.object._reader import ObjectRanges, open_object
from ckpt_core.storage.object._service import ObjectService
from ckpt_core.storage.object._translation import translated_errors
from ckpt_core.storage.object._upload import abandon_uploads, upload

REQUEST_SECONDS: Final = 600.0
"""The default time limit of one request."""

_DELETE_THREADS: Final = 16
# 10,000 parts, the limit of S3, then make 640 GiB per object.
_WRITE_BLOCK_BYTES: Final = 64 * 2**20
_PROBE: Final = ".probe"

_logger = logger_of(__name__)
_warned_odd: set[str] = set()


@final
class ObjectStorage(Storage):
    """A prefix in an object store, through fsspec.

    Objects appear whole or not at all, but there are no directories and no renames, so a commit is the
    creation of the marker object, after all others. On S3 and GCS objects are created only if there is none,
    so that a late upload cannot overwrite an object of another job.
    """

    supports_rename = False

    def __init__(
        self,
        url: str,
        *,
        write_block_bytes: int = _WRITE_BLOCK_BYTES,
        request_seconds: float = REQUEST_SECONDS,
        conditional_writes: bool = True,
        **storage_options: Any,
    ) -> None:
        """Connect lazily: nothing uses the network before the first operation.

        Args:
            url: any URL that fsspec knows, with or without a trailing slash.
            write_block_bytes: size of the parts of an upload; one such buffer per open stream.
            request_seconds: the time limit of one request, retries included.
            conditional_writes: whether to create objects only if there is none; a store that speaks S3 but
                lacks `If-None-Match` needs False, and then two jobs must not write to one root.
            storage_options: passed to the fsspec filesystem (credentials, endpoint…). On S3, time-outs and
                retries are set to fit into `request_seconds` unless `config_kwargs` sets them.

        Raises:
            ConfigError: the protocol is unknown or its extra is not installed.
        """
        self._service = ObjectService(
            url, storage_options, request_seconds=request_seconds, conditional_writes=conditional_writes
        )
        self._url = self._service.url
        self._write_block_bytes = write_block_bytes

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
            bucket = self._service.shown(self._service.base.strip("/").partition("/")[0])
            message = f"bucket {bucket!r} does not exist; create it, or correct the URL"
            raise FileNotFoundError(errno.ENOENT, message, self._url) from error
        self._service.remove(self._service.path(_PROBE))

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        """Upload a new object; it appears on a clean exit, and not at all on an error."""
        path = self._service.path(file_key(key))
        with translated_errors(self._url, self._service.redaction):
            if self._service.call("exists", path):
                raise FileExistsError(errno.EEXIST, "the object exists already", f"{self._url}/{key}")
            with upload(self._service, path, self._write_block_bytes) as stream:
                yield stream

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        """Open an object for reading, by ranged requests."""
        path = self._service.path(file_key(key))
        with open_object(self._service, path, self.size(key)) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open an object for ranged reads, one request each."""
        path, size = self._service.path(file_key(key)), self.size(key)
        yield ObjectRanges(self._service, path, size)

    def replace(self, key: str, content: bytes) -> None:
        """Write a small object; stores replace atomically."""
        self._service.call("pipe_file", self._service.path(file_key(key)), content)

    def list(self, key: str) -> list[StorageEntry]:
        """List the names below a prefix, up to the next slash, sorted; [] if none."""
        path = self._service.path(key)
        try:
            self._service.filesystem.invalidate_cache()
            found = self._service.call("ls", path, detail=True)
        except FileNotFoundError:
            return []
        prefix = path.strip("/") + "/"
        children = [(str(info["name"]).strip("/"), info) for info in found]
        entries = [_entry(name, info) for name, info in children if name.startswith(prefix)]
        odd = [entry.name for entry in entries if not is_plain(entry.name)]
        if odd:
            _warn_odd(self._url, key, odd)
            entries = [entry for entry in entries if entry.name not in odd]
        return sorted(entries, key=lambda entry: entry.name)

    def size(self, key: str) -> int:
        """Return the size of an object in bytes."""
        self._service.filesystem.invalidate_cache()
        info = self._service.call("info", self._service.path(file_key(key)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "a prefix, not an object", f"{self._url}/{key}")
        return int(info["size"])

    def delete(self, key: str) -> None:
        """Delete an object, or all objects under a prefix.

        One by one: fsspec's bulk deletions expand wildcards in keys, and that of s3fs hides refused
        deletions.
        """
        path = self._service.path(file_key(key))
        self._service.filesystem.invalidate_cache()
        # The filesystem finds a single object by its name, even if listings do not show it yet.
        found = [str(name) for name in self._service.call("find", path)]
        # A key that is no valid path is not ours; see `list`.
        below = [name for name in found if name.startswith(path + "/") and _is_key(name[len(path) + 1 :])]
        doomed = [name for name in found if name == path] + below
        if not doomed:
            return
        run_all(self._service.remove, doomed, _DELETE_THREADS, name="ckpt-delete")

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        """Abort multipart uploads that were never completed; S3 bills them."""
        return abandon_uploads(self._service, unwanted)

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

    def free_bytes(self) -> int | None:
        """Return None: object stores report no limit."""
        return None

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


def _entry(name: str, info: dict[str, Any]) -> StorageEntry:
    is_directory = info["type"] == "directory"
    return StorageEntry(
        name=name.rpartition("/")[2],
        is_directory=is_directory,
        size_bytes=0 if is_directory else int(info["size"]),
    )
