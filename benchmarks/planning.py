"""What planning a save costs at many ranks: the seam between the simulation and those who plan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, final

from benchmarks.contenders import Kind


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """`world_size` ranks, each with its shard of every one of `tensors` tensors."""

    world_size: int
    tensors: int


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
    """

    coordinator_cpu_s: float
    gathered_bytes: int
    scattered_bytes: int
    broadcast_bytes: int

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
