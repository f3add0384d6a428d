"""The user's files in checkpoint directories: kept and moved, never deleted.

Our files are those that the manifest lists, the manifest, its signature and the marker. All others belong to
the user, whenever they were added. They are moved by renames only, links as links, and no file overwrites
another: if both have the same name, the user's file is kept beside ours under a name from `beside_name`.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final

from ckpt_core.commit._catalog import Catalog
from ckpt_core.commit._manifest import MAX_MANIFEST_BYTES, Manifest, Marker
from ckpt_core.crew import run_all
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError
from ckpt_core.formats.chunks import decode_table
from ckpt_core.names import (
    MANIFEST,
    MARKER,
    SIGNATURE,
    beside_name,
    is_own_file,
    is_own_json,
    replaced_name,
    twin_name,
)
from ckpt_core.storage import Storage, read_small


def join(directory: str, name: str) -> str:
    """Join `directory` and `name` by a slash; either may be empty."""
    return f"{directory}/{name}" if directory and name else directory or name


def directories_of(manifest: Manifest) -> list[str]:
    """List every directory of the manifest's files; "" is the checkpoint's own."""
    holders = {entry.path.rpartition("/")[0] for entry in manifest.files}
    parents = {str(parent) for holder in holders for parent in PurePosixPath(holder).parents}
    return sorted({""} | holders | (parents - {"."}))


def unlike(storage: Storage, directory: str, manifest: Manifest) -> list[str]:
    """List files whose size differs from the manifest, with their size in storage.

    One listing per directory; files that the manifest does not list are ignored.
    """
    sizes = {
        join(inner, child.name): child.size_bytes
        for inner in directories_of(manifest)
        for child in storage.list(join(directory, inner))
        if not child.is_directory
    }
    suspects = [entry for entry in manifest.files if sizes.get(entry.path) != entry.size_bytes]
    # By their names: a listing may not show new objects yet.
    found = {entry.path: _size(storage, f"{directory}/{entry.path}") for entry in suspects}
    return [
        f"{entry.path} has {'no' if found[entry.path] is None else found[entry.path]} bytes, "
        f"not {entry.size_bytes}"
        for entry in suspects
        if found[entry.path] != entry.size_bytes
    ]


def _size(storage: Storage, key: str) -> int | None:
    try:
        return storage.size(key)
    except FileNotFoundError:
        return None


_logger = logger_of(__name__)

_DELETING_THREADS: Final = 8
_warned: set[str] = set()


def merge(storage: Storage, working: str, name: str, manifest: Manifest) -> None:
    """Move a finished save file by file into the user's directory, the marker last.

    The directory keeps its identity and its content: jobs may have it open, or work in it. After a crash
    `finish_merge` continues. POSIX only.

    Raises:
        OSError: it failed; the files moved so far were moved back, as far as possible.
    """
    directories = directories_of(manifest)
    moved: list[str] = []
    try:
        for inner in filter(None, directories):
            _make_directory(storage, name, inner)
        for path in _to_move(storage, working, manifest):
            _move_over(storage, f"{working}/{path}", name, path)
            moved.append(path)
        for inner in directories:
            storage.sync_directory(join(name, inner))
        storage.rename(f"{working}/{MARKER}", f"{name}/{MARKER}")
    except OSError:
        for path in reversed(moved):
            with suppress(OSError):  # the first error is the one to raise
                storage.rename(f"{name}/{path}", f"{working}/{path}")
        raise


def finish_merge(storage: Storage, working: str, name: str) -> bool:
    """Finish a `merge` that a crash interrupted, if `working` is left from one.

    Returns:
        Whether `name` is a checkpoint now.
    """
    manifest = _interrupted_merge(storage, working, name)
    if manifest is None:
        return False
    _logger.warning("%s/%s: a crash interrupted its commit, which is finished now", storage.url, name)
    merge(storage, working, name, manifest)
    storage.sync_directory(name)
    storage.delete(working)
    storage.sync_directory("")
    return True


def retire(storage: Storage, directory: str, name: str) -> None:
    """Delete the directory of checkpoint `name`; move the user's files to `name`."""
    entry = storage.entry(directory)
    if entry is not None and entry.is_directory and not entry.is_link:
        manifest = _manifest(storage, directory)
        strangers = [] if manifest is None else _strangers(storage, directory, manifest)
        if strangers:
            _carry(storage, directory, name, strangers)
    storage.delete(directory)


def delete_in_place(storage: Storage, name: str) -> None:
    """Delete our files, and only ours, in a directory or prefix without marker."""
    own = own_paths(storage, name)
    paths = list(_walk(storage, name))
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
    """List the user's files in a committed checkpoint: those outside its manifest.

    Returns:
        Paths in the checkpoint; a directory tree or a link counts as one path.

    Raises:
        CheckpointError: the manifest cannot be read, so that ownership is unknown.
    """
    return _strangers(storage, name, Catalog(storage).manifest(name))


def own_paths(storage: Storage, name: str) -> frozenset[str]:
    """Return our files in a checkpoint or a torn save, by its lists and their names."""
    manifest = _manifest(storage, name)
    if manifest is not None:
        return _listed(manifest)
    paths = list(_walk(storage, name))
    listed = [path for table in filter(is_own_json, paths) for path in _beside(storage, f"{name}/{table}")]
    return frozenset([*filter(is_own_file, paths), *listed])


def has_manifest(storage: Storage, directory: str) -> bool:
    """Return whether a manifest lists our files in a directory."""
    return _manifest(storage, directory) is not None


