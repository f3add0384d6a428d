"""Roots held by managers of this process, and the check that ranks share one root."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from ckpt_core.commit import Lease, Owner
from ckpt_core.errors import ConfigError
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
        until_idle: blocks until no save of that manager is in flight.
        supersede: notes in that manager that it has lost the root.
        pid: of the holder: a forked child inherits this table, but none of the roots.
    """

    lease: Lease
    until_idle: Callable[[], None]
    supersede: Callable[[], None]
    pid: int


def hold(lease: Lease, *, until_idle: Callable[[], None], supersede: Callable[[], None]) -> None:
    """Record a held root; the arguments must not keep a manager from being collected."""
    _held[lease.owner.id] = Holding(lease, until_idle, supersede, os.getpid())


def let_go(lease: Lease) -> None:
    """Forget a released root."""
    _held.pop(lease.owner.id, None)


def take_from_earlier_manager(storage: Storage) -> bool:
    """Wait for this process's earlier manager of the root, then take the root from it.

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


def sees_claim(storage: Storage, owner_id: str, urls: Sequence[str], *, rank: int) -> bool:
    """Return whether this rank's root is the coordinator's.

    Args:
        storage: this rank's root.
        owner_id: of the claim that the coordinator has just written to its root.
        urls: of every rank's root.
        rank: of this process.
    """
    if rank == 0 or (len(set(urls)) == 1 and not storage.supports_rename):
        return True  # a bucket is the same everywhere
    try:
        owner = Owner.of(storage)
    except OSError:
        return False  # the other ranks wait; `form_groups` writes there, and tells all of them why it cannot
    return owner is not None and owner.id == owner_id


def refuse_other_roots(sees: Sequence[bool], urls: Sequence[str]) -> None:
    """Refuse roots of different names that are not the same place.

    Raises:
        ConfigError: there are such.
    """
    strays = [rank for rank, seen in enumerate(sees) if not seen]
    if strays and len(set(urls)) > 1:
        named = "; ".join(f"rank {rank} to {urls[rank]}" for rank in strays[:4])
        raise ConfigError(
            f"ranks would write to different places: rank 0 to {urls[0]}, {named}. Give every rank the same "
            "root: one that all of them reach, or the same path on a disk of each node; nothing was saved"
        )
