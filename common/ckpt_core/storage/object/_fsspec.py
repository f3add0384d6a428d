"""Any other filesystem of fsspec, which promises less than S3, GCS and Azure do."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import IO, Any, Final, cast, final

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError
from ckpt_core.storage._base import StorageEntry, file_key
from ckpt_core.storage.object._storage import ObjectStorage, RequestTerms
from ckpt_core.storage.object._translation import refused, translated_errors

_BLOCK_BYTES: Final = 64 * 2**20

_logger = logger_of(__name__)


@final
class FsspecStorage(ObjectStorage):
    """A filesystem of fsspec.

    Files may show before they are complete, and two writers may overwrite each other: `conditional_writes`
    has no effect.
    """

    def __init__(self, url: str, storage_options: dict[str, Any], terms: RequestTerms) -> None:
        from fsspec.asyn import AsyncFileSystem
        from fsspec.core import url_to_fs

        super().__init__(url, storage_options)
        self._options = tuple(sorted(storage_options))
        # Listings are never cached: other ranks and other jobs write to the same prefix.
        fresh = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            with translated_errors(self.url, self.redaction):
                found = url_to_fs(url, **{**fresh, **storage_options})  # type: ignore[no-untyped-call]
        except (ValueError, TypeError) as error:
            raise self._refused(error) from None
        self.filesystem: Any = found[0]
        path = str(found[1])
        self.base = path.rstrip("/")
        self.bucket = path.strip("/").partition("/")[0]
        self._block_bytes = terms.block_bytes or _BLOCK_BYTES
        if url.startswith("hf:"):
            self.delete_threads = 1  # each deletion is a commit, and the Hub refuses one beside another
        takes_limit = isinstance(self.filesystem, AsyncFileSystem) and not self.filesystem.asynchronous
        self._limit = {"timeout": terms.request_seconds} if takes_limit else {}

    def size_of(self, path: str) -> int:
        self.filesystem.invalidate_cache()
        info = self._call("info", path)
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "a prefix, not an object", self.shown(path))
        return int(info["size"])

    def children(self, path: str) -> list[StorageEntry]:
        try:
            self.filesystem.invalidate_cache()
            found = self._call("ls", path, detail=True)
        except FileNotFoundError:
            return []
        prefix = path.strip("/") + "/"
        children = [(str(info["name"]).strip("/"), info) for info in found]
        return [
            StorageEntry(name.rpartition("/")[2], is_directory, 0 if is_directory else int(info["size"]))
            for name, info in children
            for is_directory in (info["type"] == "directory",)
            if name.startswith(prefix)
        ]

    def below(self, path: str) -> list[str]:
        self.filesystem.invalidate_cache()
        found = [str(name) for name in self._call("find", path)]
        return [name for name in found if name == path or name.startswith(path + "/")]

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._call("rm_file", path)

    def replace(self, key: str, content: bytes) -> None:
        self._call("pipe_file", self.path(file_key(key)), content)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        content: bytes = self._call("cat_file", path, start=offset, end=offset + len(buffer))
        buffer[: len(content)] = content
        return len(content)

    @contextmanager
    def create(self, key: str) -> Generator[IO[bytes]]:
        path = self.path(file_key(key))
        if self._call("exists", path):
            raise FileExistsError(errno.EEXIST, "the object exists already", self.shown(path))
        with translated_errors(self.url, self.redaction):
            stream = self.filesystem.open(path, "wb", block_size=self._block_bytes)
            try:
                yield cast("IO[bytes]", stream)
                stream.close()
            except BaseException:
                self._abandon(stream, path)
                raise

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        act: Callable[..., Any] = getattr(self.filesystem, method)
        with translated_errors(self.url, self.redaction):
            try:
                return act(*args, **self._limit, **kwargs)
            except (ValueError, TypeError) as error:
                raise self._refused(error) from None

    def _refused(self, error: Exception) -> ConfigError:
        return refused(self.url, "fsspec", self._options, error=error, redaction=self.redaction)

    def _abandon(self, stream: Any, path: str) -> None:
        """Remove the traces of a failed upload; the error that ended it is on its way."""
        from fsspec.spec import AbstractBufferedFile

        try:
            if hasattr(stream, "discard"):
                stream.discard()
            self.remove(path)
        except Exception as failure:  # noqa: BLE001
            shown = self.shown(path), type(failure).__name__, self.shown(failure)
            _logger.warning("%s: could not clean up after a failed upload: %s: %s", *shown)
        finally:
            if isinstance(stream, AbstractBufferedFile):
                stream.closed = True  # to close it, as the garbage collector does, completes the upload
