"""Uploads: an object that appears whole or not at all, and never in the place of another."""

from __future__ import annotations

import errno
import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import IO, Any, cast

from ckpt_core.disclosure import logger_of
from ckpt_core.storage.object._service import ObjectService

_logger = logger_of(__name__)


@contextmanager
def upload(service: ObjectService, path: str, block_bytes: int) -> Generator[IO[bytes]]:
    """A stream into a new object, which is there after a clean exit.

    Every upload has a token, kept with the object: when it is not told how an upload ended, or that it was
    refused because the object exists, it can be asked whether that object is this upload's.

    Raises:
        FileExistsError: there is an object already.
        OSError: it could not be uploaded, or it cannot be told.
    """
    token = secrets.token_hex(8)
    stream = service.new_object(path, token, block_bytes)
    complete = False
    try:
        yield cast("IO[bytes]", stream)
        complete = True
        stream.close()
    except BaseException as error:
        if complete and isinstance(error, Exception) and service.is_atomic and service.holds(path, token):
            shown = service.shown(path), service.shown(error)
            _logger.info("%s is there, although its upload ended with: %s", *shown)
            _disarm(stream)
            return
        _abandon(service, stream, path, error)
        if complete and isinstance(error, FileExistsError):
            raise FileExistsError(errno.EEXIST, "the object exists already", service.shown(path)) from error
        raise


def abandon_uploads(service: ObjectService, unwanted: Callable[[str], bool]) -> list[str]:
    """Give up uploads of many parts that were begun below the root and never completed.

    Args:
        service: the object store.
        unwanted: whether the upload to that key, relative to the root, may go.

    Returns:
        The keys, sorted; [] where the service has no such thing, or forgets them by itself.
    """
    if not service.is_s3:
        return []
    bucket, _, prefix = service.base.partition("/")
    prefix = f"{prefix}/" if prefix else ""
    abandoned: list[str] = []
    page: dict[str, Any] = {}
    while True:
        answer = service.call("call_s3", "list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page)
        for found in answer.get("Uploads", []):
            key = str(found["Key"])
            if key.startswith(prefix) and unwanted(key.removeprefix(prefix)):
                with suppress(FileNotFoundError):
                    service.call("abort_mpu", bucket, key, found["UploadId"])
                abandoned.append(key.removeprefix(prefix))
        if not answer.get("IsTruncated"):
            return sorted(abandoned)
        page = {"KeyMarker": answer["NextKeyMarker"], "UploadIdMarker": answer["NextUploadIdMarker"]}


def _abandon(service: ObjectService, stream: Any, path: str, error: BaseException) -> None:
    """Leave nothing of an upload that failed, and nothing of anybody else's undone."""
    try:
        stream.discard()
        if not service.is_atomic and not isinstance(error, FileExistsError):
            # A filesystem that shows objects early.
            service.remove(path, cleaning=True)
    # Told to the log only: the error that made us abandon the upload is on its way to the caller.
    except Exception as failure:  # noqa: BLE001
        shown = service.shown(path), type(failure).__name__, service.shown(failure)
        _logger.warning("%s: could not clean up after a failed upload: %s: %s", *shown)
    finally:
        _disarm(stream)


def _disarm(stream: Any) -> None:
    """Keep the garbage collector from closing the stream: closing completes the upload."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(stream, AbstractBufferedFile):
        stream.closed = True
