"""The roots that managers of this process hold, so that later ones take over from earlier ones.

A notebook cell that is run twice, k folds, a second Trainer: each makes a manager, and few close the one
before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from ckpt_core.commit import Lease, Owner
from ckpt_core.storage import Storage

TAKING: Final = threading.RLock()
"""Held while a manager takes a root."""

_held: dict[str, Holding] = {}


@final
@dataclass(frozen=True, slots=True)
class Holding:
    """A root that a manager of this process holds.

    Attributes:
        lease: of the root.
        until_idle: returns when no save of that manager is in flight.
        supersede: tells that manager that the root is not its own any more.
        pid: a forked child inherits this table, but none of the roots.
    """

    lease: Lease
    until_idle: Callable[[], None]
    supersede: Callable[[], None]
    pid: int


def hold(lease: Lease, *, until_idle: Callable[[], None], supersede: Callable[[], None]) -> None:
    """Remember who holds a root; nothing given here may keep a manager from being collected."""
    _held[lease.owner.id] = Holding(lease, until_idle, supersede, os.getpid())


def let_go(lease: Lease) -> None:
    """Forget a root that was given back."""
    _held.pop(lease.owner.id, None)


def take_from_earlier_manager(storage: Storage) -> bool:
    """Wait for the saves of a manager of this process that holds the root, then take it away from it.

    Returns:
        Whether there was one.
    """
    owner = Owner.of(storage)
    holding = None if owner is None else _held.get(owner.id)
    if holding is None or holding.pid != os.getpid():
        return False
    holding.until_idle()
    holding.supersede()
    let_go(holding.lease)
    holding.lease.release()
    return True
