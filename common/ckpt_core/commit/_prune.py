"""How a checkpoint ceases to be: what makes it one goes first, its bytes afterwards.

A crash at any point leaves the old set of checkpoints or the new one, and at worst a torn directory that
`collect_orphans` removes:

    POSIX                                    after a crash here, on disk is
    1. rename onto `.trash-<id>-<name>`      the checkpoint, or (power loss before 2 too) torn
    2. fsync the parent                      a torn directory; its marker does not count under that name
    3. move what is not ours back, fsync     the user's files in both places; `collect_orphans` goes on
    4. delete it                             less of the torn directory, or nothing

    object store                             after a crash here, in the bucket is
    1. delete COMMITTED                      objects without marker, ignored by everyone
    2. delete what else is ours              fewer of them, or nothing
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable

from ckpt_core.commit._catalog import Catalog
from ckpt_core.commit._occupant import is_link
from ckpt_core.commit._strangers import delete_in_place, finish_merge, has_manifest, retire
from ckpt_core.disclosure import logger_of
from ckpt_core.names import (
    DAMAGED,
    MARKER,
    PINS,
    WRITER,
    drafted,
    is_probe,
    is_trash,
    original_name,
    parse_step_name,
    set_aside,
    trash_name,
)
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

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


def remove(storage: Storage, info: CheckpointInfo) -> None:
    """Remove a committed checkpoint, but not what others put beside its files; the caller owns the root.

    Where no manifest tells which files are ours, those go that have names that only we give.
    """
    if storage.supports_rename and (has_manifest(storage, info.name) or is_link(storage, info.name)):
        _remove_directory(storage, info.name)
        return
    storage.delete(f"{info.name}/{MARKER}")
    storage.sync_directory(info.name)
    delete_in_place(storage, info.name)


def collect_orphans(storage: Storage, *, keep: Collection[str]) -> list[str]:
    """Remove what crashes left behind, but the directories in `keep`: those of saves in flight.

    Only names that this package makes are touched, and only if this user owns them; files in them that are
    not the checkpoint's are put back where they were. The caller owns the root (see `Lease`). A checkpoint
    that was being replaced, and has lost its name to nobody, gets it back (see `bring_back`); a commit that
    was cut short half-way is finished (see `finish_merge`). Uploads that were never completed go too, which
    also keeps a job that was replaced from completing them.

    Returns:
        The names removed, and those of the checkpoints that the uploads were for.
    """
    superseded = without_others(storage, bring_back(storage))
    orphans = without_others(storage, [name for name in Catalog(storage).torn() if name not in keep])
    for name in (*superseded, *orphans):
        if not storage.supports_rename:
            delete_in_place(storage, name)
        elif is_trash(name):
            retire(storage, name, original_name(name))
        elif not finish_merge(storage, name, original_name(name)):
            _remove_directory(storage, name)
    unfinished = storage.abandon_uploads(lambda key: _is_ours(key) and key.partition("/")[0] not in keep)
    of_uploads = {key.partition("/")[0] for key in unfinished}
    return sorted({*superseded, *orphans, *of_uploads, *remove_drafts(storage)})


def _remove_directory(storage: Storage, name: str) -> None:
    """Take the name away in one step, then delete.

    A job that was replaced and does not know it yet may be about to commit this directory: it then finds no
    directory, where it would else make a checkpoint of one that is half deleted.
    """
    original = original_name(name)
    trash = trash_name(original, secrets.token_hex(4))
    storage.rename(name, trash)
    storage.sync_directory("")
    retire(storage, trash, original)


def _is_ours(key: str) -> bool:
    directory, _, path = key.partition("/")
    return bool(path) and parse_step_name(directory) is not None
