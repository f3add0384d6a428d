"""Coordinate a job whose process group may be made after the manager."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from typing_extensions import override

from ckpt_core.coordination._base import CommitChannel, Coordinator, R, T
from ckpt_core.coordination._solo import Solo
from ckpt_core.coordination._store import StoreCoordinator
from ckpt_core.coordination._talks import Talks
from ckpt_core.errors import ConfigError

_ALONE = "coordinator=ckpt_core.coordination.Solo() and a root of its own"
_inherited: weakref.ref[Any] | None = None
_has_met_groups = False


def _note_fork() -> None:
    """Prepare a forked child, which inherits groups but none of their threads.

    The destructor of a gloo group waits for these threads, here forever. So garbage of the parent's that
    holds a group, such as an FSDP model of a group that was destroyed, must never be collected here.
    """
    global _inherited  # noqa: PLW0603 - one per process, as the group itself
    group = _default_group()
    _inherited = None if group is None else weakref.ref(group)
    if _has_met_groups:
        gc.freeze()


os.register_at_fork(after_in_child=_note_fork)


@final
class JobCoordinator(Coordinator):
    """Coordinates the ranks of the default process group as it is at each call.

    - With a group of several ranks it connects in its constructor, which is collective. Without one it works
      alone, and connects at its first use after a group was made, unless plans depend on one rank by then
      (`bind`).
    - If a group was destroyed and made again with the same ranks, it connects to the new one; saves in flight
      end over the store that they began with (`commit_channel`).
    - Any other change is refused on every rank of the new group: the manager has plans for other ranks.
    """

    def __init__(self, *, deadline_seconds: float = 1800.0) -> None:
        self._deadline_seconds = deadline_seconds
        self._pid = os.getpid()
        self._bound = False
        self._refusal: ConfigError | None = None
        self._group: Any = None
        self._session = 0
        self._current: Solo | StoreCoordinator = Solo()
        self._take_over(_usable_group(), None)

    @override
    def check(self) -> None:
        require_same_process(self._pid)
        if self._refusal is not None:
            raise self._refusal
        group = _default_group()
        if group is not (None if self._group is None else self._group()):
            self._follow(_usable_group())

    @override
    def bind(self) -> None:
        self.check()
        if not self._bound and self._group is None and (size := _launched_ranks()) > 1:
            raise ConfigError(
                f"this process was launched as one of {size} ranks (RANK and WORLD_SIZE are set), but there "
                "is no process group, so each rank would save only its own part: call "
                "torch.distributed.init_process_group() before the first save or resume. If each process "
                f"trains on its own, give its manager {_ALONE}"
            )
        self._bound = True

    @override
    def commit_channel(self) -> CommitChannel:
        return self._current.commit_channel()

    @override
    def background_channel(self, name: str) -> CommitChannel:
        return self._current.background_channel(name)

    @property
    @override
    def can_broadcast_tensors(self) -> bool:
        return self._current.can_broadcast_tensors

    @override
    def broadcast(self, value: T, *, what: str = "") -> T:
        self.check()
        return self._current.broadcast(value, what=what)

    @override
    def gather_scatter(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        self.check()
        return self._current.gather_scatter(value, decide, what=what, deadline_seconds=deadline_seconds)

    @override
    def all_reduce_max(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        self.check()
        return self._current.all_reduce_max(flags, what=what)

    @override
    def broadcast_tensor(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        self._current.broadcast_tensor(buffer, ranks)

    @override
    def talks(self) -> Talks:
        return self._current.talks()

    @override
    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked child owns no connections
            self._current.close()

    def _follow(self, group: Any) -> None:
        """Connect to the present group, or refuse on all its ranks."""
        before = self.rank, self.world_size
        first_group = self._group is None and not self._bound
        if group is None and self.world_size > 1:
            self._refusal = ConfigError(
                f"rank {self.rank}: the process group of {self.world_size} ranks was destroyed, so the ranks "
                "cannot save or load together any more: save or load before destroy_process_group(), or make "
                "the group again with the same ranks"
            )
            raise self._refusal
        now = _place(group)
        problem = None
        if not first_group and now != before:
            problem = (
                f"this manager has worked as rank {before[0]} of {before[1]}, and is rank {now[0]} of "
                f"{now[1]} in the process group that was made since"
            )
        try:
            self._take_over(group, problem)
        except ConfigError as error:
            self._refusal = error
            raise

    def _take_over(self, group: Any, problem: str | None) -> None:
        global _has_met_groups  # noqa: PLW0603 - of the process, for its forks
        _has_met_groups |= group is not None
        former = self._current
        rank, size = _place(group)
        if size > 1:
            connected = StoreCoordinator(
                deadline_seconds=self._deadline_seconds, session=self._session, problem=problem
            )
            self._current, self._session = connected, connected.session
        elif problem is not None:
            raise ConfigError(f"{problem}: close this manager and make a new one")
        else:
            self._current = Solo()
        if isinstance(former, StoreCoordinator):
            former.release()
        self.rank, self.world_size = rank, size
        self._group = None if group is None else weakref.ref(group)


def require_same_process(pid: int) -> None:
    """Raise unless this is the process with this id.

    Raises:
        ConfigError: it was forked from that one, whose threads and connections it does not have.
    """
    if os.getpid() != pid:
        raise ConfigError(
            f"this is process {os.getpid()}, forked from {pid}, which made the checkpoint manager: its "
            "threads and connections exist only there. Save and load in that process, or make a manager "
            "here, for another root"
        )


def _default_group() -> Any:
    """Return the default process group; None without one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _usable_group() -> Any:
    """Return the default process group; None without one.

    Raises:
        ConfigError: it was inherited from the parent process.
    """
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
    return _place(_default_group())


def _place(group: Any) -> tuple[int, int]:
    """Return the rank and the number of ranks."""
    return (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())


def _launched_ranks() -> int:
    """Return the number of ranks that were launched; 1 if unknown."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(size) if size.isdecimal() and rank.isdecimal() else 1


def coordinator_for_job(*, deadline_seconds: float = 1800.0) -> Coordinator:
    """Coordinate all ranks of this job; collective with a process group."""
    return JobCoordinator(deadline_seconds=deadline_seconds)
