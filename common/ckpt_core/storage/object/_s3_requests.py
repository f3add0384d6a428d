"""Requests to S3 by botocore, within a time limit, from and into memory in place."""

from __future__ import annotations

import base64
import errno
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any, Final, final
from weakref import WeakSet

from ckpt_core.disclosure import Redaction, logger_of
from ckpt_core.storage.object._s3_options import S3Settings
from ckpt_core.storage.object._translation import answer_ended, late, translated_errors

_SLICE_BYTES: Final = 2**20
_READ_TRIES: Final = 4
_CLEANING_SHARE: Final = 0.25
# Answers after which botocore makes no further try: damage on the way, and two creations at the same moment.
_AGAIN: Final = {
    ("put_object", "BadDigest"),
    ("put_object", "ConditionalRequestConflict"),
    ("upload_part", "BadDigest"),
}
_TRIES_AGAIN: Final = 3
_NO_SUCH_RANGE: Final = 416

_logger = logger_of(__name__)


@final
class S3Requests:
    """Requests to one bucket, each within so many seconds, further tries included."""

    def __init__(
        self, url: str, bucket: str, settings: S3Settings, *, redaction: Redaction, seconds: float
    ) -> None:
        self.url = url
        self.bucket = bucket
        self.redaction = redaction
        self._settings = settings
        self._seconds = seconds
        self._guard = threading.Lock()
        self._warned = False
        self._made: Any = None
        self._sockets: WeakSet[Any] = WeakSet()
        self._round = 0
        self._deadline = threading.local()

    def call(self, operation: str, *, cleaning: bool = False, **arguments: Any) -> dict[str, Any]:
        """Send one request of the bucket, and further tries.

        `cleaning` is for calls after a failure, which get less time. Errors as of `translated_errors`.
        """
        with translated_errors(self.url, self.redaction), self._limit(_CLEANING_SHARE if cleaning else 1):
            return self._ask(operation, **arguments)

    def read_spread(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Read a range into several buffers: each request takes milliseconds of CPU."""
        done = 0
        last = offset + sum(map(len, buffers)) - 1
        with translated_errors(self.url, self.redaction), self._limit():
            for attempt in range(_READ_TRIES):
                # What has arrived is not asked for again.
                answer = self._ask("get_object", Key=path, Range=f"bytes={offset + done}-{last}")
                wanted = done + int(answer["ContentLength"])
                with answer["Body"] as body:
                    done += self._receive(body, _part(buffers, done, wanted))
                if done >= wanted:
                    return done
                time.sleep(0.1 * 2**attempt)
        raise answer_ended(self.url)

    def read_start(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return the size and first bytes of an object: an answer has both."""
        from botocore.exceptions import ClientError

        with translated_errors(self.url, self.redaction), self._limit():
            try:
                answer = self._ask("get_object", Key=path, Range=f"bytes=0-{most_bytes - 1}")
            except ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != _NO_SUCH_RANGE:
                    raise
                return 0, b""  # an empty object has no first byte
            length = int(answer["ContentLength"])
            size = int(str(answer.get("ContentRange", length)).rpartition("/")[2])
            start = memoryview(bytearray(min(length, most_bytes)))
            with answer["Body"] as body:
                done = self._receive(body, [start])
        if done < len(start):
            self.read_spread(path, done, [start[done:]])
        return size, bytes(start)

    def pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        client = self._client()
        with translated_errors(self.url, self.redaction):
            names = client.get_paginator(operation)
        arguments = self._settings.known(client, operation, {"Bucket": self.bucket, **arguments})
        with translated_errors(self.url, self.redaction), self._limit():
            yield from names.paginate(**arguments)

    def checksum(self, mark: str) -> dict[str, Any]:
        """Return the argument by which the service checks content, if it is to do so."""
        return {"ChecksumCRC32": crc32_header(mark)} if self._settings.checksums else {}

    def note_unchecked(self, answer: Mapping[str, Any]) -> None:
        """Warn once if the answer to a part does not confirm its checksum."""
        if self._settings.checksums and not self._warned and "ChecksumCRC32" not in answer:
            self._warned = True
            _logger.warning(
                "%s: the object store does not confirm checksums (x-amz-checksum-crc32), so damage on "
                "the way is found when a checkpoint is read, and uploads that were cut off start from zero; "
                "storage_options={'checksums': False} sends none",
                self.url,
            )

    def interrupt(self) -> None:
        with self._guard:
            self._round += 1
            sockets = list(self._sockets)
        for connected in sockets:
            with suppress(OSError):
                # Wakes up the thread that waits for an answer, which `close` does not.
                connected.shutdown(socket.SHUT_RDWR)

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        from botocore.exceptions import ClientError

        client = self._client()
        arguments = self._settings.known(client, operation, {"Bucket": self.bucket, **arguments})
        act: Callable[..., dict[str, Any]] = getattr(client, operation)
        for _ in range(_TRIES_AGAIN - 1):
            try:
                return act(**arguments)
            except ClientError as error:
                if (operation, error.response.get("Error", {}).get("Code")) not in _AGAIN:
                    raise
        return act(**arguments)

    def _receive(self, body: Any, buffers: Sequence[memoryview]) -> int:
        """Read from an answer; return how many bytes came before it ended."""
        from urllib3.exceptions import HTTPError

        # urllib3 copies twice; the answer of `http.client` in it receives straight into place.
        receive = getattr(body, "_fp", body).readinto
        done = 0
        for buffer in buffers:
            start = 0
            while start < len(buffer):
                self._check_deadline()
                count = 0
                with suppress(HTTPError, HTTPException, OSError):
                    count = receive(buffer[start : start + _SLICE_BYTES])
                if not count:
                    return done
                start, done = start + count, done + count
        if body.closed:
            body.release_conn()  # for the next request; an answer that is not over is closed with it
        return done

    def _client(self) -> Any:
        with self._guard:
            if self._made is None:
                with translated_errors(self.url, self.redaction):
                    self._made = self._settings.connect(self.url, self.redaction)
                _watch(self._made, self._note_socket)
                self._made.meta.events.register("before-send.s3", self._before_send)
            return self._made

    def _before_send(self, request: Any, **_: Any) -> None:
        """Let the memory itself be sent, and begin no try too late."""
        self._check_deadline()
        if isinstance(request.body, Body):
            request.body = _Slices(request.body.content, self._check_deadline)

    @contextmanager
    def _limit(self, share: float = 1) -> Generator[None]:
        from botocore.exceptions import ConnectTimeoutError, ReadTimeoutError

        self._deadline.at = time.monotonic() + self._seconds * share
        self._deadline.round = self._round
        try:
            yield
        except (ConnectTimeoutError, ReadTimeoutError) as error:
            raise late(self.url, self._seconds) from error

    def _note_socket(self, connected: Any) -> None:
        with self._guard:
            self._sockets.add(connected)

    def _check_deadline(self) -> None:
        if self._deadline.round != self._round:
            raise InterruptedError(errno.EINTR, "cancelled, as the process ends", self.url)
        if time.monotonic() > self._deadline.at:
            raise late(self.url, self._seconds)


def _watch(client: Any, note: Callable[[Any], None]) -> None:
    """Let `note` know every socket that botocore opens.

    A botocore whose pools are elsewhere is not watched: its requests end at their time limits.
    """
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    pools = getattr(session, "_pool_classes_by_scheme", None)
    if not isinstance(pools, dict):
        return
    for scheme, pool in list(pools.items()):
        kind: Any = pool.ConnectionCls

        class Watched(kind):  # type: ignore[misc]
            def connect(self) -> None:
                super().connect()
                note(self.sock)

        pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": Watched})


def _part(buffers: Sequence[memoryview], start: int, stop: int) -> list[memoryview]:
    found: list[memoryview] = []
    for buffer in buffers:
        found.append(buffer[max(start, 0) : max(stop, 0)])
        start, stop = start - len(buffer), stop - len(buffer)
    return found


@final
class Body:
    """The body of a request, which botocore takes for a file."""

    def __init__(self, content: Sequence[memoryview]) -> None:
        self.content = content

    def __len__(self) -> int:
        return sum(map(len, self.content))

    def read(self, count: int = -1) -> bytes:
        """Be a file; `_Slices` are sent instead."""
        raise NotImplementedError(count)


@final
class _Slices:
    """The memory of a body in slices: a time limit of the socket is one of each."""

    def __init__(self, content: Sequence[memoryview], check: Callable[[], None]) -> None:
        self._content = content
        self._check = check

    def __iter__(self) -> Generator[memoryview]:
        for piece in self._content:
            for start in range(0, len(piece), _SLICE_BYTES):
                self._check()
                yield piece[start : start + _SLICE_BYTES]

    def seek(self, position: int) -> None:
        """Do nothing, before another try: every iteration starts at the beginning."""


def crc32_header(checksum: str) -> str:
    return base64.b64encode(bytes.fromhex(checksum)).decode()
