"""Clients without a format: what the bytes cost alone."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, final

from typing_extensions import override

from benchmarks.buckets.clients import BucketTask, ByteClient
from benchmarks.contenders import Kind
from benchmarks.others import imported
from benchmarks.s3 import Server

_MIB = 1 << 20
_RANGE_BYTES = 8 * _MIB
_THREADS = 8


def obstore_of(server: Server) -> Any:
    """The bucket as a store of obstore."""
    return imported("obstore.store").S3Store(
        server.bucket,
        endpoint=server.url,
        access_key_id="bench",
        secret_access_key="bench-secret",
        region="us-east-1",
        client_options={"allow_http": True},
    )


class _Obstore(ByteClient):
    kind: ClassVar[Kind] = "limit"

    def __init__(self, task: BucketTask) -> None:
        super().__init__(task)
        self._obstore = imported("obstore")
        self._store = obstore_of(task.server)

    @override
    def put(self, key: str, content: memoryview) -> None:
        self._obstore.put(self._store, key, content)


@final
class BareObstore(_Obstore):
    """`obstore.put`, and `obstore.get_range` on threads, copied into the live tensors."""

    key = "obstore"
    name = "obstore put / get_range x 8"

    @override
    def get(self, key: str) -> None:
        def fetch(start: int) -> None:
            stop = min(start + _RANGE_BYTES, self.task.size_bytes)
            content = self._obstore.get_range(self._store, key, start=start, end=stop)
            self.task.deliver(start, memoryview(content))

        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(fetch, range(0, self.task.size_bytes, _RANGE_BYTES)))


@final
class BareObstoreWhole(_Obstore):
    """`obstore.get` of the whole object, in one stream, then copied into the live tensors."""

    key = "obstore-get"
    name = "obstore get, one stream"
    ways = ("load",)
    passing_copies = 1

    @override
    def get(self, key: str) -> None:
        self.task.deliver(0, memoryview(self._obstore.get(self._store, key).bytes()))


@final
class S3fsFile(ByteClient):
    """A file of s3fs, written and read at once, as its documentation shows."""

    key = "s3fs"
    name = "s3fs, one file"
    kind: ClassVar[Kind] = "other"
    passing_copies = 1

    def __init__(self, task: BucketTask) -> None:
        super().__init__(task)
        self._files = imported("s3fs").S3FileSystem(**task.server.storage_options)

    @override
    def put(self, key: str, content: memoryview) -> None:
        with self._files.open(f"{self.task.server.bucket}/{key}", "wb") as file:
            file.write(content)

    @override
    def get(self, key: str) -> None:
        self.task.deliver(0, memoryview(self._files.cat_file(f"{self.task.server.bucket}/{key}")))


@final
class S5cmd(ByteClient):
    """`s5cmd cp` of a file in the page cache, and back into one; nothing is fsynced."""

    key = "s5cmd"
    name = "s5cmd cp, from and to a file"
    kind: ClassVar[Kind] = "other"

    def __init__(self, task: BucketTask) -> None:
        super().__init__(task)
        imported("s5cmd")

    @property
    def _file(self) -> Path:
        return self.task.live.root / "s5cmd.bytes"

    @override
    def prepare(self) -> None:
        super().prepare()
        self._file.write_bytes(self.task.content)

    @override
    def put(self, key: str, content: memoryview) -> None:
        self._copy(self._file, f"s3://{self.task.server.bucket}/{key}")

    @override
    def get(self, key: str) -> None:
        self._copy(f"s3://{self.task.server.bucket}/{key}", self._back)

    @override
    def check(self) -> None:
        self.task.deliver(0, memoryview(self._back.read_bytes()))
        self._back.unlink()
        super().check()

    @property
    def _back(self) -> Path:
        return self._file.with_suffix(".back")

    def _copy(self, source: Path | str, target: Path | str) -> None:
        command = ["s5cmd", "--endpoint-url", self.task.server.url, "cp", str(source), str(target)]
        environment = {**os.environ, **self.task.server.environment}
        subprocess.run(command, check=True, capture_output=True, env=environment)
