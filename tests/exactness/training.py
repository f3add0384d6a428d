"""The training that every cell runs: its data, its model, and what is recorded of it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

from ckpt_core.state import model_state, optimizer_state
from tests.exactness.cells import SAMPLES, Cell, Place

WIDTH = 12
LAYERS = 3
_GO_ON = ("plain", "lightning", "fabric")
"""Hosts in which the random numbers of workers go on, as documented."""
DEADLINE_SECONDS = 120
"""For ranks that wait for one another in a save: a machine may be busy."""

Batch = dict[str, torch.Tensor]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One training of a cell.

    Attributes:
        cell: what it is made of.
        root: where checkpoints are.
        role: `stock` without us, `saving`, or `resumed` in new objects and under another seed.
    """

    cell: Cell
    root: str
    role: str

    @property
    def place(self) -> Place:
        return self.cell.place_of_resume if self.role == "resumed" else self.cell.place

    @property
    def seed(self) -> int:
        return 1000 if self.role == "resumed" else 1

    @property
    def saves(self) -> bool:
        return self.role == "saving"


@dataclass(kw_only=True, slots=True)
class Observed:
    """What one rank saw of one training.

    Attributes:
        rows: of every batch the samples, the loss in full, and the learning rate.
        saved_after: the number of batches before the save.
        at_point: digests of the whole state there, by name.
        final: digests of this rank's state at the end, by kind.
        warnings: what our packages logged.
        error: the exception that ended it.
        refused: whether that is one of ours.
        seconds: processor time.
    """

    rows: list[tuple[tuple[int, ...], str, float]] = field(default_factory=list)
    saved_after: int = 0
    at_point: dict[str, str] = field(default_factory=dict)
    final: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    error: str = ""
    refused: bool = False
    seconds: float = 0.0


class Samples(Dataset[Batch]):
    """Changes each sample a little by random numbers, in workers and where it may."""

    def __init__(self, *, draws: bool) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Batch:
        made = sample(index)
        if self.draws and get_worker_info() is not None:
            made["x"] += 0.01 * (random.random() + np.random.rand() + torch.rand(()))
        return made


