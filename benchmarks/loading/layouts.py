"""How tensors lie over ranks, when they are saved and when they are loaded."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from benchmarks.state import StateShape, tensor_sizes

Layout = Literal["ddp", "hsdp", "fsdp", "reshard"]

IN_WORDS: dict[Layout, str] = {
    "ddp": "plain tensors, the same on every rank",
    "hsdp": "DTensors on a mesh of 2 x half the ranks, [Replicate(), Shard(0)]",
    "fsdp": "DTensors in Shard(0), as FSDP2 has them",
    "reshard": "DTensors saved in Shard(0), loaded in Shard(1)",
}
# As the rows of real matrices; a Shard(1) of narrow ones would measure nothing but the cost of a range.
_COLUMNS, _FEW_COLUMNS = 1024, 64


def placed_state(shape: StateShape, layout: Layout, *, loading: bool) -> dict[str, torch.Tensor]:
    """This rank's part of a state whose values depend on the tensor's number alone, not on the ranks."""
    place = None if layout == "ddp" else _mesh_and_placements(layout, loading=loading)
    state: dict[str, torch.Tensor] = {}
    for index, (name, (numel, dtype)) in enumerate(tensor_sizes(shape).items()):
        columns = _COLUMNS if numel >= _COLUMNS * _COLUMNS else _FEW_COLUMNS
        generator = torch.Generator().manual_seed(index)
        whole = torch.randn(max(1, numel // columns), columns, generator=generator).to(dtype)
        state[name] = whole if place is None else _placed(whole, *place)
    return state


def _mesh_and_placements(layout: Layout, *, loading: bool) -> tuple[DeviceMesh, list[Placement]]:
    world = dist.get_world_size()
    if layout == "hsdp":
        return init_device_mesh("cpu", (2, world // 2)), [Replicate(), Shard(0)]
    columns = layout == "reshard" and loading
    return init_device_mesh("cpu", (world,)), [Shard(1 if columns else 0)]


def _placed(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Without communication, and without keeping the whole tensor alive."""
    cut = distribute_tensor(whole, mesh, placements, src_data_rank=None)
    return DTensor.from_local(
        cut.to_local().clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
