"""The ranks of a job whose process group may be made, or made again, after the manager."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.distributed as dist
from typing_extensions import override

from ckpt_core.coordination._base import Coordinator, R, T
from ckpt_core.coordination._solo import Solo
from ckpt_core.coordination._store import StoreCoordinator
from ckpt_core.errors import ConfigError

_ALONE = "coordinator=ckpt_core.coordination.Solo() and a root of its own"
_inherited: weakref.ref[Any] | None = None


def _note_fork() -> None:
    """Remember that this process has its default group from its parent."""
    global _inherited  # noqa: PLW0603 - one per process, as the group itself
    group = _default_group()
    _inherited = None if group is None else weakref.ref(group)


os.register_at_fork(after_in_child=_note_fork)


@final
class JobCoordinator(Coordinator):
    """Coordinates the ranks of the default process group as it is at each call.

    - With a group of several ranks it connects at once, which is collective. Without one it works alone,
      and connects at its first use after a group was made, unless something depends on it by then (`bind`).
    - A group that was destroyed and made again with the same ranks is followed; saves in flight end over the
      store that they began with (`as_of_now`).
    - Anything else is refused on every rank of the new group: the manager has plans for other ranks.
    """

    def __init__(self, *, deadline_seconds: float = 1800.0) -> None:
        self._deadline_seconds = deadline_seconds
        self._pid = os.getpid()
        self._bound = False
        self._refusal: ConfigError | None = None
        self._group: Any = None
        self._session = 0
        self._current: Coordinator = Solo()
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
    def as_of_now(self) -> Coordinator:
        return self._current

    @property
    @override
    def relays(self) -> bool:
        return self._current.relays

    @override
    def agree(self, value: T, *, what: str = "") -> T:
        self.check()
        return self._current.agree(value, what=what)

    @override
    def exchange(
        self,
        value: T | BaseException,
        decide: Callable[[list[T]], list[R]],
        *,
        what: str = "",
        deadline_seconds: float | None = None,
    ) -> R:
        self.check()
        return self._current.exchange(value, decide, what=what, deadline_seconds=deadline_seconds)

    @override
    def combine(self, flags: Sequence[int], *, what: str = "") -> tuple[int, ...]:
        self.check()
        return self._current.combine(flags, what=what)

    @override
    def relay(self, buffer: torch.Tensor, ranks: Sequence[int]) -> None:
        self._current.relay(buffer, ranks)

    @override
    def announce(self, name: str, make: Callable[[], T], *, deadline_seconds: float) -> T:
        return self._current.announce(name, make, deadline_seconds=deadline_seconds)

    @override
    def meet(
        self,
        name: str,
        payload: bytes | BaseException,
        commit: Callable[[list[bytes]], bytes],
        *,
        deadline_seconds: float,
    ) -> bytes:
        return self._current.meet(name, payload, commit, deadline_seconds=deadline_seconds)

    @override
    def close(self) -> None:
        if os.getpid() == self._pid:  # a forked child has nothing to release
            self._current.close()

    def _follow(self, group: Any) -> None:
        """Go over to the group that there is now, or refuse on all its ranks."""
        before = self.rank, self.world_size
        first_group = self._group is None and not self._bound
        if group is None and self.world_size > 1:
            self._refusal = ConfigError(
                f"rank {self.rank}: the process group of {self.world_size} ranks was destroyed, so the ranks "
                "cannot save or load together any more: do it before destroy_process_group(), or make the "
                "group again with the same ranks"
            )
            raise self._refusal
        now = _place(group)
        problem = None
        if not first_group and now != before:
            problem = (
                f"this manager has worked as rank {before[0]} of {before[1]}, and the process group that was "
                f"made since has it as rank {now[0]} of {now[1]}"
            )
        try:
            self._take_over(group, problem)
        except ConfigError as error:
            self._refusal = error
            raise

    def _take_over(self, group: Any, problem: str | None) -> None:
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
        self.rank, self.world_size = rank, size
        self._group = None if group is None else weakref.ref(group)


def require_same_process(pid: int) -> None:
    """Refuse to work in a process that was forked from the one with this id.

    Raises:
        ConfigError: this is another process; threads and connections did not come along.
    """
    if os.getpid() != pid:
        raise ConfigError(
            f"this is process {os.getpid()}, forked from {pid}, which made the checkpoint manager: its "
            "threads and connections exist only there. Save and load in that process, or make a manager "
            "here, for another root"
        )


def _default_group() -> Any:
    """The default process group; None without one."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def _usable_group() -> Any:
    """The default process group; None without one.

    Raises:
        ConfigError: it is the parent's.
    """
    group = _default_group()
    if group is not None and _inherited is not None and _inherited() is group:
        raise ConfigError(
            f"process {os.getpid()} was forked from one that had a process group already, whose connections "
            "do not work here: start the process by spawn, or make the group after the fork. A "
            f"process that works on its own gives its manager {_ALONE}"
        )
    return group


def _place(group: Any) -> tuple[int, int]:
    """Rank and number of ranks."""
    return (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())


def _launched_ranks() -> int:
    """How many ranks the launcher says there are; 1 if it does not say."""
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("RANK", "")
    return int(size) if size.isdecimal() and rank.isdecimal() else 1


def coordinator_for_job(*, deadline_seconds: float = 1800.0) -> Coordinator:
    """Make the coordinator of all ranks of this job; collective where there is a process group."""
    return JobCoordinator(deadline_seconds=deadline_seconds)
