"""The fsspec filesystem behind a URL: calls with time limits, errors translated."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import IO, Any, Final, final

from ckpt_core.disclosure import Redaction, public_url
from ckpt_core.errors import ConfigError
from ckpt_core.storage._putting import PutSource
from ckpt_core.storage.object._azure import AZURE_METADATA
from ckpt_core.storage.object._client import Found, ObjectClient
from ckpt_core.storage.object._gcs import GCS_METADATA
from ckpt_core.storage.object._parts import token_of
from ckpt_core.storage.object._reader import ObjectRanges
from ckpt_core.storage.object._s3_options import time_limits
from ckpt_core.storage.object._translation import late, translated_errors
from ckpt_core.storage.object._upload import abandon_uploads, upload
from ckpt_core.storage.object._words import refused

_EXTRAS: Final = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
}
# The argument for metadata of an object. Only these services create objects atomically and support
# conditional creation.
_TOKEN_ARGUMENT: Final = {"s3": "Metadata", "gs": "metadata", "abfs": "metadata"}
_UPLOAD: Final = {"s3": "ckpt-upload", "gs": GCS_METADATA, "abfs": AZURE_METADATA}
# Made by fsspec from coroutines and called by its file objects, which pass no time limit.
_CALLED_BY_STREAMS: Final = ("call_s3", "call", "abort_mpu")
# 10,000 parts, the limit of S3, then make 640 GiB per object.
_BLOCK_BYTES: Final = 64 * 2**20
_CLEANING_SHARE: Final = 0.25
# Retries by s3fs, besides those of botocore: throttling, and answers that end too early.
_S3FS_ATTEMPTS: Final = 2


@final
class ObjectService(ObjectClient):
    """An object store, accessed through fsspec.

    Args:
        url: of the root.
        storage_options: for the filesystem.
        request_seconds: the time limit of one request, retries included.
        conditional_writes: whether to create objects only if there is none, where the service supports that.
        block_bytes: size of the parts of an upload, one such buffer per open stream; None for the default.

    Raises:
        ConfigError: the protocol is unknown or its extra is not installed.
    """

    def __init__(
        self,
        url: str,
        storage_options: dict[str, Any],
        *,
        request_seconds: float,
        conditional_writes: bool,
        block_bytes: int | None,
    ) -> None:
        self.url = public_url(url).rstrip("/")
        self.redaction = Redaction.of(url, storage_options)
        self._options = tuple(sorted(storage_options))
        options = _with_time_limits(url, storage_options, request_seconds)
        self.filesystem, path = _connect(url, options, self.redaction)
        self.base = path.rstrip("/")
        self.bucket = path.strip("/").partition("/")[0]
        self._block_bytes = block_bytes or _BLOCK_BYTES
        self._request_seconds = request_seconds
        names = self.filesystem.protocol
        self._kind = names if isinstance(names, str) else names[0]
        self._token_argument = _TOKEN_ARGUMENT.get(self._kind)
        self._conditional_writes = conditional_writes and self.is_atomic
        self._takes_limit = _takes_limit(self.filesystem)
        self._limit_streams()

    @property
    def is_atomic(self) -> bool:
        """Whether objects are known to appear atomically and can be marked as ours."""
        return self._token_argument is not None

    @property
    def is_s3(self) -> bool:
        """Whether the service speaks S3."""
        return bool(self._kind == "s3")

    def call(self, method: str, *args: Any, cleaning: bool = False, **kwargs: Any) -> Any:
        """Call a method of the filesystem within the time limit.

        `cleaning` is for calls after a failure, which get less time.

        Raises:
            ConfigError: the library behind the URL refuses its arguments.
            TimeoutError: it took too long.
            OSError: see `translated_errors`.
        """
        seconds = self._request_seconds * (_CLEANING_SHARE if cleaning else 1)
        act = getattr(self.filesystem, method)
        with translated_errors(self.url, self.redaction):
            try:
                if not self._takes_limit or method in _CALLED_BY_STREAMS:
                    return act(*args, **kwargs)
                return self._limited(act, seconds, *args, **kwargs)
            except (ValueError, TypeError) as error:
                raise refused(
                    self.url, "fsspec", self._options, error=error, redaction=self.redaction
                ) from None

    def size(self, path: str) -> int:
        """Return the size of an object in bytes."""
        self.filesystem.invalidate_cache()
        info = self.call("info", path)
        if info["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "a prefix, not an object", self.shown(path))
        return int(info["size"])

    def children(self, path: str) -> list[Found]:
        """List the names below a prefix, up to the next slash."""
        try:
            self.filesystem.invalidate_cache()
            found = self.call("ls", path, detail=True)
        except FileNotFoundError:
            return []
        prefix = path.strip("/") + "/"
        children = [(str(info["name"]).strip("/"), info) for info in found]
        return [_found(name, info) for name, info in children if name.startswith(prefix)]

    def below(self, path: str) -> list[str]:
        """List an object, even one that no listing shows yet, and all below it."""
        self.filesystem.invalidate_cache()
        found = [str(name) for name in self.call("find", path)]
        return [name for name in found if name == path or name.startswith(path + "/")]

    def replace(self, path: str, content: bytes) -> None:
        """Write a small object, over an existing one."""
        self.call("pipe_file", path, content)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Read a range in one request."""
        content: bytes = self.call("cat_file", path, start=offset, end=offset + len(buffer))
        buffer[: len(content)] = content
        return len(content)

    @contextmanager
    def create(self, path: str) -> Generator[IO[bytes]]:
        """Open a stream into a new object."""
        with self._creating(path, secrets.token_hex(8)) as stream:
            yield stream

    def put_file(self, path: str, source: PutSource, identity: str) -> None:
        """Send a file whole, unless it is there."""
        token = token_of(identity, source.size_bytes)
        with suppress(FileNotFoundError):
            size = self.size(path)
            if size == source.size_bytes and _has(self, path, source, token):
                source.progress(size)
                return
            if size != source.size_bytes and not self.is_atomic:
                # This filesystem shows objects before they are complete.
                self.remove(path)
        with self._creating(path, token) as stream:
            for piece in source.counted():
                stream.write(piece)

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        """Abort multipart uploads that were never completed; S3 bills them."""
        return abandon_uploads(self, unwanted)

    @contextmanager
    def _creating(self, path: str, token: str) -> Generator[IO[bytes]]:
        with translated_errors(self.url, self.redaction):
            if self.call("exists", path):
                raise FileExistsError(errno.EEXIST, "the object exists already", self.shown(path))
            with upload(self, path, token) as stream:
                yield stream

    def new_object(self, path: str, token: str) -> Any:
        """Open a stream that creates an object.

        Where the service supports it, only if there is none.
        """
        options: dict[str, Any] = {}
        if self._token_argument is not None:
            known = getattr(self.filesystem, "s3_additional_kwargs", {}).get(self._token_argument, {})
            options[self._token_argument] = {**known, _UPLOAD[self._kind]: token}
        if self._kind == "gs":
            # gcsfs sends some requests without `call`.
            options["timeout"] = self._request_seconds
        mode = "xb" if self._conditional_writes else "wb"
        stream = self.filesystem.open(path, mode, block_size=self._block_bytes, **options)
        if self._kind == "abfs":
            stream._upload_chunk = partial(self._limited, stream._upload_chunk, self._request_seconds)
        return stream

    def holds(self, path: str, token: str) -> bool:
        """Return whether the object is certainly there and made with that token."""
        # After any error the answer is unknown.
        with suppress(Exception):
            if self._kind == "abfs":
                found = self.call("info", path, cleaning=True)["metadata"]
                return bool(found[AZURE_METADATA] == token)
            return bool(self.call("getxattr", path, _UPLOAD[self._kind], cleaning=True) == token)
        return False

    def remove(self, path: str, *, cleaning: bool = False) -> None:
        """Delete an object by its name; no-op if there is none."""
        with suppress(FileNotFoundError):
            self.call("rm_file", path, cleaning=cleaning)

    def _limit_streams(self) -> None:
        for name in _CALLED_BY_STREAMS:
            act = getattr(self.filesystem, name, None)
            if self._takes_limit and act is not None:
                seconds = self._request_seconds * (_CLEANING_SHARE if name == "abort_mpu" else 1)
                setattr(self.filesystem, name, partial(self._limited, act, seconds))

    def _limited(self, act: Callable[..., Any], seconds: float, *args: Any, **kwargs: Any) -> Any:
        from fsspec.exceptions import FSTimeoutError

        try:
            return act(*args, timeout=seconds, **kwargs)
        except FSTimeoutError as error:
            raise late(self.url, seconds) from error


