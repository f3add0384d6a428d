"""Checkpoints in an object store (S3, GCS, or whatever else fsspec reaches)."""

from __future__ import annotations

import errno
import logging
import secrets
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any, cast, final

from ckpt_core.errors import ConfigError
from ckpt_core.storage._base import Lock, RangeReader, Storage, StorageEntry
from ckpt_core.storage._keys import file_key, key_parts
from ckpt_core.storage._locks import UnguardedLock
from ckpt_core.storage._object_reader import ObjectRanges, open_object
from ckpt_core.storage._remote_errors import translated_errors

_logger = logging.getLogger(__name__)
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_DELETE_THREADS = 16
# 10,000 parts, the limit of S3, then make 640 GiB per object.
_WRITE_BLOCK_BYTES = 64 * 2**20


@final
class ObjectStorage(Storage):
    """A prefix in an object store, through fsspec.

    Objects appear whole or not at all, but directories do not exist and nothing can be renamed, so a commit
    is the creation of the marker object, after all others. Whether an object exists is asked before it is
    created, not in one step: keep to one writer per root.
    """

    supports_rename = False

    def __init__(
        self, url: str, *, write_block_bytes: int = _WRITE_BLOCK_BYTES, **storage_options: Any
    ) -> None:
        """Connect lazily; the network is first used by the first operation.

        Args:
            url: any URL that fsspec knows, with or without a trailing slash.
            write_block_bytes: size of the parts of an upload; one such buffer per open stream.
            storage_options: passed on to the fsspec filesystem (credentials, endpoint…).

        Raises:
            ConfigError: the protocol is unknown or its extra is not installed.
        """
        self._url = url.rstrip("/")
        self._write_block_bytes = write_block_bytes
        self._filesystem, path = _connect(url, storage_options)
        self._base = path.rstrip("/")

    @property
    def url(self) -> str:
        """The URL, without trailing slash."""
        return self._url

    def check_root(self) -> None:
        """Create and delete a tiny object.

        Raises:
            FileNotFoundError: the bucket does not exist.
            PermissionError: no credentials, or they do not allow writing.
        """
        probe = f".probe-{secrets.token_hex(8)}"
        try:
            self.replace(probe, b"probe")
        except FileNotFoundError as error:
            bucket = self._base.strip("/").partition("/")[0]
            message = f"bucket {bucket!r} does not exist; create it, or correct the URL"
            raise FileNotFoundError(errno.ENOENT, message, self._url) from error
        self.delete(probe)

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        """Upload a new object piece by piece; it appears on a clean exit and not at all on an error."""
        path = self._path(file_key(key))
        with translated_errors(self._url):
            if self._filesystem.exists(path):
                raise FileExistsError(errno.EEXIST, "the object exists already", f"{self._url}/{key}")
            stream = self._filesystem.open(path, "wb", block_size=self._write_block_bytes)
            try:
                yield cast("IO[bytes]", stream)
                stream.close()
            except BaseException:
                _abandon(self._filesystem, stream, path)
                raise

    @contextmanager
    def open(self, key: str) -> Generator[IO[bytes]]:
        """Open an object for reading, by ranges."""
        path = self._path(file_key(key))
        with open_object(self._filesystem, path, self.size(key), self._url) as stream:
            yield stream

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open an object for reading by ranges; every read is one request."""
        path, size = self._path(file_key(key)), self.size(key)
        yield ObjectRanges(self._filesystem, path, size, self._url)

    def replace(self, key: str, content: bytes) -> None:
        """Write a small object; stores replace atomically."""
        with translated_errors(self._url):
            self._filesystem.pipe_file(self._path(file_key(key)), content)

    def list(self, key: str) -> list[StorageEntry]:
        """What follows the prefix, up to the next slash, sorted by name; [] if there is nothing."""
        path = self._path(key)
        try:
            with translated_errors(self._url):
                self._filesystem.invalidate_cache()
                found = self._filesystem.ls(path, detail=True)
        except FileNotFoundError:
            return []
        prefix = path.strip("/") + "/"
        children = [(str(info["name"]).strip("/"), info) for info in found]
        entries = [_entry(name, info) for name, info in children if name.startswith(prefix)]
        return sorted(entries, key=lambda entry: entry.name)

    def size(self, key: str) -> int:
        """Size of an object in bytes."""
        with translated_errors(self._url):
            self._filesystem.invalidate_cache()
            info = self._filesystem.info(self._path(file_key(key)))
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "a prefix, not an object", f"{self._url}/{key}")
        return int(info["size"])

    def delete(self, key: str) -> None:
        """Delete an object, or all objects under a prefix.

        One by one: the bulk deletions of fsspec's filesystems expand wildcards in keys, and that of s3fs
        hides which deletions were refused.
        """
        path = self._path(file_key(key))
        with translated_errors(self._url):
            self._filesystem.invalidate_cache()
            found = [str(name) for name in self._filesystem.find(path)]
            doomed = [name for name in found if name == path or name.startswith(path + "/")]
            if not doomed:
                return
            with ThreadPoolExecutor(_DELETE_THREADS, thread_name_prefix="ckpt-delete") as pool:
                list(pool.map(partial(_remove, self._filesystem), doomed))

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

    def _path(self, key: str) -> str:
        return "/".join([self._base, *key_parts(key)])


def _connect(url: str, storage_options: dict[str, Any]) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    # Listings are never cached: other ranks and other jobs write to the same prefix.
    options = {"use_listings_cache": False, "skip_instance_cache": True, **storage_options}
    protocol = url.partition("://")[0]
    try:
        with translated_errors(url):
            filesystem, path = url_to_fs(url, **options)  # type: ignore[no-untyped-call]
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        fix = str(error) if extra is None else f'pip install "ckpt-suite[{extra}]"'
        raise ConfigError(f"{url}: storage for {protocol}:// is not installed; {fix}") from error
    except ValueError as error:
        raise ConfigError(f"{url}: not a URL that fsspec can open ({error})") from error
    return filesystem, str(path)


def _abandon(filesystem: Any, stream: Any, path: str) -> None:
    """Leave nothing of an upload that failed."""
    from fsspec.spec import AbstractBufferedFile

    try:
        stream.discard()
        # A completion whose answer was lost, or a filesystem that shows objects early.
        _remove(filesystem, path)
    # Told to the log only: the error that made us abandon the upload is on its way to the caller.
    except Exception:
        _logger.warning("%s: could not clean up after a failed upload", path, exc_info=True)
    finally:
        # Otherwise the garbage collector closes the stream, and closing completes the upload.
        if isinstance(stream, AbstractBufferedFile):
            stream.closed = True


def _remove(filesystem: Any, path: str) -> None:
    with suppress(FileNotFoundError):
        filesystem.rm_file(path)


def _entry(name: str, info: dict[str, Any]) -> StorageEntry:
    is_directory = info["type"] == "directory"
    return StorageEntry(
        name=name.rpartition("/")[2],
        is_directory=is_directory,
        size_bytes=0 if is_directory else int(info["size"]),
    )
