"""One rank of a job in which something goes wrong: what it does, and what it tells its parent."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, final

import torch

from ckpt_core import CheckpointManager, EverySeconds, EverySteps, KeepLatest
from ckpt_core.errors import CheckpointError
from ckpt_core.storage import LocalStorage, Storage
from tests.reliability import forks

DEADLINE_SECONDS: Final = 6.0
FIRST: Final = 2
"""The last step that was acknowledged before anything goes wrong."""
AGAIN: Final = 100
"""The step that is saved when the fault is over."""

_TENSORS: Final = 6
_ATTEMPTS: Final = 8
_PAUSE_SECONDS: Final = 0.25


class Trouble:
    """What goes wrong on one rank: nothing, unless a method is overridden."""

    def watching(self) -> AbstractContextManager[Any]:
        """Entered for the whole life."""
        return nullcontext()

    def around(self, storage: Storage) -> Storage:
        """The storage as this rank has it."""
        return storage

    def before_loading(self) -> None:
        """The manager is made, nothing is loaded."""

    def before_saving(self) -> None:
        """All ranks have loaded."""

    def deciding(self) -> None:
        """A save is about to be decided on."""

    def capturing(self) -> None:
        """The state is about to be read."""

    def end(self) -> None:
        """The fault is over."""


class Case(ABC):
    """One experiment: what goes wrong where, and what must come of it.

    Attributes:
        world_size: how many ranks.
        saves: how many steps are saved while something is wrong, until one is refused.
        waits: whether a save counts when the prune behind it has ended, too.
        reloads: whether the state is loaded once more when the fault is over.
        closes_at_once: whether the manager is closed before the fault is over, and nothing is saved after it.
        lasts: whether no save of this job can succeed any more.
        strikes: whether a rank tells when it is struck.
        store_fault: what happens to the job's Store: `is killed`, `is stopped`, `is removed`; "" for nothing.
    """

    world_size: int
    saves: int = 3
    waits: bool = False
    reloads: bool = False
    closes_at_once: bool = False
    lasts: bool = False
    strikes: bool = True
    store_fault: str = ""

    def __str__(self) -> str:
        return f"{self.sweep}, {self.point}"

    @property
    @abstractmethod
    def sweep(self) -> str:
        """The row of the table."""

    @property
    @abstractmethod
    def point(self) -> str:
        """Where in that row."""

    @property
    def deadline_seconds(self) -> float:
        """Of the job."""
        return DEADLINE_SECONDS

    @property
    def dying(self) -> frozenset[int]:
        """Ranks that are killed."""
        return frozenset()

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that say nothing until the fault is over."""
        return frozenset()

    def step_loaded(self, *, struck: bool) -> int:
        """The step that a load gives, if it is not refused."""
        del struck
        return FIRST

    @abstractmethod
    def trouble(self, rank: int, root: Path, end: forks.Gate, tell: forks.Tell) -> Trouble:
        """What goes wrong on a rank."""

    @abstractmethod
    def complaints(self, rank: int, told: Sequence[dict[str, Any]], root: str) -> Collection[str]:
        """What a rank that lives on should have been told, and was not."""


def state_of(step: int) -> dict[str, Any]:
    """Plain tensors, of which every rank writes some; all depend on the step."""
    return {f"w{i}": torch.full((64, 64), float(step * 10 + i)) for i in range(_TENSORS)}


def is_exact(state: dict[str, Any], step: int) -> bool:
    """Whether a state is that of a step."""
    return all(torch.equal(value, state[name]) for name, value in state_of(step).items())


def manager(storage: Storage | Path, deadline_seconds: float = DEADLINE_SECONDS) -> CheckpointManager:
    """What ranks save with: a policy that asks all of them at every step."""
    root = LocalStorage(storage) if isinstance(storage, Path) else storage
    return CheckpointManager(
        root,
        save=EverySteps(1) | EverySeconds(3600.0),
        keep=KeepLatest(2),
        deadline_seconds=deadline_seconds,
        journal=False,  # operations are numbered, and it would make its own among them
    )


