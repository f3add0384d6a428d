"""HTTP/1.1 of one connection: requests in, answers out, bodies straight into and out of memory."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import final
from urllib.parse import parse_qsl, unquote, urlsplit

from benchmarks.s3.blocks import Block, Pool
from benchmarks.s3.content import S3Error

_HEAD_BYTES = 4096
_MOST_HEAD_BYTES = 64 << 10
_MOST_VIEWS = 512


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Received:
    """The head of a request; names of headers are in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]

    @property
    def body_bytes(self) -> int:
        """The length of the body on the wire."""
        return int(self.headers.get("content-length", 0))

    @property
    def is_framed(self) -> bool:
        """Whether the body is in chunks of aws-chunked."""
        return "x-amz-decoded-content-length" in self.headers


@final
class Connection:
    """One client; used by one thread."""

    def __init__(self, stream: socket.socket, pool: Pool) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        self._pool = pool
        self._ahead = bytearray()
        self.bytes_in = 0
        self.bytes_out = 0

    def receive(self) -> Received | None:
        """Wait for the head of the next request; None if the client has gone."""
        head = self._until(b"\r\n\r\n")
        if head is None:
            return None
        request, *lines = head.decode("latin-1").split("\r\n")
        method, target, _ = request.split(" ", 2)
        parts = urlsplit(target)
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
        }
        return Received(
            method=method,
            path=unquote(parts.path),
            query=dict(parse_qsl(parts.query, keep_blank_values=True)),
            headers=headers,
        )

    def body(self, request: Received) -> tuple[Block, dict[str, str]]:
        """Receive the body into memory of the pool, and the trailers behind it."""
        if "100-continue" in request.headers.get("expect", "").lower():
            self._send([b"HTTP/1.1 100 Continue\r\n\r\n"])
        if not request.is_framed:
            block = self._pool.take(request.body_bytes)
            self._fill(block.view())
            return block, {}
        return self._framed_body(int(request.headers["x-amz-decoded-content-length"]))

    def answer(
        self,
        status: HTTPStatus,
        headers: Mapping[str, str],
        body: Iterable[memoryview | bytes] = (),
        *,
        size_bytes: int = 0,
    ) -> None:
        """Send an answer; `size_bytes` is the length that the headers tell, also where no body follows."""
        lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        lines += [f"content-length: {size_bytes}", "x-amz-request-id: 0", "", ""]
        self._send(["\r\n".join(lines).encode("latin-1"), *body])

    def _framed_body(self, size_bytes: int) -> tuple[Block, dict[str, str]]:
        """Receive chunks, each after its length, then the trailers."""
        block = self._pool.take(size_bytes)
        position = 0
        while True:
            line = self._until(b"\r\n") or b"0"
            count = int(line.split(b";")[0], 16)
            if not count:
                break
            if position + count > size_bytes:
                raise S3Error(HTTPStatus.BAD_REQUEST, "IncompleteBody", "more bytes than announced")
            self._fill(block.view(position, position + count))
            position += count
            self._until(b"\r\n")
        if position != size_bytes:
            raise S3Error(HTTPStatus.BAD_REQUEST, "IncompleteBody", f"{position} of {size_bytes} bytes")
        trailers: dict[str, str] = {}
        while text := self._until(b"\r\n"):
            name, _, value = text.decode("latin-1").partition(":")
            trailers[name.strip().lower()] = value.strip()
        return block, trailers

    def _until(self, end: bytes) -> bytes | None:
        """Receive up to `end`, which is dropped; None at the end of the stream."""
        while (found := self._ahead.find(end)) < 0:
            if len(self._ahead) > _MOST_HEAD_BYTES:
                raise S3Error(HTTPStatus.BAD_REQUEST, "RequestHeaderSectionTooLarge")
            more = self._stream.recv(_HEAD_BYTES)
            if not more:
                return None
            self._ahead += more
        line = bytes(self._ahead[:found])
        del self._ahead[: found + len(end)]
        return line

    def _fill(self, buffer: memoryview) -> None:
        """Receive exactly as many bytes as there is room for."""
        self.bytes_in += len(buffer)
        known = min(len(buffer), len(self._ahead))
        buffer[:known] = self._ahead[:known]
        del self._ahead[:known]
        buffer = buffer[known:]
        while buffer:
            count = self._stream.recv_into(buffer, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the client has gone in the middle of a body")
            buffer = buffer[count:]

    def _send(self, pieces: Iterable[memoryview | bytes]) -> None:
        pending = [memoryview(piece) for piece in pieces]
        while pending:
            count = self._stream.sendmsg(pending[:_MOST_VIEWS])
            self.bytes_out += count
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]
