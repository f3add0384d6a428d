"""Where a process is killed: at the nth system call that changes the disk."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Generic, Literal, TypeVar, final

from ckpt_core.testing import Fault, Operation
from tests.support.system_calls import CHANGING, SystemCalls

Scene = TypeVar("Scene")

When = Literal["before", "after"]

NO_EXCHANGE: Final = Fault(method="exchange", error=OSError(errno.EINVAL, os.strerror(errno.EINVAL)))
"""A filesystem that cannot exchange two names in one step, as many over a network cannot."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A system call that changes the disk, as a rehearsal saw it.

    Attributes:
        method: as `SystemCalls` names it.
        key: as `SystemCalls` names it; random parts are others the next time.
        succeeded: whether it did; if not, there is nothing after it.
        deed: what of a job it belongs to.
    """

    method: str
    key: str
    succeeded: bool
    deed: str

    @property
    def moments(self) -> tuple[When, ...]:
        """When a process can be killed at it."""
        return ("before", "after") if self.succeeded else ("before",)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankCall(Generic[Scene]):
    """Where a job is killed: at the nth call of one rank, before it or after it."""

    scene: Scene
    rank: int
    number: int
    when: When
    call: Call

    def __str__(self) -> str:
        return f"{self.scene}: {self.where}"

    @property
    def sweep(self) -> str:
        """The row of the table."""
        return str(self.scene)

    @property
    def where(self) -> str:
        """The place without the scene."""
        return f"rank {self.rank}, {self.when} {self.number}, {self.call.method} {self.call.key}"


def rank_calls(scene: Scene, recorded: Sequence[Sequence[Mapping[str, Any]]]) -> list[RankCall[Scene]]:
    """Every point of a rehearsal, of whose ranks each has recorded its calls."""
    return [
        RankCall(scene=scene, rank=rank, number=number, when=when, call=call)
        for rank, calls in enumerate(recorded)
        for number, call in enumerate(Call(**fields) for fields in calls)
        for when in call.moments
    ]


# What the key of a call says about the deed it belongs to; the first that fits.
_DEEDS: Final = {
    ".trash-4567cdef": "collect orphans",
    ".89ab0123.tmp": "collect orphans",
    ".trash-": "prune",
    "last.ckpt": "replace",
    "theirs": "save among the user's files",
    "step-000000003": "save",
    "damaged.json": "mark",
    "writer.json": "take and give back the root",
    "pins.json": "collect orphans",
    "step-00000000": "collect orphans",
}


def _deed(key: str, before: str) -> str:
    """The root is made durable after every deed in it."""
    return next((deed for part, deed in _DEEDS.items() if part in key), before)


@final
class Recorder:
    """Notes every call of a rehearsal."""

    def __init__(self, root: Path, faults: Sequence[Fault] = ()) -> None:
        self._succeeded: set[int] = set()
        self._calls = SystemCalls(root, [*faults, Fault(after=lambda done: self._succeeded.add(done.number))])

    def record(self, act: Callable[[], None]) -> list[Call]:
        """What `act` does to the disk."""
        with self._calls:
            act()
        deed, found = "take and give back the root", list[Call]()
        for each in self._calls.operations:
            deed = _deed(each.key, deed)
            if each.method in CHANGING:
                done = each.number in self._succeeded
                found.append(Call(method=each.method, key=each.key, succeeded=done, deed=deed))
        return found


@final
class Trap:
    """Kills at the nth call that changes the disk, before or after it.

    Args:
        nth: counted from 0 in this process; None for a process that only dies with the others.
        when: before the call, or after it.
        everyone: kill the whole process group, not only this process.
        witness: other faults: a disk that cannot do everything, a log of what was done.
    """

    def __init__(self, nth: int | None, when: When, *, everyone: bool, witness: Sequence[Fault] = ()) -> None:
        self._left = -1 if nth is None else nth
        self._when = when
        self._number: int | None = None
        self._everyone = everyone
        self._witness = witness

    def spring(self, root: Path, act: Callable[[], None]) -> None:
        """Do something and be killed in the middle of it."""
        # It must see a call before a fault refuses it, and be done with a call after it was witnessed.
        faults = [Fault(before=self._before), *self._witness, Fault(after=self._after)]
        with SystemCalls(root, faults):
            act()

    def _before(self, operation: Operation) -> None:
        if operation.method not in CHANGING:
            return
        if self._left == 0 and self._number is None:
            self._number = operation.number
            if self._when == "before":
                self._kill()
        self._left -= 1

    def _after(self, operation: Operation) -> None:
        if operation.number == self._number:
            self._kill()

    def _kill(self) -> None:
        os.killpg(0, signal.SIGKILL) if self._everyone else os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
