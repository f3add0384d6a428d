"""Every placement over ranks, even, uneven and empty, saved and read back by us and by stock DCP."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_core import CheckpointManager
from ckpt_core.errors import SaveError
from tests.kit.ranks import run_ranks
from tests.unit.dcp.tensors import content, filled

pytestmark = pytest.mark.distributed

STAGINGS = ("blocking", "overlapped")
SHAPES = [(8, 6), (7, 5), (3, 9), (1, 1), (5,), (1,), (0, 4), (2, 0)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64]
ON_ONE: list[tuple[Placement, ...]] = [(Shard(0),), (Shard(1),), (Replicate(),)]
ON_TWO: list[tuple[Placement, ...]] = [
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Shard(0), Shard(0)),
    (Shard(1), Shard(1)),
    (Replicate(), Replicate()),
]


def placed(full: torch.Tensor, mesh: Any, placements: tuple[Placement, ...]) -> torch.Tensor:
    # The bytes are what is scattered, for most of the dtypes know no collective.
    wide = full.view(torch.uint8).reshape(*full.shape, full.itemsize)
    scattered = distribute_tensor(wide, mesh, list(placements), src_data_rank=None)
    local = scattered.to_local().clone()
    local = (
        local.reshape(*local.shape[:-1], -1).view(full.dtype)
        if local.numel()
        else full.new_empty(local.shape)
    )
    return DTensor.from_local(
        local.reshape(scattered.to_local().shape[:-1]), mesh, list(placements),
        run_check=False, shape=full.shape, stride=full.stride(),
    )  # fmt: skip


def wholes() -> dict[str, torch.Tensor]:
    pairs = [(torch.float32, shape) for shape in SHAPES] + [(dtype, (7, 5)) for dtype in DTYPES]
    return {f"{dtype} {shape}": filled(dtype, shape) for dtype, shape in pairs}


def dtensors(mesh: Any) -> dict[str, dict[str, torch.Tensor]]:
    """By placement and kind."""
    made: dict[str, dict[str, torch.Tensor]] = {}
    for placements in ON_ONE if mesh.ndim == 1 else ON_TWO:
        made[str(placements)] = {
            name: placed(full, mesh, placements)
            for name, full in wholes().items()
            if not any(each.is_shard() and each.dim >= full.ndim for each in placements)
        }
    return made


def sharded(dtype: torch.dtype) -> tuple[ShardedTensor, torch.Tensor]:
    """Rows split unevenly over the ranks, in two pieces on the first; and the whole."""
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = filled(dtype, (2 * world + 3, 3))
    bounds = [(0, 1), (1, 4)] if rank == 0 else [(2 + 2 * rank, 4 + 2 * rank)]
    if rank == world - 1:
        bounds = [(bounds[0][0], len(whole))]
    shards = [
        LocalShard.from_tensor_and_offsets(whole[start:end].clone(), [start, 0], rank)
        for start, end in bounds
    ]
    return init_from_local_shards(shards, *whole.shape), whole


def locals_of(value: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


def flat(tree: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {name: leaf for key, each in tree.items() for name, leaf in flat(each, f"{prefix}/{key}").items()}


def clear(tree: Any) -> None:
    for value in flat(tree).values():
        for local in locals_of(value):
            local.view(torch.uint8).zero_() if local.numel() else None


def held(tree: Any) -> dict[str, list[bytes]]:
    return {name: [content(local) for local in locals_of(value)] for name, value in flat(tree).items()}


def round_trips(root: Path, tree: dict[str, Any]) -> None:
    """Saved in either way of staging; read back by us and by stock DCP into the same placements."""
    before = held(tree)
    for staging in STAGINGS:
        with CheckpointManager(root / staging, staging=staging, deadline_seconds=60) as checkpoints:
            checkpoints.save(1, tree)
            checkpoints.wait()
            clear(tree)
            checkpoints.load(tree)
            assert held(tree) == before, staging
            clear(tree)
            dcp.load(tree, checkpoint_id=root / staging / "step-000000001")
            assert held(tree) == before, staging
        dist.barrier()


def kinds(root: Path) -> None:
    world = dist.get_world_size()
    flat_mesh = init_device_mesh("cpu", (world,))
    tree: dict[str, Any] = {
        "dtensor": dtensors(flat_mesh),
        "sharded": {str(dtype): sharded(dtype)[0] for dtype in DTYPES},
        "plain": wholes(),
    }
    if world == 4:
        tree["two"] = dtensors(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))
    round_trips(root, tree)


def is_whole(root: Path, merged: Path) -> None:
    """What stock DCP makes of it in one process: every entry in full, whatever its placement."""
    for staging in STAGINGS:
        dcp_to_torch_save(root / staging / "step-000000001", merged)
        found = torch.load(merged, weights_only=True)
        for part in (found["dtensor"], found.get("two", {}), {"": found["plain"]}):
            for entries in part.values():
                for name, value in entries.items():
                    assert content(value) == content(wholes()[name]), name
        for name, value in found["sharded"].items():
            dtype = getattr(torch, name.removeprefix("torch."))
            assert content(value) == content(filled(dtype, tuple(value.shape))), name


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_placement_is_saved_and_read_back_bit_for_bit(tmp_path, world):
    run_ranks(kinds, world, tmp_path, timeout_seconds=200)
    is_whole(tmp_path, tmp_path / "merged.pt")


def refused(root: Path) -> list[str]:
    """What is told of a sum that was not made, and of a shard that is no box."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    summand = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    combed = DTensor.from_local(
        torch.ones(4), mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=(8,), stride=(1,)
    )  # fmt: skip
    told = []
    for step, (staging, tensor) in enumerate(product(STAGINGS, (summand, combed))):
        with CheckpointManager(root / str(step), staging=staging, deadline_seconds=60) as checkpoints:
            try:
                checkpoints.save(step, {"grad": {"w": tensor}})
            except SaveError as error:
                told.append(str(error))
    return told


@pytest.mark.slow
def test_what_has_no_value_or_no_place_is_refused_by_name_on_every_rank(tmp_path):
    for told in run_ranks(refused, 2, tmp_path, timeout_seconds=100):
        assert len(told) == 2 * len(STAGINGS)
        assert all("grad.w is placed as" in each and "redistribute()" in each for each in told[::2])
        assert all("chunks of 'grad.w'" in each and "overlap" in each for each in told[1::2])


def fsdp2_tp(root: Path) -> None:
    """FSDP2 over tensor parallelism: _StridedShard, with sizes that neither dimension divides."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for width in (8, 10, 7, 3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 5))
        full = {name: value.detach().clone() for name, value in net.state_dict().items()}
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
        tree = {name: value.detach() for name, value in net.state_dict().items()}
        assert any("StridedShard" in str(value.placements) for value in tree.values())
        folder = root / str(width)
        round_trips(folder, tree)
        whole = {name: torch.zeros_like(value) for name, value in full.items()}
        dcp.load(whole, checkpoint_id=folder / "blocking" / "step-000000001", no_dist=True)
        for name, value in full.items():
            assert torch.equal(whole[name], value), (width, name)


@pytest.mark.slow
def test_strided_shards_are_whole_when_another_number_of_ranks_reads_them(tmp_path):
    run_ranks(fsdp2_tp, 4, tmp_path, timeout_seconds=200)
