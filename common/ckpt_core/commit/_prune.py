"""How a checkpoint ceases to be: what makes it one goes first, its bytes afterwards.

A crash at any point leaves the old set of checkpoints or the new one, and at worst a torn directory that
`collect_orphans` removes:

    POSIX                                    after a crash here, on disk is
    1. rename onto `<name>.trash-<id>`       the checkpoint, or (power loss before 2 too) torn
    2. fsync the parent                      a torn directory; its marker does not count under that name
    3. delete it                             less of the torn directory, or nothing

    object store                             after a crash here, in the bucket is
    1. delete COMMITTED                      objects without marker, ignored by everyone
    2. delete the rest                       fewer of them, or nothing
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from ckpt_core.commit._catalog import Catalog
from ckpt_core.names import MARKER, trash_name
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo


def remove(storage: Storage, info: CheckpointInfo) -> None:
    """Remove a committed checkpoint; the caller owns the root (see `Lease`)."""
    if storage.supports_rename:
        trash = trash_name(info.name, secrets.token_hex(4))
        storage.rename(info.name, trash)
        storage.sync_directory("")
        storage.delete(trash)
    else:
        storage.delete(f"{info.name}/{MARKER}")
        storage.delete(info.name)


def collect_orphans(storage: Storage, *, keep: Collection[str]) -> list[str]:
    """Remove what crashes left behind, but the directories in `keep`: those of saves in flight.

    Only names that this package makes are touched; the caller owns the root (see `Lease`).

    Returns:
        The names removed.
    """
    orphans = [name for name in Catalog(storage).torn() if name not in keep]
    for name in orphans:
        storage.delete(name)
    return orphans