class Stream(IterableDataset[Batch]):
    """Samples of one replica, shared among the workers of its loader.

    All replicas have as many, for gloo aborts a process whose message is longer than its peer's; so the first
    samples come a second time where the shares would be unequal.
    """

    def __init__(self, replica: int = 0, replicas: int = 1) -> None:
        share = -(-SAMPLES // replicas)
        self.own = [number % SAMPLES for number in range(replica, share * replicas, replicas)]
        self.done = 0

    def _of_worker(self) -> list[int]:
        worker = get_worker_info()
        return self.own if worker is None else self.own[worker.id :: worker.num_workers]

    def __iter__(self) -> Iterator[Batch]:
        return map(sample, self._of_worker())


class StatefulStream(Stream):
    """A stream that knows its position."""

    def __iter__(self) -> Iterator[Batch]:
        own = self._of_worker()
        while self.done < len(own):
            self.done += 1
            yield sample(own[self.done - 1])
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def sample(index: int) -> Batch:
    return {
        "ids": torch.tensor(index),
        "x": torch.sin(torch.arange(WIDTH, dtype=torch.float32) * (index + 1)),
    }


def dataset_of(cell: Cell, replica: int = 0, replicas: int = 1) -> Any:
    """The data set; a stream shares itself among replicas."""
    if cell.data == "stateful stream":
        return StatefulStream(replica, replicas)
    return Stream(replica, replicas) if cell.data == "stream" else Samples(draws=cell.host in _GO_ON)


def loader_of(cell: Cell, place: Place, dataset: Any, **options: Any) -> DataLoader[Batch]:
    """A loader of the kind of the cell."""
    kind: Any = DataLoader
    if cell.data.startswith("stateful"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        kind = StatefulDataLoader
    if cell.workers != "0":
        options |= {"num_workers": 2, "persistent_workers": cell.workers == "persistent"}
    return kind(dataset, batch_size=place.batch, **options)


class Net(nn.Module):
    """Some layers of a model, under the names that they have in the whole, and the loss of a batch."""

    def __init__(self, cell: Cell, *, seed: int, layers: Iterable[int] = range(LAYERS)) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.drop = nn.Dropout(0.2 if cell.dropout else 0.0)
        self.noisy = cell.dropout
        for number in layers:
            torch.manual_seed(seed + number)
            self.layers[str(number)] = nn.Linear(WIDTH, WIDTH)

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's layers."""
        for layer in self.layers.values():
            hidden = self.drop(torch.tanh(layer(hidden)))
        return hidden

    def forward(self, x: torch.Tensor, ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        del ids
        return {"loss": (self.part(self.seen(x)) - x).float().pow(2).mean()}

    def seen(self, x: torch.Tensor) -> torch.Tensor:
        """The samples with noise from every generator that is part of a checkpoint."""
        if not self.noisy:
            return x
        return x + 0.01 * (random.random() + np.random.rand() + torch.rand(()))


def schedule(step: int) -> float:
    """A learning rate that no two steps share."""
    return 1 / (1 + 0.1 * step)


def seed_everything(job: Job, rank: int) -> None:
    """Give every rank that sees data of its own other random numbers."""
    seed = job.seed + job.place.replica(rank)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


class Recorder:
    """What a training does, batch by batch; hosts call it from their hooks."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.observed = Observed()
        self._looks = job.role == "resumed"

    def begins_batch(self, model: nn.Module, optimizer: Any) -> None:
        """Before every batch: at the first one after the save or the load, note the whole state."""
        if self._looks:
            self._looks = False
            self.observed.at_point = whole_state(model, optimizer)

    def saw(self, ids: torch.Tensor, loss: torch.Tensor, rate: float) -> None:
        """What a batch was and came to."""
        self.observed.rows.append((tuple(ids.tolist()), loss.detach().float().item().hex(), float(rate)))

    def saved(self) -> None:
        """A save was made after the last batch seen."""
        self.observed.saved_after = len(self.observed.rows)
        self._looks = True

    def ends(self, model: nn.Module, optimizer: Any, scheduler: Any) -> Observed:
        """The state at the end."""
        self.observed.final = {
            **final_state(model, optimizer),
            "scheduler": repr(plain(scheduler.state_dict())),
            "rng": generators(),
        }
        return self.observed


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sorted(state.items()) if not callable(value) and key != "lr_lambdas"}


def generators() -> str:
    kind, keys, *rest = np.random.get_state()
    parts = (torch.get_rng_state().numpy().tobytes(), keys.tobytes(), repr((kind, rest, random.getstate())))
    return digest(*parts)


def digest(*parts: Any) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part if isinstance(part, bytes) else repr(part).encode())
    return found.hexdigest()[:16]


def of_tensor(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return digest(value)
    value = value.detach().cpu().contiguous()
    return digest(value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())


def local(value: Any) -> str:
    """Of this rank's part of a tensor."""
    if isinstance(value, DTensor):
        return of_tensor(value.to_local())
    if isinstance(value, ShardedTensor):
        return digest(*(of_tensor(shard.tensor) for shard in value.local_shards()))
    return of_tensor(value)


def whole(value: Any) -> str:
    """Of a tensor that is gathered from all ranks; collective."""
    if isinstance(value, DTensor):
        return of_tensor(value.full_tensor())
    if isinstance(value, ShardedTensor):
        out = torch.zeros(value.size(), dtype=value.dtype)
        value.gather(0, out if dist.get_rank() == 0 else None)
        dist.broadcast(out, 0)
        return of_tensor(out)
    return of_tensor(value)


def _entries(model: nn.Module, optimizer: Any) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    packed = optimizer_state(model, optimizer)
    moments = [
        (f"{name}.{key}", value)
        for name, values in sorted(packed["state"].items())
        for key, value in sorted(values.items())
    ]
    groups = [
        (f"{name}.{key}", value)
        for group in packed["param_groups"]
        for name in sorted(group["params"])
        for key, value in sorted(group.items())
        if key != "params"
    ]
    return sorted(model_state(model).items()), moments + groups


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Digests of weights, moments and hyperparameters, whatever the number of ranks; collective."""
    weights, of_optimizer = _entries(model, optimizer)
    return {name: whole(value) for name, value in (*weights, *of_optimizer)}


def final_state(model: nn.Module, optimizer: Any) -> dict[str, str]:
    """Digests of this rank's weights and optimizer state."""
    weights, of_optimizer = _entries(model, optimizer)
    return {
        "weights": digest(*((name, local(value)) for name, value in weights)),
        "optimizer": digest(*((name, local(value)) for name, value in of_optimizer)),
    }
