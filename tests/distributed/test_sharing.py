"""`Reads.relay` on real ranks: everything arrives, and one that fails leaves nobody waiting."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any
from zlib import crc32

import pytest
import torch

from ckpt_core.coordination import Coordinator, coordinator_for_job
from ckpt_core.dcp import TensorRead, TensorTarget
from ckpt_core.loading._reads import Bucket, Reads, dealt
from ckpt_core.reading import Engine, Payload
from ckpt_core.testing import Fault, FaultyStorage, Operation
from tests.kit.memory import MemoryStorage
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

MIB = 1 << 20
NAME = "__0_0.distcp"
GONE = OSError(errno.ENODEV, "the disk is gone")
TOLD = f"[Errno {errno.ENODEV}] the disk is gone: 'memory:///{NAME}'"

Failing = dict[int, Any]
"""Rank -> number of the read that fails there, or the dtype of a tensor that nothing can be copied into."""

SCENARIOS: dict[str, Failing] = {
    "nobody": {},
    "first bucket": {1: 0},
    "second bucket": {1: 5},
    "two owners": {0: 0, 1: 5},
    "a member": {1: "a leaf"},
}


@cache
def made(size_bytes: int) -> bytes:
    """Once for all scenarios of a rank: to draw it takes longer than to share it."""
    return random.Random(7).randbytes(size_bytes)


def read(number: int, rows: int, columns: int, *, start: int, leaf: bool, content: bytes) -> TensorRead:
    """The right half of the columns of a chunk, or all of it."""
    size, half = rows * columns, columns // 2 if number % 2 else 0
    part = memoryview(content)[start : start + size]
    crcs = [crc32(part[at : at + MIB]) for at in range(0, size, MIB)]
    kind = torch.float32 if leaf else torch.uint8
    tensor = torch.zeros(rows, columns - half, dtype=kind, requires_grad=leaf)
    return TensorRead(
        name=f"t{number}",
        payload=Payload(path=NAME, key="k", offset=start, size_bytes=size, crc32=None, block_crcs=crcs),
        target=TensorTarget(shape=(rows, columns), dtype=torch.uint8, offsets=(0, half), tensor=tensor),
    )


def all_scenarios() -> dict[str, tuple[str, str, Any]]:
    coordinator = coordinator_for_job(deadline_seconds=60)
    found = {name: shares(coordinator, failing) for name, failing in SCENARIOS.items()}
    coordinator.close()
    return found


def shares(coordinator: Coordinator, failing: Failing) -> tuple[str, str, Any]:
    shapes = [(5_000, 2_000), (9 * coordinator.world_size * 1_000, 4_000), *[(1, 1)] * 50]
    content = made(sum(rows * columns for rows, columns in shapes))
    reads: list[TensorRead] = []
    how, start = failing.get(coordinator.rank), 0
    for number, (rows, columns) in enumerate(shapes):
        leaf = how == "a leaf" and number == 0
        reads.append(read(number, rows, columns, start=start, leaf=leaf, content=content))
        start += rows * columns
    storage, threads = MemoryStorage(), set[int]()
    storage.write_bytes(NAME, content)

    def note(_: Operation) -> None:
        threads.add(threading.get_ident())

    faults = [Fault(method="read_into", before=note)]
    if isinstance(how, int):
        faults.append(Fault(method="read_into", nth=how, error=GONE))
    members = tuple(range(coordinator.world_size))
    buckets: Sequence[Bucket] = sorted(dealt(members, reads), key=lambda bucket: bucket[:3])
    assert max(bucket.number for bucket in buckets if bucket.owner == coordinator.rank) > 0
    try:
        with Engine(FaultyStorage(storage, faults), "", threads=1) as engine:
            Reads(coordinator.rank, [], buckets).relay(coordinator, engine)
        found: tuple[str, str, Any] = ("nothing", "", None)
    except Exception as error:
        found = (type(error).__name__, str(error), getattr(error, "failures", None))
    # Nobody is left behind: the ranks can still talk.
    assert coordinator.gather(coordinator.rank) == list(members)
    assert threading.get_ident() not in threads
    if not failing:
        check(reads, content)
    return found


def check(reads: Sequence[TensorRead], content: bytes) -> None:
    """Every needed byte has come, and is the one that lies in the file."""
    whole = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    for each in reads:
        start, size = each.payload.offset, each.payload.size_bytes
        chunk = whole[start : start + size].reshape(each.target.shape)
        assert torch.equal(each.target.tensor, chunk[:, each.target.offsets[1] :])


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def shared(request):
    """What each rank told of each scenario; that all scenarios were gone through is half of every test."""
    return run_ranks(all_scenarios, request.param)


def test_every_needed_byte_is_delivered_once_to_every_member(shared):
    assert [found["nobody"] for found in shared] == [("nothing", "", None)] * len(shared)


@pytest.mark.parametrize("scenario", ["first bucket", "second bucket"])
def test_an_owner_that_cannot_read_is_told_to_all_members_and_nobody_hangs(shared, scenario):
    assert shared[1][scenario] == ("OSError", TOLD, None)
    for rank in set(range(len(shared))) - {1}:
        kind, text, failures = shared[rank][scenario]
        assert kind == "CoordinationError"
        assert failures == {1: f"OSError: {TOLD}"}
        assert text.startswith(f"rank {rank}: other ranks could not read its data: rank 1")


def test_several_owners_that_cannot_read_are_all_told(shared):
    assert [found["two owners"][0] for found in shared[:2]] == ["OSError", "OSError"]
    for found in shared[2:]:
        assert found["two owners"][2] == dict.fromkeys((0, 1), f"OSError: {TOLD}")


def test_a_member_that_cannot_take_what_it_is_given_fails_alone_and_nobody_hangs(shared):
    kinds = [found["a member"][0] for found in shared]
    assert kinds == ["nothing", "RuntimeError", *["nothing"] * (len(shared) - 2)]
