"""What goes wrong at which operation, and the log of all operations."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One thing asked of a storage; `key` of a rename is `source -> target`."""

    number: int
    method: str
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens at which operations.

    Attributes:
        method: pattern of the method (`fnmatch`).
        key: pattern of the key (`fnmatch`).
        nth: only at the nth of the matching operations, counted from 0; None for all of them.
        before: called before the operation.
        error: raised instead of the operation.
        after: called when the operation has succeeded.
    """

    method: str = "*"
    key: str = "*"
    nth: int | None = None
    before: Callable[[Operation], None] | None = None
    error: BaseException | None = None
    after: Callable[[Operation], None] | None = None

    def matches(self, operation: Operation) -> bool:
        """Whether the patterns fit, whichever the nth."""
        return fnmatchcase(operation.method, self.method) and fnmatchcase(operation.key, self.key)


def kill_process(operation: Operation) -> None:
    """As `before` or `after` of a fault: SIGKILL this process, as a preemption or the OOM killer does."""
    del operation
    os.kill(os.getpid(), signal.SIGKILL)


@final
class Script:
    """The faults to come and the log of what has come. Any thread may perform operations."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._guard = threading.Lock()
        self._operations: list[Operation] = []
        self.inject(faults)

    @property
    def operations(self) -> tuple[Operation, ...]:
        """What was asked so far, faults included, in order."""
        with self._guard:
            return tuple(self._operations)

    def inject(self, faults: Sequence[Fault]) -> None:
        """From now on these faults and no others, each counted from 0."""
        with self._guard:
            self._faults = tuple(faults)
            self._seen = [0] * len(self._faults)

    @contextmanager
    def operation(self, method: str, key: str) -> Generator[Sequence[Fault]]:
        """Log an operation and apply its faults, which the context gives, around the block."""
        operation, due = self._register(method, key)
        for fault in due:
            if fault.before is not None:
                fault.before(operation)
            if fault.error is not None:
                raise fault.error
        yield due
        for fault in due:
            if fault.after is not None:
                fault.after(operation)

    def _register(self, method: str, key: str) -> tuple[Operation, Sequence[Fault]]:
        with self._guard:
            operation = Operation(number=len(self._operations), method=method, key=key)
            self._operations.append(operation)
            matching = [index for index, fault in enumerate(self._faults) if fault.matches(operation)]
            due = [self._faults[i] for i in matching if self._faults[i].nth in {None, self._seen[i]}]
            for index in matching:
                self._seen[index] += 1
            return operation, due
