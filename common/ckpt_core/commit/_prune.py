"""Removal of checkpoints: first the marker or the name, then the bytes.

A crash at any point leaves the old set of checkpoints or the new one, and at worst a torn directory that
`collect_orphans` removes:

    POSIX                                    after a crash here, on disk is
    1. rename onto `.trash-<id>-<name>`      the checkpoint, or (power loss before 2 too) torn
    2. fsync the parent                      a torn directory; its marker does not count under that name
    3. move the user's files back, fsync     the user's files in both places; `collect_orphans` continues
    4. delete it                             less of the torn directory, or nothing

    object store                             after a crash here, in the bucket is
    1. delete COMMITTED                      objects without marker, ignored by everyone
    2. delete our other objects              fewer of them, or nothing
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable
from typing import Final

from ckpt_core.commit._catalog import Catalog
from ckpt_core.commit._occupant import is_link
from ckpt_core.commit._strangers import delete_in_place, finish_merge, has_manifest, retire
from ckpt_core.disclosure import logger_of
from ckpt_core.names import (
    DAMAGED,
    JOURNAL,
    MARKER,
    PINS,
    SPARES,
    TIERS,
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
_OWNERS: Final = JOURNAL | SPARES | {TIERS, WRITER}
"""Small files that only the owner of a root writes."""

_warned: set[tuple[str, str]] = set()


def without_others(storage: Storage, names: Iterable[str]) -> list[str]:
    """Keep the names that this user owns; warn once of each other one."""
    own: list[str] = []
    for name in names:
        owner = storage.other_owner(name)
        if owner is None:
            own.append(name)
        elif (storage.url, name) not in _warned:
            _warned.add((storage.url, name))
            _logger.warning(
                "%s/%s was left by a crash, or looks so, and belongs to %s: it was not touched; its owner "
                "may delete it",
                storage.url,
                name,
                owner,
            )
    return own


def bring_back(storage: Storage) -> list[str]:
    """Undo or finish an interrupted replacement; the caller owns the root.

    Where a filesystem cannot exchange two directories in one step, the old checkpoint is moved aside first.
    If the new one did not get the name, the old one gets it back.

    Returns:
        Directories of old checkpoints whose name the new one has: no longer needed.
    """
    # Without renames nothing is moved aside, and a listing less is made.
    names = [entry.name for entry in storage.list("")] if storage.supports_rename else []
    superseded: list[str] = []
    for name in names:
        original = set_aside(name)
        if original is None:
            continue
        if original not in names:
            storage.rename(name, original)
            storage.sync_directory("")
            _logger.warning(
                "%s/%s: a replacement was interrupted; the old checkpoint has its name back",
                storage.url,
                original,
            )
        elif storage.exists(f"{original}/{MARKER}"):
            superseded.append(name)
        else:
            _logger.warning(
                "%s/%s is a checkpoint that was being replaced, and its name belongs to a directory without "
                "marker: both were kept; move one of them",
                storage.url,
                name,
            )
    return superseded


def remove_drafts(storage: Storage) -> list[str]:
    """Remove leftovers of interrupted replacements of small files.

    The caller owns the root.
    """
    names = [entry.name for entry in storage.list("") if not entry.is_directory]
    removed = without_others(storage, [name for name in names if is_probe(name) or drafted(name) in _OWNERS])
    _remove(storage, removed)
    for key in (PINS, DAMAGED):
        # Listed again under the lock: without it, a draft that another process is writing could be deleted.
        if any(drafted(name) == key for name in names):
            removed += _remove_idle(storage, key)
    return removed


def _remove_idle(storage: Storage, key: str) -> list[str]:
    """Remove drafts of `key`, unless another process is changing it."""
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
    """Remove a committed checkpoint, but not the user's files in it.

    The caller owns the root. Without a manifest, only files with names of ours are removed.
    """
    if storage.supports_rename and (has_manifest(storage, info.name) or is_link(storage, info.name)):
        _remove_directory(storage, info.name)
        return
    storage.delete(f"{info.name}/{MARKER}")
    storage.sync_directory(info.name)
    delete_in_place(storage, info.name)


def collect_orphans(storage: Storage, *, keep: Collection[str]) -> list[str]:
    """Remove leftovers of crashes, except the directories in `keep`.

    `keep` names saves in flight. Only names that this package makes are touched, and only if this user owns
    them; the user's files in them are moved back. The caller owns the root (see `Lease`). An interrupted
    replacement is undone (see `bring_back`), and an interrupted commit is completed (see `finish_merge`).
    Uploads that were never completed are aborted, so that a job that was replaced cannot complete them.

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
    """Rename the directory to a trash name in one step, then delete it.

    A job that was replaced and has not noticed may be about to commit this directory. It then finds no
    directory, and cannot commit one that is half deleted.
    """
    original = original_name(name)
    trash = trash_name(original, secrets.token_hex(4))
    storage.rename(name, trash)
    storage.sync_directory("")
    retire(storage, trash, original)


def _is_ours(key: str) -> bool:
    directory, _, path = key.partition("/")
    return bool(path) and parse_step_name(directory) is not None