def _has(client: ObjectService, path: str, source: PutSource, token: str) -> bool:
    if client.is_atomic:
        # s3fs gives empty objects no metadata.
        return not source.size_bytes or client.holds(path, token)
    return source.equals(ObjectRanges(client, path, source.size_bytes))


def _found(path: str, info: dict[str, Any]) -> Found:
    is_directory = info["type"] == "directory"
    return Found(path.rpartition("/")[2], is_directory, 0 if is_directory else int(info["size"]))


def _takes_limit(filesystem: Any) -> bool:
    from fsspec.asyn import AsyncFileSystem

    return isinstance(filesystem, AsyncFileSystem) and not filesystem.asynchronous


def _connect(url: str, options: dict[str, Any], redaction: Redaction) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    protocol, place = url.partition("://")[0], public_url(url)
    try:
        with translated_errors(place, redaction):
            # Listings are never cached: other ranks and other jobs write to the same prefix.
            filesystem, path = url_to_fs(  # type: ignore[no-untyped-call]
                url, **{"use_listings_cache": False, "skip_instance_cache": True, **options}
            )
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        fix = redaction.text(str(error)) if extra is None else f'pip install "ckpt-suite[{extra}]"'
        raise ConfigError(f"{place}: storage for {protocol}:// is not installed; {fix}") from None
    except (ValueError, TypeError) as error:
        raise refused(place, "fsspec", options, error=error, redaction=redaction) from None
    if _EXTRAS.get(protocol) == "s3":
        filesystem.retries = _S3FS_ATTEMPTS
    return filesystem, str(path)


def _with_time_limits(url: str, options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Add time-outs and retries that fit into `seconds`; the user's settings win."""
    if _EXTRAS.get(url.partition("://")[0]) != "s3":
        return options
    config = time_limits(seconds)
    return {**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}}
