"""What `Layouts` says each rank holds, against what real ranks hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt_core.loading.sharing import Boxes, Layouts
from tests.distributed.test_placements import ON_ONE, ON_TWO, SHAPES, sharded
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed


def layouts() -> Layouts:
    return Layouts(dist.get_rank(), dist.get_world_size())


def rows(boxes: Boxes) -> list[tuple[int, list[int], list[int]]]:
    return list(zip(boxes.ranks.tolist(), boxes.lo.tolist(), boxes.hi.tolist(), strict=True))


def parts(value: torch.Tensor) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


def agrees(value: torch.Tensor, whole: torch.Tensor) -> None:
    """The boxes cut out of `whole` what the ranks hold, and all ranks have computed the same boxes."""
    boxes = layouts().boxes_of(value)
    assert boxes is not None, value
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (rows(boxes), [part.clone() for part in parts(value)]))
    assert all(told == everywhere[0][0] for told, _ in everywhere)
    for rank, (_, held) in enumerate(everywhere):
        own = boxes.of(rank)
        for lo, hi, part in zip(own.lo.tolist(), own.hi.tolist(), held, strict=True):
            cut = whole[tuple(slice(start, stop) for start, stop in zip(lo, hi, strict=True))]
            assert torch.equal(cut, part), (rank, lo, hi)


def every_placement(mesh: DeviceMesh, choices: list[tuple[Placement, ...]]) -> None:
    for shape in [*SHAPES, (), (9, 2, 5)]:
        whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
        for placements in choices:
            if any(each.is_shard() and each.dim >= whole.ndim for each in placements):
                continue
            agrees(distribute_tensor(whole, mesh, list(placements)), whole)


def every_kind() -> None:
    world = dist.get_world_size()
    every_placement(init_device_mesh("cpu", (world,)), ON_ONE)
    if world == 4:
        every_placement(init_device_mesh("cpu", (2, 2)), ON_TWO)
        every_placement(init_device_mesh("cpu", (4, 1)), ON_TWO)
    agrees(*sharded(torch.float32))
    agrees(torch.ones(3, 2), torch.ones(3, 2))
    agrees(torch.tensor(3.0), torch.tensor(3.0))


def fsdp2_over_tp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    strided = []
    for width in (8, 10, 7, 3):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 5))
        whole = {name: value.detach().clone() for name, value in net.state_dict().items()}
        parallelize_module(net, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(net, mesh=mesh["data"])
        for name, value in net.state_dict().items():
            strided.append("StridedShard" in str(value.placements))
            agrees(value.detach(), whole[name])
    assert any(strided)


def hybrid() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 7)
    whole = {name: value.detach().clone() for name, value in net.state_dict().items()}
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    for name, value in net.state_dict().items():
        agrees(value.detach(), whole[name])


def fsdp1() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 7)
    whole = {name: value.detach().clone() for name, value in net.state_dict().items()}
    model = FullyShardedDataParallel(
        net, sharding_strategy=ShardingStrategy.FULL_SHARD, device_id=torch.device("cpu")
    )
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    for name, value in state.items():
        assert isinstance(value, ShardedTensor)
        agrees(value, whole[name])


def mesh_of_some() -> None:
    """A tensor on ranks 1 and 3 only; the others have it without a part of their own."""
    mesh = DeviceMesh("cpu", [1, 3])
    value = distribute_tensor(torch.arange(5), mesh, [Shard(0)], src_data_rank=None)
    boxes = layouts().boxes_of(value)
    assert boxes is not None
    assert rows(boxes) == [(1, [0], [3]), (3, [3], [5])]


def the_untold() -> None:
    """A shard that is no box, a sum that was not made, and parts that are not those the layout gives."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    combed = DTensor.from_local(
        torch.ones(4), mesh, [_StridedShard(0, split_factor=2)],
        run_check=False, shape=(4 * mesh.size(),), stride=(1,),
    )  # fmt: skip
    summand = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    lopsided = DTensor.from_local(
        torch.ones(10 + rank), mesh, [Shard(0)], run_check=False, shape=(5,), stride=(1,)
    )
    assert [layouts().boxes_of(value) for value in (combed, summand, lopsided)] == [None] * 3
    plain = DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
    assert layouts().boxes_of(plain) is not None


def agree_on(*kinds: Callable[[], None]) -> None:
    for kind in kinds:
        kind()


def test_boxes_are_what_two_ranks_hold():
    run_ranks(agree_on, 2, every_kind, fsdp1, the_untold)


@pytest.mark.slow
def test_boxes_are_what_four_ranks_hold():
    run_ranks(agree_on, 4, every_kind, fsdp1, fsdp2_over_tp, hybrid, mesh_of_some, the_untold)
