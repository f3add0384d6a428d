"""Checkpoints in an object store (S3, GCS, or whatever else fsspec reaches)."""

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
from ckpt_core.storage.object._errors import translated_errors
from ckpt_core.storage.object._reader import ObjectRanges, open_object
from ckpt_core.storage.object._service import ObjectService
from ckpt_core.storage.object._upload import abandon_uploads, upload

REQUEST_SECONDS: Final = 600.0
"""How long one request may take if nobody says otherwise."""

_DELETE_THREADS: Final = 16
# 10,000 parts, the limit of S3, then make 640 GiB per object.
_WRITE_BLOCK_BYTES: Final = 64 * 2**20
_PROBE: Final = ".probe"

_logger = logger_of(__name__)
_told_odd: set[str] = set()


@final
class ObjectStorage(Storage):
    """A prefix in an object store, through fsspec.

    Objects appear whole or not at all, but directories do not exist and nothing can be renamed, so a commit
    is the creation of the marker object, after all others. S3 and GCS are told to create an object only if
    there is none, so that an upload that arrives late cannot damage what another job has written meanwhile.
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
        """Connect lazily; the network is first used by the first operation.

        Args:
            url: any URL that fsspec knows, with or without a trailing slash.
            write_block_bytes: size of the parts of an upload; one such buffer per open stream.
            request_seconds: how long one request may take, with all that the client does to try it anew.
            conditional_writes: whether to create objects only if there is none; a store that speaks S3 but
                does not know `If-None-Match` needs False, and then no two jobs may write to one root.
            storage_options: passed on to the fsspec filesystem (credentials, endpoint…). On S3, time-outs
                and retries are set to fit into `request_seconds` unless `config_kwargs` sets them.

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
            # Always under the same name, so that the next job deletes what one that dies here leaves.
            self.replace(_PROBE, b"probe")
        except FileNotFoundError as error:
            bucket = self._service.shown(self._service.base.strip("/").partition("/")[0])
            message = f"bucket {bucket!r} does not exist; create it, or correct the URL"
            raise FileNotFoundError(errno.ENOENT, message, self._url) from error
        self._service.remove(self._service.path(_PROBE))

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        """Upload a new object piece by piece; it appears on a clean exit and not at all on an error."""
        path = self._service.path(file_key(key))
        with translated_errors(self._url, self._service.redaction):
            if self._service.call("exists", path):
                raise FileExistsError(errno.EEXIST, "the object exists already", f"{self._url}/{key}")
            with upload(self._service, path, self._write_block_bytes) as stream:
                yield stream

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        """Open an object for reading, by ranges."""
        path = self._service.path(file_key(key))
        with open_object(self._service, path, self.size(key)) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open an object for reading by ranges; every read is one request."""
        path, size = self._service.path(file_key(key)), self.size(key)
        yield ObjectRanges(self._service, path, size)

    def replace(self, key: str, content: bytes) -> None:
        """Write a small object; stores replace atomically."""
        self._service.call("pipe_file", self._service.path(file_key(key)), content)

    def list(self, key: str) -> list[StorageEntry]:
        """What follows the prefix, up to the next slash, sorted by name; [] if there is nothing."""
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
            _tell_odd(self._url, key, odd)
            entries = [entry for entry in entries if entry.name not in odd]
        return sorted(entries, key=lambda entry: entry.name)

    def size(self, key: str) -> int:
        """Size of an object in bytes."""
        self._service.filesystem.invalidate_cache()
        info = self._service.call("info", self._service.path(file_key(key)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "a prefix, not an object", f"{self._url}/{key}")
        return int(info["size"])

    def delete(self, key: str) -> None:
        """Delete an object, or all objects under a prefix.

        One by one: the bulk deletions of fsspec's filesystems expand wildcards in keys, and that of s3fs
        hides which deletions were refused.
        """
        path = self._service.path(file_key(key))
        self._service.filesystem.invalidate_cache()
        # Of a single object that a listing does not show yet, the filesystem asks by its name.
        found = [str(name) for name in self._service.call("find", path)]
        # What no path can lead to is not ours; see `list`.
        below = [name for name in found if name.startswith(path + "/") and _is_key(name[len(path) + 1 :])]
        doomed = [name for name in found if name == path] + below
        if not doomed:
            return
        run_all(self._service.remove, doomed, _DELETE_THREADS, name="ckpt-delete")

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        """On S3, abort uploads of many parts that nobody completed, for which one would go on paying."""
        return abandon_uploads(self._service, unwanted)

    def make_directory(self, key: str) -> None:
        """Nothing: prefixes need not be made, and so it cannot be told whether one exists already."""
        file_key(key)

    def sync_directory(self, key: str) -> None:
        """Nothing: an object is durable once its upload is complete."""
        key_parts(key)

    def rename(self, source: str, target: str) -> None:
        """Not available: it would be a copy of every object."""
        raise NotImplementedError(f"{self._url}: object stores cannot rename ({source} to {target})")

    def exchange(self, first: str, second: str) -> None:
        """Not possible here."""
        raise NotImplementedError(f"{self._url}: object stores cannot exchange ({first} and {second})")

    def free_bytes(self) -> int | None:
        """None: object stores have no limit that could be asked for."""
        return None

    def try_lock(self, key: str) -> Lock | None:
        """A lock that excludes nobody: object stores do not know which processes live."""
        file_key(key)
        return UnguardedLock()


def _is_key(text: str) -> bool:
    return all(map(is_plain, text.split("/")))


def _tell_odd(url: str, key: str, names: Sequence[str]) -> None:
    """Once for each place: listings are frequent."""
    place = f"{url}/{key}" if key else url
    if place not in _told_odd:
        _told_odd.add(place)
        _logger.warning(
            "%s holds objects whose keys go on with %s, which no path may have: they are left out, and left "
            "alone; delete them by their keys",
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
