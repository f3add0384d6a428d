"""What planning a save costs at many ranks: the seam between the simulation and those who plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import ClassVar, Final, NamedTuple, TypeAlias, final

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from benchmarks.contenders import Kind

GROUPS: Final = ("optimizer", "param_groups")
VALUES: Final = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "params")
_Mesh: TypeAlias = tuple[tuple[int, ...], tuple[Placement, ...]]
_SHAPES: Final = (
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),
    *((14336, 4096), (4096, 14336), (14336, 4096), (4096,), (4096,)),
)
"""Of one layer of Llama 3 8B."""
_EXPERTS: Final = (64, 4096, 1408)
_INNER: Final = 8
"""Ranks of a node, over which tensors, experts or stages are divided."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`world_size` ranks, each with its shard of every one of `tensors` tensors."""

    world_size: int
    tensors: int
    layout: str = "FSDP2"

    @property
    def divided(self) -> int:
        """The ranks within which tensors, experts or stages are divided, replicas apart."""
        return _INNER if self.world_size % _INNER == 0 else 1


class Held(NamedTuple):
    """What a rank holds of a tensor; `mesh` is the number of its ranks and its own number."""

    path: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    sizes: tuple[int, ...]
    mesh: tuple[int, int] | None


LAYOUTS: Final = ("FSDP2", "HSDP", "TP x FSDP", "PP x FSDP", "EP")


def held(workload: Workload, rank: int) -> Iterator[Held]:
    """What a rank holds of parameters and AdamW's state: of four tensors, one is a step, on all ranks."""
    stage = rank % workload.divided if workload.layout == "PP x FSDP" else 0
    for number in range(workload.tensors):
        parameter, kind = divmod(number, 4)
        shape = _SHAPES[parameter % len(_SHAPES)]
        if workload.layout == "EP" and len(shape) > 1 and parameter % 2:
            shape = _EXPERTS
        name = f"layers.{stage}.{parameter // len(_SHAPES)}.block.{parameter % len(_SHAPES)}.weight"
        path = (
            ("model", name)
            if kind == 0
            else ("optimizer", "state", name, ("exp_avg", "exp_avg_sq", "step")[kind - 1])
        )
        if kind == 3:
            yield Held(path, "float32", (), (), (), None)
        else:
            start, sizes = _box(workload, rank, shape, parameter % 2)
            mesh = workload.world_size // (workload.divided if workload.layout == "PP x FSDP" else 1), stage
            yield Held(path, "bfloat16" if kind == 0 else "float32", shape, start, sizes, mesh)


@lru_cache(maxsize=64)
def _box(
    workload: Workload, rank: int, shape: tuple[int, ...], turn: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and sizes of a rank's shard, by torch's own rule for placements."""
    sizes, placed = _mesh(workload, shape, turn)
    coordinate, rest = list[int](), rank
    for size in reversed(sizes):
        coordinate.insert(0, rest % size)
        rest //= size
    lengths, start = _compute_local_shape_and_global_offset(shape, sizes, coordinate, placed)
    return tuple(start), tuple(lengths)


def _mesh(workload: Workload, shape: tuple[int, ...], turn: int) -> _Mesh:
    ranks, inner = workload.world_size, workload.divided
    outer = ranks // inner
    match workload.layout:
        case "HSDP":
            return (inner, outer), (Replicate(), Shard(0))
        case "TP x FSDP" if len(shape) == 1:
            return (outer, inner), (Shard(0), Replicate())
        case "TP x FSDP":
            columns = (_StridedShard(0, split_factor=inner), Shard(0))
            return (outer, inner), columns if turn else (Shard(0), Shard(1))
        case "PP x FSDP":
            return (outer, inner), (Shard(0), Replicate())
        case "EP" if len(shape) == 3:
            return (outer, inner), (Shard(1), Shard(0))
        case _:
            return (ranks,), (Shard(0),)


def state_bytes(sizes: Sequence[int], dtype: str) -> int:
    """Bytes of a shard."""
    return prod(sizes) * (2 if dtype == "bfloat16" else 4)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlanningCost:
    """One save, without its data.

    Attributes:
        coordinator_cpu_s: CPU seconds of the coordinator's process: messages unpickled and pickled, plans
            made, `.metadata` written.
        gathered_bytes: of all ranks together, to the coordinator.
        scattered_bytes: of all ranks together, from the coordinator, each rank its own.
        broadcast_bytes: from the coordinator, the same to every rank; counted once.
        peak_bytes: by which the process grew meanwhile, simulated ranks' messages included; 0 if unknown.
    """

    coordinator_cpu_s: float
    gathered_bytes: int
    scattered_bytes: int
    broadcast_bytes: int
    peak_bytes: int = 0

    def bytes_per_rank(self, world_size: int) -> float:
        """What an average rank sends and receives."""
        return (self.gathered_bytes + self.scattered_bytes) / world_size + self.broadcast_bytes


class Planning(ABC):
    """Plans saves of one workload, in one process that plays the coordinator of many ranks.

    The ranks' own work is done too, but neither its time nor its memory counts: only what a real
    coordinator's process would compute is timed, and every message is pickled as it would be sent.

    Attributes:
        key: its name in JSON.
        name: its name in tables and pictures.
        kind: whose it is.
        learns: whether a later save may differ from the first; if not, it is not measured again.
    """

    key: ClassVar[str]
    name: ClassVar[str]
    kind: ClassVar[Kind]
    learns: ClassVar[bool] = True

    def __init__(self, workload: Workload, directory: Path) -> None:
        self.workload = workload
        self.directory = directory

    @abstractmethod
    def save(self) -> PlanningCost:
        """Plan one save after another: the first call is a first save, the next ones are later saves."""

    @abstractmethod
    def memory_bytes(self) -> int:
        """About how much memory `save` will need, so that what does not fit is not begun."""

    def close(self) -> None:
        """Forget all plans."""
        return
