"""Layouts of a training over two ranks, each built alike in one process: for `test_layouts_table`."""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt_core import CheckpointManager, TrainState
from ckpt_core._torch_internals import inner_tensors, own_part
from tests.support import low_bit

WIDTH = 32


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape or (ranks(),), mesh_dim_names=("a", "b")[: len(shape) or 1])


def layers(seed: int, *, inside: int = WIDTH, outside: int = 4, device: str = "cpu") -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, inside, device=device), nn.Linear(inside, outside, device=device))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


@dataclass
class Training:
    """A training that can make a step of its own."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    forward: Callable[[int], None] | None = None

    def step(self, number: int) -> None:
        if self.forward is None:
            found = self.model(batch(number))
            found = found.full_tensor() if isinstance(found, DTensor) else found
            found.pow(2).mean().backward()
        else:
            self.forward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def state(self) -> TrainState:
        return TrainState(model=self.model, optimizer=self.optimizer)

    def bits(self) -> dict[str, bytes]:
        """Every byte that this rank holds."""
        found: dict[str, bytes] = {}
        values = [*self.model.parameters(), *self.model.buffers()]
        for number, group in enumerate(self.optimizer.param_groups):
            for at, parameter in enumerate(group["params"]):
                found[f"shape {number} {at}"] = str(tuple(own_part(parameter).shape)).encode()
                values += [v for _, v in sorted(self.optimizer.state[parameter].items())]
        for at, value in enumerate(values):
            for name, inner in inner_tensors(own_part(value.detach())):
                found[f"{at} {name}"] = inner.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return found


def sharded(model: nn.Module, **options: Any) -> nn.Module:
    if ranks() > 1:
        for layer in (*model.children(), model):
            fully_shard(layer, mesh=mesh(), **options)
    return model


def fsdp2(seed: int) -> Training:
    model = sharded(layers(seed))
    return Training(model, adamw(model))


def uneven(seed: int) -> Training:
    """Rows that two does not divide, and one row: the second rank holds nothing of it."""
    model = sharded(layers(seed, inside=5, outside=1))
    return Training(model, adamw(model))


def tied(seed: int) -> Training:
    model = layers(seed, outside=WIDTH)
    model[1].weight = model[0].weight
    return Training(model := sharded_as_one(model), adamw(model))


def sharded_as_one(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=mesh()) if ranks() > 1 else model


def from_meta(seed: int) -> Training:
    model = sharded(layers(seed, device="meta")).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(seed + 1)
    return Training(model, adamw(model))


def offloaded(seed: int) -> Training:
    model = sharded(layers(seed), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return Training(model, adamw(model))


def hybrid(seed: int) -> Training:
    model = layers(seed)
    if ranks() > 1:
        fully_shard(model, mesh=mesh(2, 1))
    return Training(model, adamw(model))


def tensor_parallel(seed: int) -> Training:
    model = layers(seed)
    if ranks() > 1:
        parallelize_module(model, mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return Training(model, adamw(model))


def data_parallel(seed: int) -> Training:
    model: nn.Module = layers(seed)
    if ranks() > 1:
        model = nn.parallel.DistributedDataParallel(model)
    return Training(model, adamw(model))


def fsdp1(seed: int, **options: Any) -> Training:
    model: nn.Module = layers(seed)
    if ranks() > 1:
        model = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options
        )
    return Training(model, adamw(model))


def compiled(seed: int) -> Training:
    """Wrapped by `torch.compile` on two ranks, plain on one."""
    model = sharded(layers(seed))
    wrapped: Any = torch.compile(model, backend="eager") if ranks() > 1 else model
    return Training(wrapped, adamw(wrapped))


def compiled_in_place(seed: int) -> Training:
    model = layers(seed)
    if ranks() > 1:
        model[0] = torch.compile(model[0], backend="eager")  # one block, as is usual
        model.compile(backend="eager")
    return Training(model, adamw(model))


def pipeline(schedule: Any, seed: int) -> Training:
    """Each rank keeps the layers of its stage under their names in the whole model."""
    whole = layers(seed, outside=WIDTH)
    if ranks() == 1:
        return Training(whole, adamw(whole))
    rank = dist.get_rank()
    stage = nn.ModuleDict({str(rank): whole[rank]})
    piped = PipelineStage(whole[rank], rank, 2, torch.device("cpu"), input_args=(batch(0)[:2],))
    runner = schedule(piped, n_microbatches=2, loss_fn=nn.functional.mse_loss)

    def forward(number: int) -> None:
        if rank == 0:
            runner.step(batch(number))
        else:
            runner.step(target=torch.zeros(4, WIDTH))

    return Training(stage, adamw(stage), forward)


def experts(seed: int) -> Training:
    """A router that all ranks hold, and experts that one rank holds each."""
    torch.manual_seed(seed)
    router, both = nn.Linear(WIDTH, 2), [nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)]
    own = range(2) if ranks() == 1 else [dist.get_rank()]
    model = nn.ModuleDict({"router": router, **{f"expert{each}": both[each] for each in own}})

    def forward(number: int) -> None:
        gate = router(batch(number))
        sum(both[each](batch(number)).mul(gate[:, each : each + 1]).pow(2).mean() for each in own).backward()
        for parameter in router.parameters() if ranks() > 1 else ():
            dist.all_reduce(parameter.grad)

    return Training(model, adamw(model), forward)


def quantised(name: str, wrap: Callable[[nn.Module], nn.Module], seed: int, inside: int = 256) -> Training:
    """Optimizers whose state is made of codes and scales, where a shard has at least 4,096 elements."""
    with low_bit.importable():
        import torchao.optim

    model = wrap(layers(seed, inside=inside))
    return Training(model, getattr(torchao.optim, name)(model.parameters(), lr=0.01))


def columns(model: nn.Module) -> nn.Module:
    if ranks() > 1:
        parallelize_module(model, mesh(), {"0": ColwiseParallel(output_layouts=Replicate())})
    return model


def replicated(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model) if ranks() > 1 else model


LAYOUTS: dict[str, Callable[[int], Training]] = {
    "DDP": data_parallel,
    "FSDP2": fsdp2,
    "HSDP": hybrid,
    "tensor parallel": tensor_parallel,
    "FSDP2, uneven and empty shards": uneven,
    "FSDP2, tied weights": tied,
    "FSDP2, model made on meta": from_meta,
    "FSDP2, CPUOffloadPolicy": offloaded,
    "FSDP1, flat parameters": lambda seed: fsdp1(seed, use_orig_params=False),
    "FSDP1, original parameters": lambda seed: fsdp1(seed, use_orig_params=True),
    "torch.compile, the whole": compiled,
    "torch.compile, blocks and in place": compiled_in_place,
    "pipeline, GPipe": lambda seed: pipeline(ScheduleGPipe, seed),
    "pipeline, 1F1B": lambda seed: pipeline(Schedule1F1B, seed),
    "expert parallel": experts,
}
QUANTISED: dict[str, Callable[[int], Training]] = {
    "AdamW8bit, FSDP2": lambda seed: quantised("AdamW8bit", sharded, seed),
    "AdamW4bit, FSDP2": lambda seed: quantised("AdamW4bit", sharded, seed),
    "AdamWFp8, FSDP2": lambda seed: quantised("AdamWFp8", sharded, seed),
    "AdamW8bit, tensor parallel": lambda seed: quantised("AdamW8bit", columns, seed),
    "AdamW4bit, DDP": lambda seed: quantised("AdamW4bit", replicated, seed),
}


def builders() -> dict[str, Callable[[int], Training]]:
    return LAYOUTS | (QUANTISED if low_bit.is_installed() else {})


@contextmanager
def quietly(name: str) -> Iterator[None]:
    """Without the warnings of libraries, and without the compilation that torchao's optimizers ask for."""
    if name in QUANTISED:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        yield
    os.environ.pop("TORCHDYNAMO_DISABLE", None)


