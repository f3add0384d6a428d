"""Removal: first the marker or the name, then our bytes; the user's files stay.

Our files are those that the manifest lists, the manifest, its signature and the marker. All others belong to
the user, whenever they were added. They are moved by renames only, links as links, and no file overwrites
another: if both have the same name, the user's file is kept beside ours under a name from `beside_name`.

A crash at any point leaves the old set of checkpoints or the new one, and at worst a directory that
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

import json
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final

from ckpt_core.commit._catalog import Catalog, forget_notes
from ckpt_core.commit._manifest import MAX_MANIFEST_BYTES, Manifest, join
from ckpt_core.commit._occupant import Occupant, is_link, occupant, quarantine
from ckpt_core.crew import run_all
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError
from ckpt_core.formats.chunks import decode_table
from ckpt_core.names import (
    DAMAGED,
    MANIFEST,
    MARKER,
    OWN,
    PINS,
    PLAIN,
    SIGNATURE,
    beside_name,
    drafted,
    is_own_file,
    is_own_json,
    is_probe,
    is_trash,
    original_name,
    parse_step_name,
    replaced_name,
    set_aside,
    trash_name,
    twin_name,
)
from ckpt_core.storage import Storage, read_small
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_DELETING_THREADS: Final = 8
_warned: set[tuple[str, str]] = set()


def remove(storage: Storage, info: CheckpointInfo) -> None:
    """Remove a committed checkpoint, but not the user's files in it.

    The caller owns the root. Without a manifest, only files with names of ours are removed.
    """
    forget_notes(storage, info.save_id)
    if storage.supports_rename and (_manifest(storage, info.name) or is_link(storage, info.name)):
        _remove_directory(storage, info.name)
        return
    storage.delete(f"{info.name}/{MARKER}")
    storage.sync_directory(info.name)
    delete_in_place(storage, info.name)


def collect_orphans(storage: Storage, *, keep: Collection[str]) -> list[str]:
    """Remove leftovers of crashes, except `keep`: the directories of saves in flight.

    Only names that this package makes are touched, and only if this user owns them; the user's files in them
    are moved back. The caller owns the root (see `Lease`). Interrupted replacements are undone or finished.
    Uploads that were never completed are aborted, so that a job that was replaced cannot complete them.
    Returns the names removed, and those of the checkpoints that the uploads were for.
    """
    superseded = without_others(storage, settle_asides(storage))
    for name in superseded:
        retire_aside(storage, name)
    orphans = without_others(storage, [name for name in Catalog(storage).torn() if name not in keep])
    for name in orphans:
        if not storage.supports_rename:
            delete_in_place(storage, name)
        elif is_trash(name):
            retire(storage, name, original_name(name))
        else:
            _remove_directory(storage, name)

    def unwanted(key: str) -> bool:
        directory, _, path = key.partition("/")
        return bool(path) and parse_step_name(directory) is not None and directory not in keep

    of_uploads = {key.partition("/")[0] for key in storage.abandon_uploads(unwanted)}
    return sorted({*superseded, *orphans, *of_uploads, *remove_drafts(storage)})


def settle_asides(storage: Storage, only: str = "") -> list[str]:
    """Undo or finish interrupted replacements, `only` of one name, for the owner.

    Under the name of something set aside is what had the name of a checkpoint before, or, until both have
    exchanged their places, a finished save whose name is a directory of the user's. Returns directories whose
    name a checkpoint has: no longer needed.
    """
    # Without renames nothing is set aside, and a listing less is made.
    names = [entry.name for entry in storage.list("")] if storage.supports_rename else []
    superseded: list[str] = []
    for name in names:
        original = set_aside(name)
        if original is None or only not in {"", original}:
            continue
        if storage.entry(original) is None:
            storage.rename(name, original)
            what = "a replacement was interrupted; the old checkpoint has its name back"
        elif storage.exists(f"{original}/{MARKER}"):
            superseded.append(name)
            continue
        elif storage.exists(f"{name}/{MARKER}") and occupant(storage, original) is Occupant.FILES:
            storage.exchange(name, original)
            superseded.append(name)
            what = "a crash interrupted its commit, which is finished now"
        else:
            _logger.warning(
                "%s/%s is a checkpoint that was being replaced, and its name belongs to a directory without "
                "marker: both were kept; move one of them",
                storage.url,
                name,
            )
            continue
        storage.sync_directory("")
        _logger.warning("%s/%s: %s", storage.url, original, what)
    return superseded


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


def remove_drafts(storage: Storage) -> list[str]:
    """Remove leftovers of interrupted replacements of small files, and of probes.

    The caller owns the root, but for pins and marks, which anybody changes under their lock.
    """
    removed = without_others(storage, [entry.name for entry in storage.list("") if is_probe(entry.name)])
    for name in removed:
        storage.delete(name)

    def drafts(of: Callable[[str], bool]) -> list[str]:
        names = [entry.name for entry in storage.list(OWN) if not entry.is_directory]
        own = [f"{OWN}/{name}" for name in names if (key := drafted(name)) and of(f"{OWN}/{key}")]
        found = without_others(storage, own)
        for name in found:
            storage.delete(name)
        return found

    removed += drafts(lambda key: key not in {PINS, DAMAGED})
    for shared in (PINS, DAMAGED):
        if any(drafted(entry.name) for entry in storage.list(OWN)) and (lock := storage.try_lock(shared)):
            try:
                removed += drafts(shared.__eq__)
            finally:
                lock.release()
    return removed


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


def retire(storage: Storage, directory: str, name: str) -> None:
    """Delete the directory of checkpoint `name`; move the user's files to `name`."""
    entry = storage.entry(directory)
    if entry is not None and entry.is_directory and not entry.is_link:
        manifest = _manifest(storage, directory)
        if manifest is not None:
            found = _strangers(storage, directory, manifest.directories, _listed(manifest))
            if found:
                _carry(storage, directory, name, found)
    storage.delete(directory)


