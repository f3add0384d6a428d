"""Uploads: an object appears whole or not at all, and never overwrites another."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any, cast

from ckpt_core.disclosure import logger_of

if TYPE_CHECKING:
    from ckpt_core.storage.object._service import ObjectService

_logger = logger_of(__name__)


@contextmanager
def upload(service: ObjectService, path: str, token: str) -> Generator[IO[bytes]]:
    """Open a stream into a new object, which exists after a clean exit.

    Its token is stored with the object. If the outcome of an upload is unknown, or it was
    refused because the object exists, the token tells whether the object is this upload's.

    Raises:
        FileExistsError: the object exists already.
        OSError: the upload failed, or its outcome is unknown.
    """
    stream = service.new_object(path, token)
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
    """Abort multipart uploads below the root that were never completed.

    Args:
        service: the object store.
        unwanted: returns whether the upload to a key, relative to the root, may be aborted.

    Returns:
        The keys, sorted; [] where the service has no such uploads, or drops them by itself.
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
    """Remove the traces of a failed upload, and no object of another upload."""
    try:
        stream.discard()
        if not service.is_atomic and not isinstance(error, FileExistsError):
            # This filesystem shows objects before they are complete.
            service.remove(path, cleaning=True)
    # Logged only: the error that ended the upload is being raised to the caller.
    except Exception as failure:  # noqa: BLE001
        shown = service.shown(path), type(failure).__name__, service.shown(failure)
        _logger.warning("%s: could not clean up after a failed upload: %s: %s", *shown)
    finally:
        _disarm(stream)


def _disarm(stream: Any) -> None:
    """Keep the garbage collector from closing the stream, which completes the upload."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(stream, AbstractBufferedFile):
        stream.closed = True