def prepare(root: Path) -> None:
    """A root with a little history, written by one process."""
    with CheckpointManager(LocalStorage(root)) as checkpoints:
        for step in range(1, FIRST + 1):
            checkpoints.save(step, state_of(step)).result()


@final
class _Stateful:
    """Something whose state cannot be had without the trouble."""

    def __init__(self, trouble: Callable[[], None]) -> None:
        self._trouble = trouble

    def state_dict(self) -> dict[str, Any]:
        """As a scheduler or loader does it."""
        self._trouble()
        return {"x": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""


@final
class Life:
    """One rank, from joining the job to closing its manager; it tells its parent what each call came to.

    Args:
        case: what goes wrong.
        rank: of this process.
        root: of the checkpoints.
        begin: opened when all ranks may save.
        end: opened when the fault is over.
        tell: to the parent.
    """

    def __init__(
        self, case: Case, rank: int, root: Path, *, begin: forks.Gate, end: forks.Gate, tell: forks.Tell
    ) -> None:
        self._case = case
        self._rank = rank
        self._root = root
        self._begin = begin
        self._end = end
        self._tell = tell
        self._trouble = case.trouble(rank, root, end, tell)

    def live(self) -> None:
        """Load, save until something goes wrong, wait for the parent, and go on if all ranks are there."""
        logging.disable(logging.CRITICAL)
        with self._trouble.watching():
            storage = self._trouble.around(LocalStorage(self._root))
            checkpoints = manager(storage, self._case.deadline_seconds)
            self._trouble.before_loading()
            if not self._told("load", lambda: self._load(checkpoints, struck=True)):
                self._tell({"loaded": self._rank})
                self._begin.wait()
                self._trouble.before_saving()
                steps = range(FIRST + 1, FIRST + 1 + self._case.saves)
                any(self._told("save", lambda step=step: self._save(checkpoints, step)) for step in steps)
            if self._case.closes_at_once:
                self._told("close", checkpoints.close)
            self._tell({"waits": self._rank})
            self._end.wait()
            self._trouble.end()
            self._go_on(checkpoints)
            self._told("close", checkpoints.close)

    def _load(self, checkpoints: CheckpointManager, *, struck: bool) -> None:
        state = state_of(0)
        checkpoints.resume(state)
        if not is_exact(state, step := self._case.step_loaded(struck=struck)):
            raise AssertionError(f"other values than those of step {step}")

    def _save(self, checkpoints: CheckpointManager, step: int) -> None:
        self._trouble.deciding()
        if checkpoints.due(step) is None:
            raise AssertionError("every step is due")
        state = {**state_of(step), "scheduler": _Stateful(self._trouble.capturing)}
        handle = checkpoints.save(step, state)
        assert handle is not None
        self._tell({"committed": handle.result().step})
        if self._case.waits:
            checkpoints.wait()

    def _go_on(self, checkpoints: CheckpointManager) -> None:
        attempts = 0 if self._case.closes_at_once else 1 if self._case.lasts else _ATTEMPTS
        for _ in range(attempts):
            unloaded = self._case.reloads and self._told(
                "again", lambda: self._load(checkpoints, struck=False)
            )
            if not unloaded and not self._told("again", lambda: self._save(checkpoints, AGAIN)):
                return
            time.sleep(_PAUSE_SECONDS)  # as between two steps: what was given up may still be ending

    def _told(self, what: str, act: Callable[[], Any]) -> bool:
        """Do something; whether it was refused. Tells how long it took, and with which error."""
        began = time.monotonic()
        try:
            act()
        except (CheckpointError, OSError, RuntimeError) as error:
            told = {
                "error": type(error).__name__,
                "text": str(error),
                "ours": isinstance(error, CheckpointError),
                "in_doubt": bool(getattr(error, "in_doubt", False)),
            }
        else:
            told = {}
        self._tell({"rank": self._rank, "what": what, "seconds": time.monotonic() - began, **told})
        return bool(told)