def retire_aside(storage: Storage, aside: str) -> None:
    """Delete what was set aside for a checkpoint; the user's files go into that."""
    name = original_name(aside)
    if _manifest(storage, aside) is not None or storage.exists(f"{aside}/{MARKER}"):
        _remove_directory(storage, aside)
        return
    manifest = _manifest(storage, name)
    directories = [""] if manifest is None else manifest.directories
    try:
        _carry(storage, aside, name, _strangers(storage, aside, directories, ()))
    except PermissionError as error:
        moved = quarantine(storage, aside, name)
        _logger.warning(
            "files cannot be moved from what was %s/%s (%s): it was moved to %s/%s",
            storage.url,
            name,
            error,
            storage.url,
            moved,
        )
    else:
        storage.delete(aside)


def delete_in_place(storage: Storage, name: str) -> None:
    """Delete our files, and only ours, in a directory or prefix without marker."""
    paths, own = list(storage.paths_below(name)), _own_paths(storage, name)
    if own.issuperset(paths) and all(map(is_own_file, paths)):
        storage.delete(name)  # in one call, which costs an object store the fewest requests
        return
    mine = [path for path in paths if path in own]
    # The lists of our files go last, so that an interrupted deletion can be completed.
    lists = [path for path in mine if path in {MANIFEST, twin_name(MANIFEST)} or is_own_json(path)]
    for part in (sorted(set(mine) - set(lists)), lists):
        run_all(lambda path: storage.delete(f"{name}/{path}"), part, _DELETING_THREADS, name="ckpt-delete")
    if len(mine) < len(paths):
        _warn_kept(storage.url, name)
    for inner in sorted({path.rpartition("/")[0] for path in mine}, reverse=True):
        if not storage.list(join(name, inner)):
            storage.delete(join(name, inner))


def strangers(storage: Storage, name: str) -> list[str]:
    """List the user's files in a checkpoint, outside its manifest; a tree is one path."""
    manifest = Catalog(storage).manifest(name)
    return _strangers(storage, name, manifest.directories, _listed(manifest))


def _strangers(
    storage: Storage, directory: str, directories: Sequence[str], listed: Collection[str]
) -> list[str]:
    reached, found = {""}, list[str]()
    for inner in directories:  # sorted: what holds a directory comes before it
        for child in storage.list(join(directory, inner)) if inner in reached else ():
            path = join(inner, child.name)
            if path in directories and child.is_directory and not child.is_link:
                reached.add(path)
            elif path not in listed:
                found.append(path)
    return found


def _carry(storage: Storage, directory: str, name: str, paths: Sequence[str]) -> None:
    there = storage.entry(name)
    if there is not None and (there.is_link or not there.is_directory):
        name, there = replaced_name(name, secrets.token_hex(4)), None
    if there is None:
        storage.make_directory(name)
        _warn_kept(storage.url, name)
    holders = sorted({path.rpartition("/")[0] for path in paths})
    for inner in filter(None, holders):
        if storage.entry(f"{name}/{inner}") is None:
            storage.make_directory(f"{name}/{inner}")
    for path in paths:
        with suppress(FileExistsError):
            storage.rename(f"{directory}/{path}", f"{name}/{path}")
            continue
        parent, _, last = path.rpartition("/")
        beside = join(parent, beside_name(last, secrets.token_hex(4)))
        message = "%s/%s has a file of its own where yours was (%s); yours was renamed to %s"
        _logger.warning(message, storage.url, name, path, beside)
        storage.rename(f"{directory}/{path}", f"{name}/{beside}")
    for inner in holders:
        storage.sync_directory(join(name, inner))


def _manifest(storage: Storage, directory: str) -> Manifest | None:
    for path in (MANIFEST, twin_name(MANIFEST)):
        with suppress(FileNotFoundError, CheckpointError):
            return Manifest.from_bytes(read_small(storage, f"{directory}/{path}", MAX_MANIFEST_BYTES))
    return None


def _listed(manifest: Manifest) -> frozenset[str]:
    twins = [twin_name(SIGNATURE), twin_name(MANIFEST)] if manifest.replicas > 1 else []
    ours = (PLAIN, SIGNATURE, MANIFEST, MARKER)  # the first also in a copy that was not completed
    return frozenset([*(entry.path for entry in manifest.files), *twins, *ours])


def _own_paths(storage: Storage, name: str) -> frozenset[str]:
    """Return our files in a checkpoint or a torn save, by its lists and their names."""
    manifest = _manifest(storage, name)
    if manifest is not None:
        return _listed(manifest)
    paths = list(storage.paths_below(name))
    listed = [path for table in filter(is_own_json, paths) for path in _beside(storage, f"{name}/{table}")]
    return frozenset([*filter(is_own_file, paths), *listed])


def _beside(storage: Storage, key: str) -> Collection[str]:
    """Return the host's small files in a rank's chunk table; see `encode_table`."""
    try:
        table: Any = json.loads(decode_table(read_small(storage, key)))
        paths = table["beside"]
    except (FileNotFoundError, CheckpointError, ValueError, TypeError, KeyError, RecursionError):
        return ()
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else ()


def _warn_kept(url: str, name: str) -> None:
    """Warn once per root: a callback may add files to every checkpoint."""
    if (url, "") in _warned:
        return
    _warned.add((url, ""))
    _logger.warning(
        "%s/%s was pruned; files in it that do not belong to the checkpoint were kept, as they will be from "
        "now on (logged once per root): move or delete them if you do not need them",
        url,
        name,
    )
