"""Training jobs on an S3 emulator, and the fresh process that looks at what they left.

Every process is forked from one that has torch and the client of S3 imported and runs no thread. The state is
a function of the step, so that a checkpoint is recognised by its values.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import nn

from ckpt_core import CheckpointManager, KeepLatest, TrainState
from ckpt_core.commit import Catalog, verify
from ckpt_core.names import OWN
from ckpt_core.storage import ObjectStorage, object_storage
from tests.reliability import forks
from tests.support.emulators import emulator
from tests.support.service_faults import ServiceControl, ServiceFault

BUCKET = "crashes"
MIB = 2**20
LARGE = 3 * MIB // 4
"""Columns of a float32 matrix with two rows: 6 MiB, more than one part of an upload."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """An emulator with faults, and a bucket in it."""

    endpoint: str

    @property
    def control(self) -> ServiceControl:
        """Of its faults."""
        return ServiceControl(self.endpoint)

    def storage(self, root: str, who: str = "rank0", *, request_seconds: float = 20.0) -> ObjectStorage:
        """A root; requests to it are signed with the access key `who`. Two tries, so that faults end soon."""
        return object_storage(
            f"s3://{BUCKET}/{root}",
            key=who,
            secret="testing",
            endpoint_url=self.endpoint,
            write_block_bytes=5 * MIB,
            request_seconds=request_seconds,
            config_kwargs={"retries": {"mode": "standard", "total_max_attempts": 2}},
        )


@contextmanager
def service() -> Generator[Service]:
    """A fresh emulator with an empty bucket, for as long as the context."""
    # Every child needs it, and it starts no thread.
    import botocore.session  # noqa: F401

    with emulator("s3") as endpoint:
        started = Service(endpoint=endpoint)
        client_of(started)  # it takes long to make, and children inherit it
        forks.forked(lambda _tell: client_of(started).create_bucket(Bucket=BUCKET))
        yield started


def state_of(step: int, columns: int = 8) -> TrainState:
    """Two tensors, so that each of two ranks has one to write; every value depends on the step."""
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(columns, 2, bias=False), nn.Linear(columns, 2, bias=False))
    return TrainState(model=model, rng=False)


def values(state: TrainState) -> list[float]:
    """A few sums that no other step has; `verify` compares every byte."""
    return [float(parameter.detach().double().sum()) for parameter in state.model.parameters()]


def litter(found: Service, root: str) -> None:
    """Leave what a job that was killed long ago would: objects without a marker, half an upload."""
    client = client_of(found)
    client.put_object(Bucket=BUCKET, Key=f"{root}/step-000000009/__0_0.distcp", Body=b"half")
    client.create_multipart_upload(Bucket=BUCKET, Key=f"{root}/step-000000008/__0_0.distcp")


def train(checkpoints: CheckpointManager, steps: Sequence[int], columns: int, tell: forks.Tell) -> None:
    """Resume, save each step and say so once it is committed."""
    checkpoints.resume(state_of(0, columns))
    for step in steps:
        handle = checkpoints.save(step, state_of(step, columns))
        assert handle is not None
        handle.result()
        tell(step)
    checkpoints.wait()


def inspect(found: Service, root: str, acknowledged: int, *, columns: int) -> int:
    """The step that a fresh process resumes from, 0 for none; raises where a promise is broken."""
    storage = found.storage(root)
    committed = Catalog(storage).committed()
    broken = {info.name: verify(storage, info.name) for info in committed}
    assert not any(broken.values()), f"a committed checkpoint is damaged: {broken}"
    state = state_of(0, columns)
    with CheckpointManager(storage, keep=KeepLatest(1), deadline_seconds=60) as checkpoints:
        step = checkpoints.resume(state) or 0
        assert step >= acknowledged, f"step {acknowledged} was acknowledged, {step} was resumed"
        if step:
            assert values(state) == values(state_of(step, columns)), f"step {step} holds other values"
        after = step + 100
        train(checkpoints, [after], columns, lambda _step: None)
        latest = checkpoints.latest()
        assert latest is not None, "what was saved next is gone"
        assert latest.step == after, f"step {after} was saved next, {latest.step} is found"
        assert checkpoints.verify() == [], "what was saved next is damaged"
    assert_clean(found, root, after)
    return step


def assert_clean(found: Service, root: str, kept: int) -> None:
    """Nothing is left in the root but the checkpoint of step `kept`, neither seen nor unseen."""
    client = client_of(found)
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{root}/")["Contents"]]
    ours = tuple(f"{root}/{name}" for name in (OWN, f"step-{kept:09d}/"))
    stray = [key for key in keys if not key.startswith(ours)]
    assert not stray, f"left over: {stray}"
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", [])
    begun = [upload["Key"] for upload in uploads if upload["Key"].startswith(f"{root}/")]
    assert not begun, f"uploads left over: {begun}"


def sweep_away(found: Service, root: str) -> None:
    """Delete all that is in a root, so that the emulator does not run out of memory."""
    client = client_of(found)
    for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{root}/").get("Contents", []):
        client.delete_object(Bucket=BUCKET, Key=entry["Key"])


def fault_at(root: str, **details: Any) -> ServiceFault:
    """A fault of requests that concern this root, listings included."""
    return ServiceFault(target=f"/{BUCKET}*{root}/*", **details)


@cache
def client_of(found: Service) -> Any:
    """A client with none of our code between it and the service; used in forked children only."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=found.endpoint,
        region_name="us-east-1",
        aws_access_key_id="inspector",
        aws_secret_access_key="testing",
    )
