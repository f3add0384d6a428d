"""What a crash leaves beside the torn directories: drafts of small files, and a checkpoint set aside.

Drafts of `pins.json` and `damaged.json` are removed only under the lock that their writers hold, because
people change these files while a job owns the root. What another user owns is left alone: in a root that
others may write to, anybody can make a directory that looks like the leftover of a crash.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckpt_core.disclosure import logger_of
from ckpt_core.names import DAMAGED, MARKER, PINS, WRITER, drafted, is_probe, set_aside
from ckpt_core.storage import Storage

_logger = logger_of(__name__)
_told: set[tuple[str, str]] = set()


def without_others(storage: Storage, names: Iterable[str]) -> list[str]:
    """Those of the names that are this user's own; of each of the others a warning says so, once."""
    own: list[str] = []
    for name in names:
        owner = storage.other_owner(name)
        if owner is None:
            own.append(name)
        elif (storage.url, name) not in _told:
            _told.add((storage.url, name))
            _logger.warning(
                "%s/%s was left by a crash, or looks so, and belongs to %s: it is not touched; its owner may "
                "delete it",
                storage.url,
                name,
                owner,
            )
    return own


def bring_back(storage: Storage) -> list[str]:
    """Undo or finish a replacement that was cut short between its renames; the caller owns the root.

    Where a filesystem cannot exchange two directories in one step, the old checkpoint is set aside first. If
    nothing took its name, it gets it back.

    Returns:
        Directories of old checkpoints whose name the new one has: no longer needed.
    """
    names = [entry.name for entry in storage.list("")]
    superseded: list[str] = []
    for name in names:
        original = set_aside(name)
        if original is None:
            continue
        if original not in names:
            storage.rename(name, original)
            storage.sync_directory("")
            _logger.warning("%s/%s: a replacement was cut short, the old one is back", storage.url, original)
        elif storage.exists(f"{original}/{MARKER}"):
            superseded.append(name)
        else:
            _logger.warning(
                "%s/%s is a checkpoint that was being replaced; what has its name now is none, so both are "
                "left: move one of them",
                storage.url,
                name,
            )
    return superseded


def remove_drafts(storage: Storage) -> list[str]:
    """Remove what a crash left of the replacement of a small file; the caller owns the root."""
    names = [entry.name for entry in storage.list("") if not entry.is_directory]
    removed = without_others(storage, [name for name in names if is_probe(name) or drafted(name) == WRITER])
    _remove(storage, removed)
    for key in (PINS, DAMAGED):
        # Without listing anew under the lock, a draft of somebody who is writing just now might go.
        if any(drafted(name) == key for name in names):
            removed += _remove_idle(storage, key)
    return removed


def _remove_idle(storage: Storage, key: str) -> list[str]:
    """Drafts of `key`, if nobody is changing it; else they wait for the next time."""
    lock = storage.try_lock(key)
    if lock is None:
        return []
    try:
        found = without_others(
            storage, [entry.name for entry in storage.list("") if drafted(entry.name) == key]
        )
        _remove(storage, found)
    finally:
        lock.release()
    return found


def _remove(storage: Storage, names: Iterable[str]) -> None:
    for name in names:
        storage.delete(name)
