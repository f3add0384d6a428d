"""What a rank does whose storage fails below it, at one system call; it tells its parent what it is told."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, final

from benchmarks.crashing import forks
from benchmarks.crashing.fault_cells import Cell
from benchmarks.crashing.rank_lives import AGAIN, FIRST, Gate, is_exact, manager, state_of
from ckpt_core import CheckpointManager
from ckpt_core.errors import CheckpointError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, Operation, SystemCalls

_ATTEMPTS: Final = 8
_PAUSE_SECONDS: Final = 0.25
_BEFORE: Final = ("load", "take the root")


@final
class Life:
    """One rank, from joining the job to closing its manager.

    Args:
        cell: what goes wrong.
        rank: of this process.
        root: of the checkpoints.
        end: opened when the fault is over.
        tell: to the parent.
    """

    def __init__(self, cell: Cell, rank: int, root: Path, *, end: Gate, tell: forks.Tell) -> None:
        self._cell = cell
        self._rank = rank
        self._root = root
        self._end = end
        self._tell = tell
        self._calls = SystemCalls(root)
        self._struck = False

    def live(self) -> None:
        """Load and save while storage is broken, and again when it is not."""
        logging.disable(logging.CRITICAL)
        with self._calls:
            checkpoints = manager(LocalStorage(self._root), self._cell.deadline_seconds)
            early = self._cell.place.startswith(_BEFORE)
            if early:
                self._break()
            self._load(checkpoints, "load" if early else "")
            if not early:
                self._break()
                self._told("save", lambda: self._save(checkpoints, FIRST + 1))
            if self._cell.hangs and self._cell.world_size == 1:
                self._told("close", checkpoints.close)
            self._tell({"waits": self._rank})
            self._end.wait()
            self._calls.inject(())
            self._go_on(checkpoints, load=early)
            self._told("close", checkpoints.close)

    def _break(self) -> None:
        if self._rank not in self._cell.ranks:
            return
        if self._cell.place == "root after the rename":
            rename = Fault(method="rename", key=".incomplete-*-step-* -> step-*", after=self._break_root)
            self._calls.inject([rename])
        else:
            self._calls.inject(self._faults())

    def _break_root(self, _: Operation) -> None:
        self._calls.inject(self._faults())

    def _faults(self) -> Sequence[Fault]:
        cell = self._cell
        error = OSError(cell.number, cell.text) if cell.number else None
        return [
            Fault(
                method=cell.method,
                key=cell.key,
                before=self._strike,
                error=error,
                short_bytes=cell.short_bytes or None,
            )
        ]

    def _strike(self, _: Operation) -> None:
        if not self._struck:
            self._struck = True
            self._tell({"struck": self._rank})
        if self._cell.hangs:
            self._end.wait()

    def _load(self, checkpoints: CheckpointManager, what: str) -> None:
        state = state_of(0)
        refused = self._told(what, lambda: checkpoints.resume(state))
        step = FIRST - 1 if what and self._cell.verdict == "passed over" else FIRST
        if not refused and not is_exact(state, step):
            raise AssertionError(f"other values than those of step {step}")
        if refused and not what:
            raise AssertionError("the root could not be loaded from before anything was broken")

    def _save(self, checkpoints: CheckpointManager, step: int) -> None:
        handle = checkpoints.save(step, state_of(step))
        assert handle is not None
        self._tell({"committed": handle.result().step})
        # The prune behind the commit belongs to it; what becomes of that is not told here.
        checkpoints.wait()

    def _go_on(self, checkpoints: CheckpointManager, *, load: bool) -> None:
        for _ in range(_ATTEMPTS):
            if not (load and self._told("again", lambda: self._load(checkpoints, ""))) and not self._told(
                "again", lambda: self._save(checkpoints, AGAIN)
            ):
                return
            time.sleep(_PAUSE_SECONDS)  # as between two steps: what was given up may still be ending

    def _told(self, what: str, act: Callable[[], Any]) -> bool:
        """Do something; whether it was refused. Tells how long it took, and with which error."""
        began = time.monotonic()
        try:
            act()
        except (CheckpointError, OSError) as error:
            told = {
                "error": type(error).__name__,
                "text": str(error),
                "in_doubt": bool(getattr(error, "in_doubt", False)),
            }
        else:
            told = {}
        self._tell({"rank": self._rank, "what": what, "seconds": time.monotonic() - began, **told})
        return bool(told)