def saves(root: Path) -> dict[str, str]:
    """Train, save, go on; the same from the checkpoint. Return what is wrong, by layout."""
    found: dict[str, str] = {}
    for name, build in builders().items():
        with quietly(name), CheckpointManager(root / name / "two", deadline_seconds=60) as checkpoints:
            try:
                live = build(0)
                for number in range(2):
                    live.step(number)
                checkpoints.save(1, live.state)
                checkpoints.wait()
                (root / f"{name}-{dist.get_rank()}").write_bytes(pickle.dumps(live.bits()))
                other = build(1)
                checkpoints.resume(other.state)
                same = live.bits() == other.bits()
                for each in (live, other):
                    each.step(2)
                found[name] = "" if same and live.bits() == other.bits() else "differs"
            except Exception:  # the table tells which
                found[name] = traceback.format_exc()
    return found


def passes_on(root: Path) -> dict[str, str]:
    """In one process: resume what two ranks have saved, and save it again."""
    found: dict[str, str] = {}
    for name, build in builders().items():
        with quietly(name):
            try:
                live = build(2)
                with CheckpointManager(root / name / "two") as checkpoints:
                    checkpoints.resume(live.state)
                with CheckpointManager(root / name / "one") as checkpoints:
                    checkpoints.save(1, live.state)
                found[name] = ""
            except Exception:
                found[name] = traceback.format_exc()
    return found


def resumes(root: Path) -> dict[str, str]:
    """Resume what one process has passed on: the bytes of each rank are those that it saved."""
    found: dict[str, str] = {}
    for name, build in builders().items():
        with quietly(name), CheckpointManager(root / name / "one", deadline_seconds=60) as checkpoints:
            try:
                live = build(3)
                checkpoints.resume(live.state)
                saved = pickle.loads((root / f"{name}-{dist.get_rank()}").read_bytes())
                found[name] = "" if live.bits() == saved else "differs"
            except Exception:
                found[name] = traceback.format_exc()
    return found
