"""What a rank does whose peer or store fails at one place: what it is told, and whether it can go on."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

import torch

from benchmarks.crashing import forks
from ckpt_core import CheckpointManager, EverySeconds, EverySteps, KeepLatest
from ckpt_core.errors import CheckpointError
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage

Kind = Literal[
    "dies",
    "is stopped",
    "is busy",
    "raises",
    "store dies",
    "store stands still",
    "store file is removed",
    "connections are reset",
]

DEADLINE_SECONDS: Final = 6.0
FIRST: Final = 2
"""The last step that was acknowledged before anything goes wrong."""
AGAIN: Final = 100
"""The step that is saved when the fault is over."""

_TENSORS: Final = 6
_ATTEMPTS: Final = 8
_PAUSE_SECONDS: Final = 0.25

STORAGE_PLACES: Final = {
    "open": ("make_directory", "*step-000000003*"),
    "write tensors": ("create", "*step-000000003*.distcp"),
    "write small files": ("create", "*step-000000003*.json"),
    "sync": ("sync_directory", "*step-000000003*"),
    "commit: manifest": ("create", "*step-000000003*/manifest.json"),
    "commit: marker": ("create", "*step-000000003*/COMMITTED"),
    "commit: rename": ("rename", "*step-000000003* -> step-000000003"),
    "prune": ("rename", "step-000000001 -> *"),
    "load: look": ("list", ""),
    "load: open": ("open", "step-000000002/*"),
    "load: verify": ("open_ranges", "step-000000002/*.distcp"),
    "load: fetch": ("read_into", "step-000000002/*.distcp"),
}
"""Place -> the storage operation before which the fault strikes, of those that go by one."""

_READS_BEFORE_FETCH: Final = {0: 2}
"""How often a rank reads of a data file to verify it: once, and the lowest once more."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One experiment.

    Attributes:
        place: where the victim is when it fails.
        kind: how it fails.
        victim: its rank; -1 if it is no rank.
        world_size: how many ranks.
    """

    place: str
    kind: Kind
    victim: int
    world_size: int = 2

    @property
    def silences(self) -> bool:
        """Whether the victim says nothing any more until the fault is over."""
        return self.kind in {"dies", "is stopped", "is busy"}

    @property
    def is_lasting(self) -> bool:
        """Whether no save of this job can succeed any more."""
        return self.kind in {"dies", "store dies", "store file is removed"}


@final
class Gate:
    """Opened once, by the parent, for all its children."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def enter_child(self) -> None:
        """To be called in every child: else the gate stays shut."""
        os.close(self._writer)

    def open(self) -> None:
        """By the parent, once."""
        os.close(self._writer)

    def is_open(self) -> bool:
        """Whether the parent has opened it."""
        return bool(select.select([self._reader], [], [], 0)[0])

    def wait(self) -> None:
        """Return when the parent has opened it."""
        select.select([self._reader], [], [])

    def discard(self) -> None:
        """Give the descriptors back."""
        for descriptor in (self._reader, self._writer):
            with contextlib.suppress(OSError):
                os.close(descriptor)


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
    )


def prepare(root: Path) -> None:
    """A root with a little history, written by one process."""
    with CheckpointManager(LocalStorage(root)) as checkpoints:
        for step in range(1, FIRST + 1):
            checkpoints.save(step, state_of(step)).result()


@final
class Strike:
    """How the victim fails, once, when it is called."""

    def __init__(self, kind: Kind, gate: Gate, tell: forks.Tell) -> None:
        self._kind = kind
        self._gate = gate
        self._tell = tell
        self._struck = False

    def __call__(self, *_: Any) -> None:
        """Fail, the first time."""
        if self._struck:
            return
        self._struck = True
        self._tell({"struck": self._kind})
        match self._kind:
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "is busy":
                while not self._gate.is_open():
                    pass
            case "raises":
                raise RuntimeError("broken on purpose")
            case _:
                pass  # it is not this rank that fails


