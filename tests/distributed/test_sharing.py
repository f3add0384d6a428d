"""`relay_shared` on real ranks: everything arrives, and one that fails leaves nobody waiting."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from torch.distributed.tensor import Replicate, Shard

from ckpt_core.coordination import Coordinator, coordinator_for_job
from ckpt_core.loading.sharing import Cell, StoredTensor, make_schedule, relay_shared
from tests.kit.ranks import run_ranks
from tests.unit.loading.sharing import Layout, needed, stored, whole

pytestmark = pytest.mark.distributed

CELL, BUCKET, BLOCK = 1 << 12, 1 << 14, 1 << 10


def content(path: str, key: str, size: int) -> bytes:
    return random.Random(f"{path} {key}").randbytes(size)


def tensors(world: int) -> list[StoredTensor]:
    """Replicated, sharded and cut across; large ones and many small ones."""
    rows, columns = (Layout(mesh=(world,), placements=(Shard(dim),)) for dim in (0, 1))
    hybrid = Layout(mesh=(2, world // 2), placements=(Replicate(), Shard(0)))
    others = Layout(mesh=(3,), placements=(Shard(0),))
    return [
        stored("ddp", (100, 90), live=whole(world), saved=whole(1), block_bytes=BLOCK),
        stored("hybrid", (101, 50), live=hybrid, saved=rows, block_bytes=BLOCK),
        stored("reshard", (101, 50), live=rows, saved=others, block_bytes=BLOCK),
        stored("turned", (64, 66), live=columns, saved=rows, block_bytes=BLOCK),
        stored("stock", (64, 66), live=columns, saved=rows, block_bytes=None),
        *(stored(f"step {number}", (), live=whole(world), saved=whole(1)) for number in range(50)),
    ]


@dataclass
class Rank:
    """Reads what it is told to from made-up files, and keeps what it is given."""

    fail_reading_after: int | None = None
    fail_at: str | None = None
    reads: int = 0
    reading_threads: set[int] = field(default_factory=set)
    came: dict[tuple[str, str], Any] = field(default_factory=dict)

    def read(self, wanted: Sequence[tuple[Cell, memoryview]]) -> None:
        self.reading_threads.add(threading.get_ident())
        if self.reads == self.fail_reading_after:
            raise OSError("the disk is gone")
        self.reads += 1
        for cell, memory in wanted:
            payload = cell.payload
            memory[:] = content(payload.path, payload.key, payload.size_bytes)[cell.start : cell.stop]

    def deliver(self, cell: Cell, memory: memoryview) -> None:
        if cell.name == self.fail_at:
            raise RuntimeError("the device is gone")
        payload = cell.payload
        entry = np.full(payload.size_bytes, -1)
        entry = self.came.setdefault((cell.name, payload.path), entry)
        assert (entry[cell.start : cell.stop] == -1).all(), "delivered twice"
        entry[cell.start : cell.stop] = memory


Failing = dict[int, dict[str, Any]]
"""Rank -> how it fails."""

SCENARIOS: dict[str, Failing] = {
    "nobody": {},
    "first bucket": {1: {"fail_reading_after": 0}},
    "second bucket": {1: {"fail_reading_after": 1}},
    "two owners": {0: {"fail_reading_after": 0}, 1: {"fail_reading_after": 1}},
    "a member": {1: {"fail_at": "ddp"}},
}


def all_scenarios() -> dict[str, tuple[str, str, Any]]:
    coordinator = coordinator_for_job(deadline_seconds=60)
    found = {name: shares(coordinator, failing) for name, failing in SCENARIOS.items()}
    coordinator.close()
    return found


def shares(coordinator: Coordinator, failing: Failing) -> tuple[str, str, Any]:
    stored_tensors = tensors(coordinator.world_size)
    schedule = make_schedule(stored_tensors, coordinator.rank, cell_bytes=CELL, bucket_bytes=BUCKET)
    assert sum(coordinator.gather(schedule.consistency)) % 2**64 == 0
    rank = Rank(**failing.get(coordinator.rank, {}))
    try:
        relay_shared(schedule, coordinator, read=rank.read, deliver=rank.deliver)
        found = ("nothing", "", None)
    except Exception as error:
        found = (type(error).__name__, str(error), getattr(error, "failures", None))
    # Nobody is left behind: the ranks can still talk.
    assert coordinator.gather(coordinator.rank) == list(range(coordinator.world_size))
    if not failing:
        assert rank.reads == len(schedule.own_buckets()) > 1
        assert threading.get_ident() not in rank.reading_threads
        check(rank, schedule.private, stored_tensors, coordinator.rank)
    return found


def check(rank: Rank, private: Sequence[Cell], stored_tensors: Sequence[StoredTensor], number: int) -> None:
    """Every needed byte has come, and is the one that lies in the file."""
    for cell in private:
        text = content(cell.payload.path, cell.payload.key, cell.payload.size_bytes)
        rank.deliver(cell, memoryview(text)[cell.start : cell.stop])
    for tensor in stored_tensors:
        for row, mask in needed(tensor, number).items():
            payload = tensor.payload(row)
            expected = np.frombuffer(content(payload.path, payload.key, payload.size_bytes), dtype=np.uint8)
            assert (rank.came[tensor.name, payload.path][mask] == expected[mask]).all()


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def shared(request):
    """What each rank told of each scenario; that all scenarios were gone through is half of every test."""
    return run_ranks(all_scenarios, request.param)


def test_every_needed_byte_is_delivered_once_to_every_member(shared):
    assert [found["nobody"] for found in shared] == [("nothing", "", None)] * len(shared)


@pytest.mark.parametrize("scenario", ["first bucket", "second bucket"])
def test_an_owner_that_cannot_read_is_told_to_all_members_and_nobody_hangs(shared, scenario):
    assert shared[1][scenario] == ("OSError", "the disk is gone", None)
    for rank in set(range(len(shared))) - {1}:
        kind, text, failures = shared[rank][scenario]
        assert kind == "CoordinationError"
        assert failures == {1: "OSError: the disk is gone"}
        assert text.startswith(f"rank {rank}: other ranks could not read its data: rank 1")


def test_several_owners_that_cannot_read_are_all_told(shared):
    assert [found["two owners"][0] for found in shared[:2]] == ["OSError", "OSError"]
    for found in shared[2:]:
        assert found["two owners"][2] == dict.fromkeys((0, 1), "OSError: the disk is gone")


def test_a_member_that_cannot_take_what_it_is_given_fails_alone_and_nobody_hangs(shared):
    kinds = [found["a member"][0] for found in shared]
    assert kinds == ["nothing", "RuntimeError", *["nothing"] * (len(shared) - 2)]
