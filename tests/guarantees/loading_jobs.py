"""Saves every shape in one process, loads it in another; what each rank saw, for the test to compare."""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ckpt_core import CheckpointManager
from ckpt_core.coordination import Coordinator, coordinator_for_job
from ckpt_core.dcp import is_expanded
from ckpt_core.errors import ConfigError, SaveError
from ckpt_core.state import TrainState
from tests.guarantees.state_shapes import PICKLED, SHAPES, Shape, Wrap
from tests.unit.dcp.tensors import content

STEPS = 2


@dataclass(kw_only=True)
class Seen:
    """What became of one shape in one process.

    Attributes:
        outside: why torch itself cannot make or train it under this strategy.
        refused: how the save refused it.
        error: how a save or a load failed that should not have.
        fresh: the state before the load.
        state: the state that was saved, or loaded.
        later: the state a step later.
        said: what was logged as a warning.
    """

    outside: str = ""
    refused: str = ""
    error: str = ""
    fresh: dict[str, str] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)
    said: str = ""


def bare(model: nn.Module) -> nn.Module:
    return model


def ddp(model: nn.Module) -> nn.Module:
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    return DistributedDataParallel(model, init_sync=False)


def fsdp2(model: nn.Module) -> nn.Module:
    if any(True for _ in model.parameters()):
        fully_shard(model)
    return model


WRAPS: dict[str, Wrap] = {"plain": bare, "ddp": ddp, "fsdp2": fsdp2}


def make(name: str, wrap: Wrap, seed: int) -> Shape:
    torch.manual_seed(seed)
    made = SHAPES[name](wrap)
    if made.stirred:
        for module in made.modules:
            for buffer in module.buffers():
                if is_lazy(buffer) or is_expanded(buffer):
                    continue
                if buffer.is_floating_point():
                    buffer.copy_(torch.randn(buffer.shape).to(buffer.dtype))
                elif buffer.dtype == torch.int64:
                    buffer.fill_(int(torch.randint(0, 1000, ())))
    return made


def source(made: Shape) -> TrainState:
    return TrainState(
        model=made.model, optimizer=made.optimizer, scheduler=made.scheduler, scaler=made.scaler, **made.items
    )


def digest(made: Shape) -> dict[str, str]:
    """Every value by its path, asked of the objects themselves."""
    state = {
        "model": [module.state_dict() for module in made.modules],
        "optimizer": [optimizer.state_dict() for optimizer in made.optimizers],
        "scheduler": made.scheduler.state_dict() if made.scheduler is not None else None,
        "scaler": made.scaler.state_dict() if made.scaler is not None else None,
        "items": {name: item.state_dict() for name, item in made.items.items()},
        "rng": torch.get_rng_state(),
    }
    return dict(flat(state, ""))


def flat(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        placed = value.placements if isinstance(value, DTensor) else ""
        data = hashlib.sha1(content(local)).hexdigest()
        yield path, f"{value.dtype} {tuple(value.shape)} {placed} {data}"
    elif isinstance(value, Mapping):
        # A whole state is given to `load_state_dict` as a dict, whatever it was.
        yield f"{path}#", "" if path.count(".") < 2 else type(value).__name__
        for key, each in value.items():
            yield from flat(each, f"{path}.{key!r}")
    elif type(value) in {list, tuple}:
        yield f"{path}#", f"{type(value).__name__} {len(value)}"
        for index, each in enumerate(value):
            yield from flat(each, f"{path}.{index}")
    elif isinstance(value, set | frozenset):
        yield path, f"{type(value).__name__} {sorted(value)}"
    elif callable(value):
        yield path, "a function"
    else:
        yield path, f"{type(value).__name__} {value!r}"


def going_on(made: Shape) -> dict[str, str]:
    made.train(100)
    return digest(made)


class Warned(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def save_one(name: str, wrap: Wrap, root: Path, ranks: Coordinator) -> Seen:
    try:
        made = make(name, wrap, seed=0)
        for step in range(STEPS):
            made.train(step)
    except Exception as error:
        return Seen(outside=f"{type(error).__name__}: {error}")
    warned = Warned()
    logging.getLogger("ckpt_core").addHandler(warned)
    try:
        with CheckpointManager(root, coordinator=ranks) as checkpoints:
            checkpoints.save(STEPS, source(made))
            checkpoints.wait()
            state = digest(made)
            failures = checkpoints.verify() if ranks.world_size == 1 else []
    except (SaveError, ConfigError) as error:
        return Seen(refused=f"{type(error).__name__}: {error}")
    except Exception as error:
        return Seen(error=f"{type(error).__name__}: {error}")
    finally:
        logging.getLogger("ckpt_core").removeHandler(warned)
    assert not failures, failures
    return Seen(state=state, later=going_on(made), said="\n".join(warned.lines))


def load_one(name: str, wrap: Wrap, root: Path, ranks: Coordinator) -> Seen:
    made = make(name, wrap, seed=1)
    fresh = digest(made)
    try:
        with CheckpointManager(root, coordinator=ranks, allow_pickle=name in PICKLED) as checkpoints:
            assert checkpoints.resume(source(made)) == STEPS
        return Seen(fresh=fresh, state=digest(made), later=going_on(made))
    except Exception as error:
        return Seen(error=f"{type(error).__name__}: {error}")


def save_all(column: str, root: str, names: list[str]) -> dict[str, Seen]:
    with one_coordinator() as ranks:
        return {name: save_one(name, WRAPS[column], place(root, name), ranks) for name in names}


def load_all(column: str, root: str, names: list[str]) -> dict[str, Seen]:
    with one_coordinator() as ranks:
        return {name: load_one(name, WRAPS[column], place(root, name), ranks) for name in names}


def place(root: str, name: str) -> Path:
    return Path(root) / f"shape-{list(SHAPES).index(name):03d}"


@contextmanager
def one_coordinator() -> Generator[Coordinator]:
    """For all managers of a process: to make one takes longer than to save."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks = coordinator_for_job(deadline_seconds=60)
    try:
        yield ranks
    finally:
        ranks.close()
