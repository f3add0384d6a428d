"""Test tools for users: a suite for storages, and a storage that fails.

Nothing that is shipped to run imports this wing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_core.testing._faults import Fault, FaultyStorage, Operation

if TYPE_CHECKING:
    from ckpt_core.testing._storage_suite import StorageTests

__all__ = ["Fault", "FaultyStorage", "Operation", "StorageTests"]


def __getattr__(name: str) -> Any:
    # The conformance suite needs pytest; faults are useful without it.
    if name == "StorageTests":
        from ckpt_core.testing._storage_suite import StorageTests

        return StorageTests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
