"""Clients with a format: ckpt-suite, and DCP over its writers for object stores."""

from __future__ import annotations

import os
from typing import Any, ClassVar, final

import torch.distributed.checkpoint as dcp
from typing_extensions import override

from benchmarks.buckets.clients import BucketClient, BucketTask
from benchmarks.contenders import Kind, NotRunError
from benchmarks.others import imported
from ckpt_core import CheckpointManager
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions
from ckpt_core.types import CapturedState


class _Ours(BucketClient):
    """`CheckpointManager`, staging and commit included; the manager is kept, as a training keeps it."""

    kind: ClassVar[Kind] = "ours"
    copies: ClassVar[int] = 1
    verify: ClassVar[str | None] = None

    def __init__(self, task: BucketTask) -> None:
        super().__init__(task)
        tensors = task.live.tensors
        self._captured = CapturedState(sharded={"": {"model": tensors}}, stable=list(tensors.values()))
        root = f"s3://{task.server.bucket}/{self.key}"
        options = {"storage_options": dict(task.server.storage_options), "verify": self.verify}
        try:
            self._manager = CheckpointManager(root, options=CheckpointOptions.from_mapping(options))
        except ConfigError as error:
            raise NotRunError(str(error)) from error

    @override
    def prepare(self) -> None:
        self._manager.prewarm(self._captured)

    @override
    def save(self, number: int) -> None:
        handle = self._manager.save(number, self._captured)
        assert handle is not None
        handle.committed.result()

    @override
    def load(self, number: int) -> None:
        assert self._manager.resume({"model": dict(self.task.live.tensors)}) == number

    @override
    def is_content(self, key: str) -> bool:
        # The root's lease and lineage stay.
        return "/step-" in key

    @override
    def close(self) -> None:
        self._manager.close()


@final
class OursDefault(_Ours):
    """As it comes."""

    key = "ours"
    name = "ckpt-suite"


@final
class OursRead(_Ours):
    """What is loaded is verified before anything live changes."""

    key = "ours-read"
    name = 'ckpt-suite, verify="read"'
    verify = "read"
    ways = ("load",)


class _Dcp(BucketClient):
    """`dcp.save` and `dcp.load`; nothing is verified."""

    def writer(self, url: str) -> Any:
        """Where `dcp.save` writes."""
        raise NotImplementedError

    def reader(self, url: str) -> Any:
        """Where `dcp.load` reads."""
        raise NotImplementedError

    @override
    def save(self, number: int) -> None:
        state = {"model": dict(self.task.live.tensors)}
        dcp.save(state, storage_writer=self.writer(self.url(number)), no_dist=True)

    @override
    def load(self, number: int) -> None:
        state = {"model": dict(self.task.live.tensors)}
        dcp.load(state, storage_reader=self.reader(self.url(number)), no_dist=True)


@final
class DcpFsspec(_Dcp):
    """With DCP's own `FsspecWriter` and `FsspecReader`, over s3fs."""

    key = "dcp-fsspec"
    name = "DCP, FsspecWriter / Reader"
    kind: ClassVar[Kind] = "stock"
    passing_copies = 1

    def __init__(self, task: BucketTask) -> None:
        super().__init__(task)
        imported("s3fs")
        self._files = imported("torch.distributed.checkpoint._fsspec_filesystem")

    @override
    def writer(self, url: str) -> Any:
        return self._files.FsspecWriter(url, **self.task.server.storage_options)

    @override
    def reader(self, url: str) -> Any:
        return self._files.FsspecReader(url, **self.task.server.storage_options)


@final
class DcpS3Torch(_Dcp):
    """With `S3StorageWriter` and `S3StorageReader` of s3torchconnector."""

    key = "s3torchconnector"
    name = "DCP, s3torchconnector"
    kind: ClassVar[Kind] = "other"
    passing_copies = 1

    def __init__(self, task: BucketTask) -> None:
        super().__init__(task)
        self._library = imported("s3torchconnector.dcp")
        config = imported("s3torchconnector").S3ClientConfig(force_path_style=True)
        self._where = {"region": "us-east-1", "s3client_config": config}
        # The client of AWS takes credentials, and the writer the endpoint, from the environment only.
        os.environ.update(task.server.environment)

    @override
    def writer(self, url: str) -> Any:
        return self._library.S3StorageWriter(path=url, **self._where)

    @override
    def reader(self, url: str) -> Any:
        return self._library.S3StorageReader(path=url, **self._where)
