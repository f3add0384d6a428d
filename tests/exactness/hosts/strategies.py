"""The model of a cell under each strategy of torch, and a batch's way through it."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.exactness.cells import Cell, Place
from tests.exactness.training import LAYERS, WIDTH, Batch, Net

TENSOR_PLAN = {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}
EXPERTS = 6


def model_of(cell: Cell, place: Place, seed: int) -> nn.Module:
    """A model as users of torch spread it over ranks."""
    if place.strategy == "pp":
        return Net(cell, seed=seed, layers=_layers_of_stage(place))
    if cell.strategy == "ep":
        return Experts(cell, place, seed=seed)
    net = Net(cell, seed=seed)
    if place.strategy == "ddp":
        return DistributedDataParallel(net)
    if place.strategy == "fsdp1":
        return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)
    return _over_mesh(net, place)


def _over_mesh(net: Net, place: Place) -> nn.Module:
    match place.strategy:
        case "fsdp2":
            return _sharded(net, init_device_mesh("cpu", (place.world,)))
        case "hsdp":
            return _sharded(net, mesh_of_replicas(place.world))
        case "tp":
            return parallelize_module(net, init_device_mesh("cpu", (place.world,)), TENSOR_PLAN)
        case "fsdp2+tp":
            mesh = init_device_mesh("cpu", (place.replicas, 2), mesh_dim_names=("data", "tensor"))
            return _sharded(parallelize_module(net, mesh["tensor"], TENSOR_PLAN), mesh["data"])
        case _:
            return net


def mesh_of_replicas(world: int) -> Any:
    """Two replicas, each of which is sharded over half of the ranks."""
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))


def _sharded(net: nn.Module, mesh: Any) -> nn.Module:
    for layer in net.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _layers_of_stage(place: Place) -> range:
    """Stages of unequal size, so that another number of ranks cuts elsewhere."""
    rank = dist.get_rank()
    return range(rank, LAYERS if rank == place.world - 1 else rank + 1)


def through(model: nn.Module, batch: Batch, scale: float) -> torch.Tensor:
    """Forward and backward of a batch; returns its loss."""
    if type(model) is Net and len(model.layers) < LAYERS:
        return _through_stages(model, batch, scale)
    loss = model(**batch)["loss"]
    (loss * scale).backward()
    if isinstance(model, Experts) and dist.is_initialized():
        model.average_shared()
    return loss


def _through_stages(stage: Net, batch: Batch, scale: float) -> torch.Tensor:
    """One microbatch through a pipeline; every rank returns the last one's loss."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    hidden = stage.seen(batch["x"])
    if rank:
        hidden = torch.empty_like(batch["x"])
        dist.recv(hidden, rank - 1)
        hidden.requires_grad_()
    out = stage.part(hidden)
    loss = torch.zeros(())
    if rank == last:
        loss = (out - batch["x"]).float().pow(2).mean()
        (loss * scale).backward()
    else:
        dist.send(out.detach().float(), rank + 1)
        gradient = torch.empty_like(batch["x"])
        dist.recv(gradient, rank + 1)
        out.backward(gradient.to(out.dtype))
    if rank:
        dist.send(hidden.grad, rank - 1)
    loss = loss.detach()
    dist.broadcast(loss, last)
    return loss


class Experts(Net):
    """Two layers that all ranks share, and between them experts of which every rank has some."""

    def __init__(self, cell: Cell, place: Place, *, seed: int) -> None:
        super().__init__(cell, seed=seed, layers=(0, 1))
        each = EXPERTS // place.world
        first = dist.get_rank() * each if place.world > 1 else 0
        self.experts = nn.ModuleDict()
        for number in range(first, first + each):
            torch.manual_seed(seed + 100 + number)
            self.experts[str(number)] = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        hidden = self.drop(torch.tanh(self.layers["0"](self.seen(x)))).float()
        hidden = self.layers["1"](self._of_experts(hidden, ids))
        return {"loss": (hidden - x).float().pow(2).mean()}

    def _of_experts(self, hidden: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
        """Every sample through the expert that its number chooses, on whatever rank that is."""
        assert ids is not None
        spread = len(self.experts) < EXPERTS
        every, numbers = (_of_all_ranks(hidden), _of_all_ranks(ids)) if spread else (hidden, ids)
        out = torch.zeros_like(every)
        for number, expert in self.experts.items():
            chosen = (numbers % EXPERTS == int(number)).unsqueeze(1)
            out = out + torch.where(chosen, expert(every).float(), 0)
        if not spread:
            return out
        count = len(hidden)
        return _Sum.apply(out)[dist.get_rank() * count : (dist.get_rank() + 1) * count]

    def average_shared(self) -> None:
        """Give every rank the mean gradient of the layers that all of them have."""
        for parameter in self.layers.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()


def _of_all_ranks(values: torch.Tensor) -> torch.Tensor:
    """The rows of every rank, in the order of ranks."""
    rank, world, count = dist.get_rank(), dist.get_world_size(), len(values)
    before, after = rank * count, (world - 1 - rank) * count
    padding = [0, 0] * (values.ndim - 1) + [before, after]
    return _Sum.apply(torch.nn.functional.pad(values, padding))


class _Sum(torch.autograd.Function):
    """The sum over all ranks, of values and of gradients."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        del ctx
        out = values.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _Sum.forward(ctx, gradient)