def _listed(manifest: Manifest) -> frozenset[str]:
    return frozenset([*(entry.path for entry in manifest.files), *_lists(manifest), MARKER])


def _lists(manifest: Manifest) -> list[str]:
    """Return our files that the manifest does not list, but the marker; itself last."""
    twins = [twin_name(SIGNATURE), twin_name(MANIFEST)] if manifest.replicas > 1 else []
    return [SIGNATURE, *twins, MANIFEST]


def _manifest(storage: Storage, directory: str) -> Manifest | None:
    for path in (MANIFEST, twin_name(MANIFEST)):
        with suppress(FileNotFoundError, CheckpointError):
            return Manifest.from_bytes(read_small(storage, f"{directory}/{path}", MAX_MANIFEST_BYTES))
    return None


def _strangers(storage: Storage, directory: str, manifest: Manifest) -> list[str]:
    """List the user's files; a directory tree or a link counts as one path."""
    directories, listed = directories_of(manifest), _listed(manifest)
    reached, found = {""}, list[str]()
    for inner in directories:  # sorted: what holds a directory comes before it
        for child in storage.list(join(directory, inner)) if inner in reached else ():
            path = join(inner, child.name)
            if path in directories and child.is_directory and not child.is_link:
                reached.add(path)
            elif path not in listed:
                found.append(path)
    return found


def _carry(storage: Storage, directory: str, name: str, strangers: Sequence[str]) -> None:
    """Move the user's files from a directory about to be deleted to `name`."""
    there = storage.entry(name)
    if there is not None and (there.is_link or not there.is_directory):
        name, there = replaced_name(name, secrets.token_hex(4)), None
    if there is None:
        storage.make_directory(name)
        _warn_kept(storage.url, name)
    holders = {path.rpartition("/")[0] for path in strangers}
    for inner in sorted(filter(None, holders)):
        _make_directory(storage, name, inner)
    for path in strangers:
        try:
            storage.rename(f"{directory}/{path}", f"{name}/{path}")
        except FileExistsError:
            beside = _beside_path(path)
            _logger.warning(
                "%s/%s has a file of its own where yours was; yours was renamed to %s",
                storage.url,
                name,
                beside,
            )
            storage.rename(f"{directory}/{path}", f"{name}/{beside}")
    for inner in holders:
        storage.sync_directory(join(name, inner))


def _make_directory(storage: Storage, name: str, inner: str) -> None:
    """Create a directory of the checkpoint; move aside a file or link in its place."""
    parent, _, last = f"{name}/{inner}".rpartition("/")
    found = next((child for child in storage.list(parent) if child.name == last), None)
    if found is not None and (found.is_link or not found.is_directory):
        _move_beside(storage, name, inner)
        found = None
    if found is None:
        storage.make_directory(f"{name}/{inner}")


def _move_over(storage: Storage, source: str, name: str, path: str) -> None:
    """Move a file of ours into the user's directory."""
    try:
        storage.rename(source, f"{name}/{path}")
    except FileExistsError:
        _move_beside(storage, name, path)
        storage.rename(source, f"{name}/{path}")


def _move_beside(storage: Storage, name: str, path: str) -> None:
    beside = _beside_path(path)
    _logger.warning(
        "%s/%s/%s was there before the checkpoint, which has a file of that name; yours was renamed to %s",
        storage.url,
        name,
        path,
        beside,
    )
    storage.rename(f"{name}/{path}", f"{name}/{beside}")
    # Durable before ours takes the name, or a power cut could lose the user's.
    storage.sync_directory(join(name, path.rpartition("/")[0]))


def _beside_path(path: str) -> str:
    parent, _, last = path.rpartition("/")
    return join(parent, beside_name(last, secrets.token_hex(4)))


def _to_move(storage: Storage, working: str, manifest: Manifest) -> list[str]:
    """List the files still to be moved, without the marker; the manifest last."""
    there = set(_walk(storage, working))
    return [path for path in (*(entry.path for entry in manifest.files), *_lists(manifest)) if path in there]


def _interrupted_merge(storage: Storage, working: str, name: str) -> Manifest | None:
    """Return the manifest of an interrupted merge, None if there was none.

    All its files must be in one place or the other.
    """
    if not storage.exists(f"{working}/{MARKER}") or storage.exists(f"{name}/{MARKER}"):
        return None
    try:
        marker = Marker.read(storage, working)
        place = working if storage.exists(f"{working}/{MANIFEST}") else name
        content = read_small(storage, f"{place}/{MANIFEST}", MAX_MANIFEST_BYTES)
        manifest = Manifest.from_bytes(content)
    except (FileNotFoundError, CheckpointError):
        return None
    remaining = set(_to_move(storage, working, manifest))
    files = tuple(entry for entry in manifest.files if entry.path not in remaining)
    begun = bool(files) or MANIFEST not in remaining
    if not begun or not marker.matches(content):
        return None
    return None if unlike(storage, name, replace(manifest, files=files)) else manifest


def _walk(storage: Storage, directory: str, inner: str = "") -> Iterator[str]:
    """Yield the paths of files and links below a directory; links are not followed."""
    for child in storage.list(join(directory, inner)):
        path = join(inner, child.name)
        if child.is_directory and not child.is_link:
            yield from _walk(storage, directory, path)
        else:
            yield path


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
    if url in _warned:
        return
    _warned.add(url)
    _logger.warning(
        "%s/%s was pruned; files in it that do not belong to the checkpoint were kept, as they will be from "
        "now on (logged once per root): move or delete them if you do not need them",
        url,
        name,
    )
