"""Ranks that need the same bytes read them once, and come to the same checkpoint whoever finds the damage."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.serialization import set_crc32_options

from ckpt_core import CheckpointManager, LoadError
from ckpt_core.storage import LocalStorage, RangeReader
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

SHAPES = {"large": (1030, 1040), "tall": (60_000, 4), "small": (40, 30)}
TOTAL_BYTES = sum(4 * rows * columns for rows, columns in SHAPES.values())
LAYOUTS: dict[str, tuple[tuple[Placement, ...], tuple[Placement, ...], int]] = {
    "ddp": ((), (), 4),
    "hsdp": ((Replicate(), Shard(0)), (Replicate(), Shard(0)), 4),
    "fsdp to three ranks": ((Shard(0),), (Shard(0),), 3),
    "rows to columns": ((Shard(0),), (Shard(1),), 4),
    "sharded to replicated": ((Shard(0),), (Replicate(),), 4),
}


class Counting(LocalStorage):
    """Counts the bytes that are asked of data files."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.asked = 0
        self._guard = threading.Lock()

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        with super().open_ranges(key) as reader:
            yield _Counted(reader, self._count)

    def _count(self, size: int) -> None:
        with self._guard:
            self.asked += size


class _Counted:
    def __init__(self, reader: RangeReader, count: Any) -> None:
        self.size_bytes = reader.size_bytes
        self._reader = reader
        self._count = count

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._count(len(buffer))
        self._reader.read_into(offset, buffer)


def full(name: str) -> torch.Tensor:
    rows, columns = SHAPES[name]
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns) + len(name)


def state(placements: tuple[Placement, ...], *, empty: bool) -> dict[str, torch.Tensor]:
    made = {name: torch.full_like(full(name), -1) if empty else full(name) for name in SHAPES}
    if not placements:
        return made
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2) if len(placements) == 2 else (world,))
    return {
        name: distribute_tensor(each, mesh, list(placements), src_data_rank=None)
        for name, each in made.items()
    }


def save_job(root: str, saves: dict[str, tuple[Placement, ...]]) -> None:
    for layout, placements in saves.items():
        with CheckpointManager(Path(root) / layout) as checkpoints:
            for step in (1, 2):
                checkpoints.save(step, state(placements, empty=False))
                checkpoints.wait()


def load_job(
    root: str, loads: dict[str, tuple[Placement, ...]], options: list[dict[str, Any]]
) -> dict[str, list[tuple[int, bool]]]:
    """For every layout and every set of options: bytes asked for, and whether the values are right."""
    return {
        layout: [load(Path(root) / layout, live, each) for each in options] for layout, live in loads.items()
    }


def load(root: Path, placements: tuple[Placement, ...], options: dict[str, Any]) -> tuple[int, bool]:
    storage, live = Counting(root), state(placements, empty=True)
    with CheckpointManager(storage, **options) as checkpoints:
        checkpoints.load(live, step=2)
    whole = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in live.items()}
    return storage.asked, all(torch.equal(each, full(name)) for name, each in whole.items())


OPTIONS: list[dict[str, Any]] = [{"verify": "off"}, {"verify": "read"}]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    made = tmp_path_factory.mktemp("roots")
    run_ranks(save_job, 4, str(made), {layout: saved for layout, (saved, _, _) in LAYOUTS.items()})
    return made


@pytest.fixture(scope="module")
def asked(root):
    """Layout -> for each of the options, bytes that all ranks asked for, per byte of the checkpoint."""
    found: dict[str, list[float]] = {}
    for world in (3, 4):
        loads = {layout: live for layout, (_, live, ranks) in LAYOUTS.items() if ranks == world}
        of_ranks = run_ranks(load_job, world, str(root), loads, OPTIONS)
        for layout in loads:
            for number in range(len(OPTIONS)):
                pairs = [of_rank[layout][number] for of_rank in of_ranks]
                assert all(right for _, right in pairs), (layout, OPTIONS[number])
                found.setdefault(layout, []).append(sum(count for count, _ in pairs) / TOTAL_BYTES)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "hsdp", "sharded to replicated"])
def test_what_several_ranks_hold_is_read_by_one(asked, layout):
    unverified, verified = asked[layout]
    assert unverified <= 1.05
    # To verify it and to bring it, and what lies around the tensors.
    assert verified <= 2.1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "at_most"),
    [
        ("fsdp to three ranks", (1.05, 2.6)),  # blocks at the seams are verified by both neighbours
        ("rows to columns", (4.05, 8.1)),  # what lies between two rows of a column is read, too
    ],
)
def test_parts_that_overlap_after_a_reshard_are_read_by_each_rank(asked, layout, at_most):
    unverified, verified = asked[layout]
    assert unverified <= at_most[0]
    assert verified <= at_most[1]


def resume_job(roots: list[str]) -> list[tuple[int | None, float]]:
    found: list[tuple[int | None, float]] = []
    for root in roots:
        live = state((Shard(0),), empty=True)
        with CheckpointManager(root) as checkpoints:
            step = checkpoints.resume(live)
        found.append((step, float(live["small"].to_local().sum())))
    return found