@final
class _Stateful:
    """Something whose state cannot be had without the strike."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike

    def state_dict(self) -> dict[str, Any]:
        """As a scheduler or loader does it."""
        self._strike()
        return {"x": torch.ones(1)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing is kept."""


@final
class Life:
    """One rank, from joining the job to closing its manager; everything it is told it tells its parent.

    Args:
        cell: what goes wrong.
        rank: of this process.
        root: of the checkpoints.
        begin: opened when all ranks may save.
        end: opened when the fault is over.
        tell: to the parent.
    """

    def __init__(
        self, cell: Cell, rank: int, root: Path, *, begin: Gate, end: Gate, tell: forks.Tell
    ) -> None:
        self._cell = cell
        self._rank = rank
        self._root = root
        self._begin = begin
        self._end = end
        self._tell = tell
        self._strike = Strike(cell.kind, end, tell) if rank == cell.victim else None
        self._step = FIRST

    def live(self) -> None:
        """Load, save until something goes wrong, wait for the parent, and go on if all ranks are there."""
        logging.disable(logging.CRITICAL)
        checkpoints = manager(self._storage())
        state = state_of(0)
        if not self._told("load", lambda: checkpoints.resume(state)):
            if not is_exact(state, FIRST):
                raise AssertionError("other values than were saved")
            self._tell({"loaded": self._rank})
            self._begin.wait()
            if self._cell.kind == "connections are reset" and self._strike is not None:
                self._tell({"struck": reset_connections()})
            self._save_until_refused(checkpoints)
        self._tell({"waits": self._rank})
        self._end.wait()
        self._go_on(checkpoints)
        self._told("close", checkpoints.close)

    def _save_until_refused(self, checkpoints: CheckpointManager) -> None:
        for _ in range(3):
            self._step += 1
            if self._told("save", lambda: self._save(checkpoints)):
                break

    def _storage(self) -> Storage:
        storage = LocalStorage(self._root)
        where = STORAGE_PLACES.get(self._cell.place)
        if self._strike is None or where is None:
            return storage
        nth = _READS_BEFORE_FETCH.get(self._rank, 1) if self._cell.place == "load: fetch" else 0
        return FaultyStorage(storage, [Fault(method=where[0], key=where[1], nth=nth, before=self._strike)])

    def _state(self) -> dict[str, Any]:
        strike = self._strike if self._cell.place == "capture" and self._strike is not None else _nothing
        return {**state_of(self._step), "scheduler": _Stateful(strike)}

    def _save(self, checkpoints: CheckpointManager) -> None:
        if self._cell.place == "decide" and self._strike is not None:
            self._strike()
        if checkpoints.due(self._step) is None:
            raise AssertionError("every step is due")
        handle = checkpoints.save(self._step, self._state())
        assert handle is not None
        self._tell({"committed": handle.result().step})

    def _told(self, what: str, act: Callable[[], Any]) -> bool:
        """Do something; whether it was refused. Tells how long it took, and with which error."""
        began = time.monotonic()
        try:
            act()
        except CheckpointError as error:
            told = {"error": type(error).__name__, "text": str(error)}
        except RuntimeError as error:
            told = {"error": type(error).__name__, "text": str(error)}
        else:
            told = {}
        self._tell({"rank": self._rank, "what": what, "seconds": time.monotonic() - began, **told})
        return bool(told)

    def _go_on(self, checkpoints: CheckpointManager) -> None:
        attempts = 1 if self._cell.is_lasting else _ATTEMPTS
        self._step = AGAIN
        for _ in range(attempts):
            if not self._told("again", lambda: self._save(checkpoints)):
                return
            time.sleep(_PAUSE_SECONDS)  # as between two steps: what was given up may still be ending


def _nothing() -> None:
    pass


def reset_connections() -> int:
    """Shut the TCP connections of this process to other ranks, as a network does that fails; how many."""
    store, count = int(os.environ["STORE_PORT"]), 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as duplicate:
            if duplicate.family in {socket.AF_INET, socket.AF_INET6} and duplicate.getpeername()[1] != store:
                duplicate.shutdown(socket.SHUT_RDWR)
                count += 1
    return count
