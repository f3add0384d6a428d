"""The ranks that `alike` says hold the same part of a tensor, against what real ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_core.loading._reads import alike
from tests.distributed.test_placements import ON_ONE, ON_TWO, SHAPES
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed


def agrees(value: torch.Tensor) -> tuple[int, ...]:
    """All ranks named hold the same as this one, and say so."""
    ranks = alike(value, dist.get_world_size())
    held = value.to_local() if isinstance(value, DTensor) else value
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (ranks, held.detach().clone()))
    for rank in ranks:
        theirs, part = everywhere[rank]
        assert theirs == ranks
        assert torch.equal(part, held)
    return ranks


def every_placement(mesh: DeviceMesh, choices: list[tuple[Placement, ...]]) -> None:
    for shape in [*SHAPES, (), (9, 2, 5)]:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for placements in choices:
            if any(each.is_shard() and each.dim >= whole.ndim for each in placements):
                continue
            agrees(distribute_tensor(whole, mesh, list(placements)))


def every_kind() -> None:
    world = dist.get_world_size()
    every_placement(init_device_mesh("cpu", (world,)), ON_ONE)
    if world == 4:
        every_placement(init_device_mesh("cpu", (2, 2)), ON_TWO)
        every_placement(init_device_mesh("cpu", (4, 1)), ON_TWO)
    everyone = tuple(range(world))
    assert agrees(torch.ones(3, 2)) == agrees(torch.tensor(3.0)) == everyone


def fsdp2_over_tp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    strided = []
    for width in (8, 10, 7, 3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 5))
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
        for value in net.state_dict().values():
            strided.append("StridedShard" in str(value.placements))
            agrees(value.detach())
    assert any(strided)


def hybrid() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 7)
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for value in net.state_dict().values():
        agrees(value.detach())


def mesh_of_some() -> None:
    """A tensor on ranks 1 and 3 only; the others have it without a part of their own."""
    mesh = DeviceMesh("cpu", [1, 3])
    value = distribute_tensor(torch.arange(5), mesh, [Shard(0)], src_data_rank=None)
    rank = dist.get_rank()
    assert alike(value, 4) == ((rank,) if rank in {1, 3} else ())
    everywhere = distribute_tensor(torch.arange(5), mesh, [Replicate()], src_data_rank=None)
    assert alike(everywhere, 4) == ((1, 3) if rank in {1, 3} else ())


def alone() -> None:
    """A comb and a sum that was not made are of one rank each."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    combed = DTensor.from_local(
        torch.ones(4), mesh, [_StridedShard(0, split_factor=2)],
        run_check=False, shape=(4 * mesh.size(),), stride=(1,),
    )  # fmt: skip
    summand = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    assert alike(combed, mesh.size()) == alike(summand, mesh.size()) == (rank,)
    plain = DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
    assert agrees(plain) == tuple(range(mesh.size()))


def agree_on(*kinds: Callable[[], None]) -> None:
    for kind in kinds:
        kind()


def test_two_ranks_said_to_be_alike_hold_the_same():
    run_ranks(agree_on, 2, every_kind, alone)


@pytest.mark.slow
def test_four_ranks_said_to_be_alike_hold_the_same():
    run_ranks(agree_on, 4, every_kind, fsdp2_over_tp, hybrid, mesh_of_some, alone)
