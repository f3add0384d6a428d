"""Takes what has been imported so far out of all later garbage collections.

Each full collection would look at some million objects of torch and the hosts, and in a rank, which is a
fork, copy the memory that they are in. The fork server of `tests/conftest.py` imports this module last, so
that its ranks wait for the disk no more than the tests do.
"""

from __future__ import annotations

import gc
import sys
from functools import cache

from tests.kit.disk import wait_for_no_disk

_REGISTRIES = ("lightning.fabric.utilities.registry", "lightning_fabric.utilities.registry")


def freeze() -> None:
    gc.collect()
    gc.freeze()


def remember_entry_points() -> None:
    """Read the entry points of two hundred distributions once, and not for every Trainer."""
    for name in _REGISTRIES:
        if name in sys.modules:
            registry = vars(sys.modules[name])
            registry["entry_points"] = cache(registry["entry_points"])


wait_for_no_disk()
remember_entry_points()
freeze()
