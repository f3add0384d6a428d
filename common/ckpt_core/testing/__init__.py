"""Test tools for users: a storage suite, a faulty storage, ranks, a fake clock.

Nothing that is shipped to run imports this wing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_core.testing._clock import FakeClock
from ckpt_core.testing._faults import FaultyStorage
from ckpt_core.testing._ranks import Nodes, RanksFailedError, run_ranks
from ckpt_core.testing._script import Fault, Operation, kill_process

if TYPE_CHECKING:
    from ckpt_core.testing._storage_suite import StorageTests

__all__ = [
    "FakeClock",
    "Fault",
    "FaultyStorage",
    "Nodes",
    "Operation",
    "RanksFailedError",
    "StorageTests",
    "kill_process",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    # The conformance suite needs pytest; faults and ranks are useful without it.
    if name == "StorageTests":
        from ckpt_core.testing._storage_suite import StorageTests

        return StorageTests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