@pytest.mark.slow
def test_damage_that_one_rank_finds_makes_all_take_the_checkpoint_before(root, tmp_path):
    roots = []
    for name in ("__2_0.distcp", "chunks-00001.json.z", ".metadata"):
        copy = tmp_path / name.strip(".")
        shutil.copytree(root / "fsdp to three ranks", copy)
        path = copy / "step-000000002" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        roots.append(str(copy))
    of_ranks = run_ranks(resume_job, 4, roots)
    for number in range(len(roots)):
        assert [found[number][0] for found in of_ranks] == [1] * 4
        assert sum(found[number][1] for found in of_ranks) == float(full("small").sum())


def failing_job(root: str) -> str:
    """Rank 1 cannot read: neither what it needs alone nor what rank 0 waits for."""
    live = state((), empty=True) | {
        f"own {name}": each for name, each in state((Shard(0),), empty=True).items()
    }
    fault = Fault(method="read_into", key="*.distcp", error=OSError(errno.ESTALE, "gone"))
    storage = FaultyStorage(LocalStorage(root), [fault] if dist.get_rank() == 1 else [])
    with CheckpointManager(storage, verify="off", deadline_seconds=600) as checkpoints:
        try:
            checkpoints.load(live, step=1)
        except LoadError as error:
            return str(error)
    return ""


def failing_save(root: str) -> None:
    live = state((), empty=False) | {
        f"own {name}": each for name, each in state((Shard(0),), empty=False).items()
    }
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, live)


@pytest.mark.slow
def test_a_rank_that_cannot_read_leaves_nobody_waiting(tmp_path):
    run_ranks(failing_save, 2, str(tmp_path))
    told = run_ranks(failing_job, 2, str(tmp_path), timeout_seconds=90)
    assert told[0] == told[1]
    assert "partly overwritten" in told[0]
    assert "gone" in told[0]


def differing_job(root: str) -> bool:
    """Rank 1 has a tensor more than the others."""
    live = {
        name: torch.full_like(full(name), -1) for name in SHAPES if name != "tall" or dist.get_rank() == 1
    }
    with CheckpointManager(root) as checkpoints:
        checkpoints.load(live, step=2, strict=False)
    return all(torch.equal(each, full(name)) for name, each in live.items())


def stages_job(root: str) -> tuple[int, bool]:
    """Of a model that is sharded and replicated, rank 1 alone holds a part that is not."""
    storage, live = Counting(Path(root)), state((Replicate(), Shard(0)), empty=True)
    own = live.pop("small")
    if dist.get_rank() == 1:
        live["small"] = torch.full_like(full("small"), -1)
    with CheckpointManager(storage, verify="off") as checkpoints:
        checkpoints.load(live, step=2, strict=False)
    right = all(
        torch.equal(each.full_tensor() if isinstance(each, DTensor) else each, full(name))
        for name, each in sorted(live.items(), key=lambda item: not isinstance(item[1], DTensor))
    )
    return storage.asked, right and isinstance(own, DTensor)


@pytest.mark.slow
def test_what_one_rank_holds_alone_keeps_no_others_from_reading_once(root):
    found = run_ranks(stages_job, 4, str(root / "hsdp"))
    assert all(right for _, right in found)
    assert sum(count for count, _ in found) <= 1.05 * TOTAL_BYTES


@pytest.mark.slow
def test_ranks_that_do_not_hold_the_same_each_read_for_themselves(root):
    assert run_ranks(differing_job, 3, str(root / "ddp")) == [True] * 3


THEIRS = {
    "one without a checksum": {"a": 8, "b": 0.03},
    "several with one checksum each": {"a": 5, "b": 10, "c": 5},
}


def theirs(name: str) -> dict[str, torch.Tensor]:
    return {
        key: torch.arange(int(size * (1 << 18)), dtype=torch.float32) for key, size in THEIRS[name].items()
    }


def balance_job(root: str) -> list[tuple[int, bool]]:
    found: list[tuple[int, bool]] = []
    for name in THEIRS:
        storage, live = (
            Counting(Path(root)),
            {key: torch.zeros_like(each) for key, each in theirs(name).items()},
        )
        with CheckpointManager(storage, verify="off") as checkpoints:
            checkpoints.load(live, name=name)
        found.append((storage.asked, all(torch.equal(live[key], each) for key, each in theirs(name).items())))
    return found


def test_what_one_process_saved_is_read_by_all_ranks_in_equal_shares(tmp_path):
    for name in THEIRS:
        set_crc32_options(compute_crc32="without" not in name)
        try:
            dcp.save(theirs(name), checkpoint_id=tmp_path / name, no_dist=True)
        finally:
            set_crc32_options(compute_crc32=True)
    of_ranks = run_ranks(balance_job, 2, str(tmp_path))
    for shares in zip(*of_ranks, strict=True):
        assert all(right for _, right in shares)
        least, most = sorted(asked for asked, _ in shares)
        assert most <= 1.05 * least
