"""Serve S3 from memory until interrupted.

    python -m benchmarks.s3.server --port 9000 --bucket bench

prints its URL. Any credentials are accepted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from typing import Any

from benchmarks.s3.blocks import Pool
from benchmarks.s3.process import BUCKET, COUNTERS_PATH
from benchmarks.s3.service import Service
from benchmarks.s3.wire import Connection

_MOST_FREE_BYTES = 6 << 30


class _Listener:
    """Accepts connections and serves each on a thread of its own."""

    def __init__(self, port: int, service: Service) -> None:
        self._service = service
        self._pool = Pool(_MOST_FREE_BYTES)
        self._connections: list[Connection] = []
        self._socket = socket.create_server(("127.0.0.1", port), backlog=512)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        """Accept for ever."""
        while True:
            stream, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=[stream], daemon=True).start()

    def _serve(self, stream: socket.socket) -> None:
        with stream, suppress(ConnectionError):
            connection = Connection(stream, self._pool)
            self._connections.append(connection)
            while (request := connection.receive()) is not None:
                if request.path == COUNTERS_PATH:
                    text = json.dumps(self._counters()).encode()
                    connection.answer(HTTPStatus.OK, {}, [text], size_bytes=len(text))
                else:
                    self._service.serve(connection, request)

    def _counters(self) -> dict[str, Any]:
        return {
            "requests": dict(self._service.requests),
            "bytes_in": sum(each.bytes_in for each in self._connections),
            "bytes_out": sum(each.bytes_out for each in self._connections),
            "cpu_s": time.process_time(),
        }


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.s3.server", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--bucket", action="append", help=f"name; may be repeated (default {BUCKET})")
    parser.add_argument("--verify", action="store_true", help="compare CRC-32 and SHA-256 of bodies")
    parser.add_argument("--until-eof", action="store_true", help="end when standard input ends")
    options = parser.parse_args()
    listener = _Listener(options.port, Service(options.bucket or [BUCKET], verifies=options.verify))
    print(listener.url, flush=True)
    if options.until_eof:
        threading.Thread(target=_exit_at_eof, daemon=True).start()
    with suppress(KeyboardInterrupt):
        listener.run()


def _exit_at_eof() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
