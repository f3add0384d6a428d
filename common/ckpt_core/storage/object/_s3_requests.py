"""Requests to S3 by botocore, within a time limit, with bodies from memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, final

from ckpt_core.disclosure import Redaction
from ckpt_core.storage.object._s3_options import S3Settings
from ckpt_core.storage.object._translation import answer_ended, late, translated_errors

_SLICE_BYTES: Final = 2**20
_READ_TRIES: Final = 4
_CLEANING_SHARE: Final = 0.25


@final
class S3Requests:
    """Requests to one bucket.

    Args:
        url: of the root, for messages.
        bucket: its name.
        settings: how to reach it.
        redaction: of messages.
        seconds: the time limit of one request, further tries included.
    """

    def __init__(
        self, url: str, bucket: str, settings: S3Settings, *, redaction: Redaction, seconds: float
    ) -> None:
        self.url = url
        self.bucket = bucket
        self.redaction = redaction
        self._settings = settings
        self._seconds = seconds
        self._guard = threading.Lock()
        self._made: Any = None
        self._deadline = threading.local()

    def call(self, operation: str, *, cleaning: bool = False, **arguments: Any) -> dict[str, Any]:
        """Send one request of the bucket, and further tries.

        `cleaning` is for calls after a failure, which get less time.

        Raises:
            OSError: see `translated_errors`.
        """
        with translated_errors(self.url, self.redaction), self._limit(_CLEANING_SHARE if cleaning else 1):
            return self._ask(operation, **arguments)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Read a range; return how many bytes of it the object has."""
        done = 0
        for attempt in range(_READ_TRIES):
            with translated_errors(self.url, self.redaction), self._limit():
                last = offset + len(buffer) - 1
                answer = self._ask("get_object", Key=path, Range=f"bytes={offset + done}-{last}")
                wanted = done + int(answer["ContentLength"])
                with answer["Body"] as body:
                    done += self._receive(body, buffer[done:wanted])
            if done >= wanted:
                return done
            time.sleep(0.1 * 2**attempt)
        raise answer_ended(self.url)

    def pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        client = self._client()
        with translated_errors(self.url, self.redaction):
            names = client.get_paginator(operation)
        arguments = self._settings.known(client, operation, {"Bucket": self.bucket, **arguments})
        with translated_errors(self.url, self.redaction), self._limit():
            yield from names.paginate(**arguments)

    def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        client = self._client()
        arguments = self._settings.known(client, operation, {"Bucket": self.bucket, **arguments})
        answer: dict[str, Any] = getattr(client, operation)(**arguments)
        return answer

    def _receive(self, body: Any, buffer: memoryview) -> int:
        """Read from an answer; return how many bytes came before it ended."""
        from botocore.exceptions import HTTPClientError, IncompleteReadError

        done = 0
        with suppress(HTTPClientError, IncompleteReadError):
            while done < len(buffer):
                self._check_deadline()
                content = body.read(min(_SLICE_BYTES, len(buffer) - done))
                if not content:
                    break
                buffer[done : done + len(content)] = content
                done += len(content)
        return done

    def _client(self) -> Any:
        with self._guard:
            if self._made is None:
                with translated_errors(self.url, self.redaction):
                    self._made = self._settings.connect(self.url, self.redaction)
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
        try:
            yield
        except (ConnectTimeoutError, ReadTimeoutError) as error:
            raise late(self.url, self._seconds) from error

    def _check_deadline(self) -> None:
        if time.monotonic() > self._deadline.at:
            raise late(self.url, self._seconds)


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
        """Do nothing, before another try: every iteration starts from the first slice."""
