"""What takes part: saves whose checkpoint ends up in the object store, through a local disk or not."""

from __future__ import annotations

import os
import shutil
from abc import abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast, final

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from typing_extensions import override

from benchmarks.buckets.bare import obstore_of
from benchmarks.contenders import Contender, InFlight, Kind, Task, ended
from benchmarks.loading.loader import raw_bytes
from benchmarks.others import imported, in_background
from benchmarks.s3 import Server
from ckpt_core import CheckpointManager, Upload
from ckpt_core.storage import open_storage
from ckpt_core.types import CapturedState

SERVER = "server"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TierFlight:
    """A save after its call: `local` if a local disk has it first, `uploaded` if a bucket gets it."""

    local: Future[Any] | None
    uploaded: Future[Any] | None

    @property
    def last(self) -> Future[Any]:
        """The end of everything."""
        return self.uploaded or self.local or ended()


class TierSaver(Contender):
    """Saves one state over and over; the bucket's server is among what all share."""

    @property
    def server(self) -> Server:
        """The server of the bucket."""
        return cast("Server", self.task.shared[SERVER])

    def url(self, number: int) -> str:
        """Where save `number` goes in the bucket."""
        return f"s3://{self.server.bucket}/{self.key}/step-{number}"

    @abstractmethod
    def save(self, number: int) -> TierFlight:
        """Begin save `number`; returns when the training may go on."""

    def start(self, number: int) -> InFlight:
        """Begin a save that is over when every tier has it."""
        return InFlight(durable=self.save(number).last)

    def clean(self, number: int) -> None:
        """Delete save `number` in both tiers."""
        shutil.rmtree(self.directory(number), ignore_errors=True)
        library, store = imported("obstore"), obstore_of(self.server)
        for page in library.list(store, f"{self.key}/"):
            library.delete(store, [each["path"] for each in page if "/step-" in each["path"]])


class _Ours(TierSaver):
    """`CheckpointManager` on the local disk."""

    kind: ClassVar[Kind] = "ours"
    copies: ClassVar[int] = 1
    bandwidth: ClassVar[str | None] = None
    uploads: ClassVar[bool] = True

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        upload = self.upload(f"s3://{self.server.bucket}/{self.key}")
        self._manager = CheckpointManager(task.root / self.key, upload=upload if self.uploads else None)
        self._captured = CapturedState(
            sharded={"": {"model": task.tensors}},
            stable=list(task.tensors.values()),
            optimizers=list(task.optimizers),
        )
        self._names: dict[int, str] = {}

    def upload(self, url: str) -> Upload:
        """The tier behind the disk."""
        return Upload(url, bandwidth=self.bandwidth, storage_options=self.server.storage_options)

    @override
    def save(self, number: int) -> TierFlight:
        handle = self._manager.save(number, self._captured)
        assert handle is not None
        self._names[number] = handle.name
        return TierFlight(local=handle.committed, uploaded=handle.uploaded if self.uploads else None)

    @override
    def clean(self, number: int) -> None:
        self._manager.wait()
        if number in self._names:
            shutil.rmtree(self.task.root / self.key / self._names.pop(number), ignore_errors=True)
        super().clean(number)

    @override
    def close(self) -> None:
        self._manager.close()


@final
class OursTiers(_Ours):
    """Uploaded as fast as it goes."""

    key = "ours-tiers"
    name = "ckpt-suite, disk, then upload"


@final
class OursTiersThread(_Ours):
    """Uploaded by threads of the training's process, as everything that another process cannot reach."""

    key = "ours-tiers-thread"
    name = "ckpt-suite, upload by threads"

    @override
    def upload(self, url: str) -> Upload:
        return Upload(open_storage(url, self.server.storage_options))


@final
class OursTiersLimited(_Ours):
    """Uploaded at no more than 100 MB/s."""

    key = "ours-tiers-100"
    name = "ckpt-suite, upload at 100 MB/s"
    bandwidth = "100 MB/s"


@final
class OursDiskOnly(_Ours):
    """Without an upload."""

    key = "ours-disk"
    name = "ckpt-suite, disk only"
    uploads = False


class _DcpAsync(TierSaver):
    """`dcp.async_save` straight to the bucket, as it comes: a thread, and a new stager every time."""

    passing_copies = 1

    def writer(self, url: str) -> Any:
        """Where DCP writes."""
        raise NotImplementedError

    @override
    def save(self, number: int) -> TierFlight:
        state = {"model": dict(self.task.tensors)}
        response = dcp.async_save(state, storage_writer=self.writer(self.url(number)), no_dist=True)
        uploaded = response if isinstance(response, Future) else response.upload_completion
        return TierFlight(local=None, uploaded=uploaded)


@final
class DcpFsspecAsync(_DcpAsync):
    """With DCP's `FsspecWriter`, over s3fs."""

    key = "dcp-fsspec"
    name = "dcp.async_save, FsspecWriter"
    kind = "stock"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        imported("s3fs")
        self._files = imported("torch.distributed.checkpoint._fsspec_filesystem")

    @override
    def writer(self, url: str) -> Any:
        return self._files.FsspecWriter(url, **self.server.storage_options)


@final
class DcpS3TorchAsync(_DcpAsync):
    """With `S3StorageWriter` of s3torchconnector."""

    key = "s3torchconnector"
    name = "dcp.async_save, s3torchconnector"
    kind = "other"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._library = imported("s3torchconnector.dcp")
        config = imported("s3torchconnector").S3ClientConfig(force_path_style=True)
        self._where = {"region": "us-east-1", "s3client_config": config}
        # The client of AWS takes credentials, and the writer the endpoint, from the environment only.
        os.environ.update(self.server.environment)

    @override
    def writer(self, url: str) -> Any:
        return self._library.S3StorageWriter(path=url, **self._where)


@final
class S3fsTorchSave(TierSaver):
    """`torch.save` into a file of s3fs; all of it is a stall."""

    key = "s3fs"
    name = "torch.save to s3fs"
    kind = "other"
    passing_copies = 1

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._files = imported("s3fs").S3FileSystem(**self.server.storage_options)

    @override
    def save(self, number: int) -> TierFlight:
        with self._files.open(self.url(number), "wb") as file:
            torch.save(dict(self.task.tensors), file)
        return TierFlight(local=None, uploaded=ended())


@final
class BarePut(TierSaver):
    """`obstore.put` of as many bytes, copied before: what any upload costs its neighbour."""

    key = "obstore"
    name = "obstore put, in the background"
    kind = "limit"
    copies = 1

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._library = imported("obstore")
        self._store = obstore_of(self.server)
        self._content = np.empty(0, dtype=np.uint8)

    @override
    def save(self, number: int) -> TierFlight:
        if not self._content.size:
            self._content = np.zeros(self.task.size_bytes, dtype=np.uint8)
        start = 0
        for tensor in self.task.tensors.values():
            self._content[start : start + tensor.nbytes] = raw_bytes(tensor).numpy()
            start += tensor.nbytes
        key = f"{self.key}/step-{number}"
        put = partial(self._library.put, self._store, key, self._content.data)
        return TierFlight(local=None, uploaded=in_background(put))
