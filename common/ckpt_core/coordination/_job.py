"""Coordinate a job whose process group may be made after the manager."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from typing_extensions import override

from ckpt_core.coordination._base import CommitChannel, Coordinator, R, T
from ckpt_core.coordination._store import StoreCoordinator
from ckpt_core.errors import CheckpointError, ConfigError, CoordinationError, Failure


@final
class Solo(Coordinator):
    rank = 0
    world_size = 1

    @override
    def commit_channel(self) -> CommitChannel:
        return _SoloChannel()

    @override
    def broadcast(self, value: T, *, what: str = "") -> T:
        return value

    @override
    def gather_scatter(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        return _alone(value, decide)[0]

    @override
    def all_reduce_max(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        return tuple(flags)

    @override
    def broadcast_tensor(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        pass  # there is no other rank

    @override
    def close(self) -> None:
        pass


@final
class _SoloChannel(CommitChannel):
    rank = 0

    @override
    def broadcast(self, name: str, make: Callable[[], T], deadline_seconds: float) -> T:
        return _alone(None, lambda _: make())

    @override
    def commit_barrier(
        self, name: str, payload: T | BaseException, commit: Callable[[list[T]], R], deadline_seconds: float
    ) -> R:
        return _alone(payload, commit)


def _alone(value: T | BaseException, decide: Callable[[list[T]], R]) -> R:
    if isinstance(value, BaseException):
        raise _failed(value) from value
    try:
        return decide([value])
    except CheckpointError:
        raise
    except Exception as error:  # the caller gets it, as every rank of a larger job
        raise _failed(error) from error


def _failed(error: BaseException) -> CoordinationError:
    found = Failure.of(error)
    return CoordinationError(f"rank 0: {found.text}", failures={0: found.text}, causes={0: found})


HOST_VARIABLE = "CKPT_SUITE_HOST"
"""Environment variable with another name for this rank's host, such as that of a rack."""
_ALONE = "coordinator=ckpt_core.coordination.Solo() and a root of its own"
_inherited: weakref.ref[Any] | None = None


def _note_fork() -> None:
    """Note in a forked child the group that it inherited, without its threads."""
    global _inherited  # noqa: PLW0603 - one per process, as the group itself
    group = _default_group()
    _inherited = None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_note_fork)


def _passed_on(method: str, *, checked: bool = False) -> Any:
    """Return a method of `Coordinator` that the present one carries out."""

    def pass_on(job: JobCoordinator, *args: Any, **kwargs: Any) -> Any:
        if checked:
            job.check()
        return getattr(job._current, method)(*args, **kwargs)

    return pass_on


@final
class JobCoordinator(Coordinator):
    """Coordinates the ranks of the default process group.

    With a group of several ranks it connects in its constructor, which is collective. Without one it works
    alone, and connects at its first use after a group was made, unless plans depend on one rank by then
    (`bind`). When that group is destroyed, all further calls are refused.
    """

    def __init__(self, *, deadline_seconds: float = 1800.0) -> None:
        self._deadline_seconds = deadline_seconds
        self._pid = os.getpid()
        self._bound = False
        self._current: Solo | StoreCoordinator = Solo()
        self._connect()

    @override
    def check(self) -> None:
        require_same_process(self._pid)
        self._connect()

    def _connect(self) -> None:
        current = self._current
        if isinstance(current, StoreCoordinator) and not current.is_current:
            raise ConfigError(
                f"rank {self.rank}: the process group of {self.world_size} ranks was destroyed, so the ranks "
                "cannot save or load together any more: save or load before destroy_process_group(), or "
                "close this manager and make new ones, on every rank"
            )
        if isinstance(current, Solo) and _usable_group() is not None and (size := place_in_job()[1]) > 1:
            if self._bound:
                raise ConfigError(
                    "this manager has worked as rank 0 of 1, and the process group that was made since has "
                    f"{size} ranks: close this manager and make new ones, on every rank"
                )
            self._current = StoreCoordinator(deadline_seconds=self._deadline_seconds)
        self.rank, self.world_size = self._current.rank, self._current.world_size

    @override
    def bind(self) -> None:
        self.check()
        words = [os.environ.get(name, "") for name in ("WORLD_SIZE", "RANK")]
        size = int(words[0]) if all(map(str.isdecimal, words)) else 1  # as it was launched
        if not self._bound and _default_group() is None and size > 1:
            raise ConfigError(
                f"this process was launched as one of {size} ranks (RANK and WORLD_SIZE are set), but there "
                "is no process group, so each rank would save only its own part: call "
                "torch.distributed.init_process_group() before the first save or resume. If each process "
                f"trains on its own, give its manager {_ALONE}"
            )
        self._bound = True

    commit_channel = _passed_on("commit_channel")
    background_channel = _passed_on("background_channel")
    broadcast = _passed_on("broadcast", checked=True)
    gather_scatter = _passed_on("gather_scatter", checked=True)
    all_reduce_max = _passed_on("all_reduce_max", checked=True)
    broadcast_tensor = _passed_on("broadcast_tensor")
    talks = _passed_on("talks")

    @property
    @override
    def can_broadcast_tensors(self) -> bool:
        return self._current.can_broadcast_tensors

    @override
    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked child owns no connections
            self._current.close()


def require_same_process(pid: int) -> None:
    """Raise unless this is the process with this id."""
    if os.getpid() != pid:
        raise ConfigError(
            f"this is process {os.getpid()}, forked from {pid}, which made the checkpoint manager: its "
            "threads and connections exist only there. Save and load in that process, or make a manager "
            "here, for another root"
        )


def _default_group() -> Any:
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _usable_group() -> Any:
    """Return the default process group; None without one."""
    group = _default_group()
    if group is not None and _inherited is not None and _inherited() is group:
        raise ConfigError(
            f"process {os.getpid()} was forked from one that had a process group already, whose connections "
            "do not work here: start the process by spawn, or make the group after the fork. A "
            f"process that works on its own gives its manager {_ALONE}"
        )
    return group


def place_in_job() -> tuple[int, int]:
    """Return the rank and the number of ranks now; (0, 1) without a process group."""
    return (0, 1) if _default_group() is None else (dist.get_rank(), dist.get_world_size())


def coordinator_for_job(*, deadline_seconds: float = 1800.0) -> Coordinator:
    """Coordinate all ranks of this job; collective with a process group."""
    return JobCoordinator(deadline_seconds=deadline_seconds)
