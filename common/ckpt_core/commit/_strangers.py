"""Files in checkpoint directories that are not ours: carried along, worked around, never deleted.

Ours are the files that the manifest lists, the manifest, its signature and the marker. Whatever else is
there belongs to the user, whenever it came. It is moved by renames only, links as links, and no file takes
another's place: where both have the same name, the user's is kept beside ours under a name that `beside_name`
makes.
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
from ckpt_core.commit._manifest import MAX_MANIFEST_BYTES, MAX_MARKER_BYTES, Manifest, Marker
from ckpt_core.crew import run_all
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError
from ckpt_core.names import (
    MANIFEST,
    MARKER,
    SIGNATURE,
    beside_name,
    is_own_file,
    is_own_json,
    replaced_name,
)
from ckpt_core.storage import Storage, read_small


def join(directory: str, name: str) -> str:
    """`directory/name`, where either may be empty."""
    return f"{directory}/{name}" if directory and name else directory or name


def directories_of(manifest: Manifest) -> list[str]:
    """Every directory that holds a file or a directory of the manifest, "" for the checkpoint's own."""
    holders = {entry.path.rpartition("/")[0] for entry in manifest.files}
    parents = {str(parent) for holder in holders for parent in PurePosixPath(holder).parents}
    return sorted({""} | holders | (parents - {"."}))


def unlike(storage: Storage, directory: str, manifest: Manifest) -> list[str]:
    """Name the files that are not as the manifest says, by their sizes, each with what is there.

    At the price of one listing per directory; other files do not matter.
    """
    sizes = {
        join(inner, child.name): child.size_bytes
        for inner in directories_of(manifest)
        for child in storage.list(join(directory, inner))
        if not child.is_directory
    }
    suspects = [entry for entry in manifest.files if sizes.get(entry.path) != entry.size_bytes]
    # By their names: a listing may not show yet what is there.
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
_told: set[str] = set()


def merge(storage: Storage, working: str, name: str, manifest: Manifest) -> None:
    """Move a finished save file by file into a directory of the user's, the marker last.

    The directory stays what it was, with all that is in it: jobs may have it open, or work in it. After a
    crash on the way `finish_merge` goes on. POSIX only.

    Raises:
        OSError: it cannot be done; what had been moved was moved back, as far as possible.
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
            with suppress(OSError):  # the first error is the one to tell
                storage.rename(f"{name}/{path}", f"{working}/{path}")
        raise


def finish_merge(storage: Storage, working: str, name: str) -> bool:
    """Go on with a `merge` that a crash cut short, if that is what `working` is left from.

    Returns:
        Whether `name` is a checkpoint now.
    """
    manifest = _of_cut_merge(storage, working, name)
    if manifest is None:
        return False
    _logger.warning("%s/%s: a crash cut its commit short, which is finished now", storage.url, name)
    merge(storage, working, name, manifest)
    storage.sync_directory(name)
    storage.delete(working)
    storage.sync_directory("")
    return True


def retire(storage: Storage, directory: str, name: str) -> None:
    """Delete a directory that was checkpoint `name`, or was to be; what is not ours in it goes to `name`."""
    entry = storage.entry(directory)
    if entry is not None and entry.is_directory and not entry.is_link:
        manifest = _manifest(storage, directory)
        strangers = [] if manifest is None else _strangers(storage, directory, manifest)
        if strangers:
            _carry(storage, directory, name, strangers)
    storage.delete(directory)


def delete_in_place(storage: Storage, name: str) -> None:
    """Delete what is ours of a directory or prefix that holds no marker any more, and nothing else."""
    own = own_paths(storage, name)
    paths = list(_walk(storage, name))
    if own.issuperset(paths) and all(map(is_own_file, paths)):
        storage.delete(name)  # all at once, which costs an object store the fewest requests
        return
    mine = [path for path in paths if path in own]
    # What tells which files are ours goes last, for a deletion that is cut short to be gone on with.
    lists = [path for path in mine if path == MANIFEST or is_own_json(path)]
    for part in (sorted(set(mine) - set(lists)), lists):
        run_all(lambda path: storage.delete(f"{name}/{path}"), part, _DELETING_THREADS, name="ckpt-delete")
    if len(mine) < len(paths):
        _tell_kept(storage.url, name)
    for inner in sorted({path.rpartition("/")[0] for path in mine}, reverse=True):
        if not storage.list(join(name, inner)):
            storage.delete(join(name, inner))


def strangers(storage: Storage, name: str) -> list[str]:
    """List what in a committed checkpoint its manifest does not name; nobody reads, moves or deletes it.

    Returns:
        Paths in the checkpoint: of a directory of the user's only its top, of a link itself.

    Raises:
        CheckpointError: the manifest cannot be read, so that nobody can tell.
    """
    return _strangers(storage, name, Catalog(storage).manifest(name))


def own_paths(storage: Storage, name: str) -> frozenset[str]:
    """The files of a checkpoint or a torn save that are ours, as far as its lists and their names tell."""
    manifest = _manifest(storage, name)
    if manifest is not None:
        return _listed(manifest)
    paths = list(_walk(storage, name))
    listed = [path for table in filter(is_own_json, paths) for path in _beside(storage, f"{name}/{table}")]
    return frozenset([*filter(is_own_file, paths), *listed])


def has_manifest(storage: Storage, directory: str) -> bool:
    """Whether a manifest says which files of a directory are ours."""
    return _manifest(storage, directory) is not None


def _listed(manifest: Manifest) -> frozenset[str]:
    return frozenset([*(entry.path for entry in manifest.files), SIGNATURE, MANIFEST, MARKER])


def _manifest(storage: Storage, directory: str) -> Manifest | None:
    try:
        return Manifest.from_bytes(read_small(storage, f"{directory}/{MANIFEST}", MAX_MANIFEST_BYTES))
    except (FileNotFoundError, CheckpointError):
        return None


def _strangers(storage: Storage, directory: str, manifest: Manifest) -> list[str]:
    """What in a directory is not ours; of a tree of the user's only its top, and of a link itself."""
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
    """Move the user's files from a directory that is to be deleted to where they were found."""
    there = storage.entry(name)
    if there is not None and (there.is_link or not there.is_directory):
        name, there = replaced_name(name, secrets.token_hex(4)), None
    if there is None:
        storage.make_directory(name)
        _tell_kept(storage.url, name)
    holders = {path.rpartition("/")[0] for path in strangers}
    for inner in sorted(filter(None, holders)):
        _make_directory(storage, name, inner)
    for path in strangers:
        try:
            storage.rename(f"{directory}/{path}", f"{name}/{path}")
        except FileExistsError:
            beside = _beside_path(path)
            _logger.warning(
                "%s/%s has a file of its own where yours was; yours is %s now", storage.url, name, beside
            )
            storage.rename(f"{directory}/{path}", f"{name}/{beside}")
    for inner in holders:
        storage.sync_directory(join(name, inner))


def _make_directory(storage: Storage, name: str, inner: str) -> None:
    """Make a directory that the checkpoint needs, also where a file or link of the user's has its name."""
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
        "%s/%s/%s was there before the checkpoint, which has a file of that name; yours is %s now",
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
    """What of a finished save has not been moved yet, but the marker; the manifest last."""
    there = set(_walk(storage, working))
    return [
        path for path in (*(entry.path for entry in manifest.files), SIGNATURE, MANIFEST) if path in there
    ]


def _of_cut_merge(storage: Storage, working: str, name: str) -> Manifest | None:
    """The manifest of a merge that was begun and not finished, if all its files are in one place or both."""
    if not storage.exists(f"{working}/{MARKER}") or storage.exists(f"{name}/{MARKER}"):
        return None
    try:
        marker = Marker.from_bytes(read_small(storage, f"{working}/{MARKER}", MAX_MARKER_BYTES))
        place = working if storage.exists(f"{working}/{MANIFEST}") else name
        content = read_small(storage, f"{place}/{MANIFEST}", MAX_MANIFEST_BYTES)
        manifest = Manifest.from_bytes(content)
    except (FileNotFoundError, CheckpointError):
        return None
    left = set(_to_move(storage, working, manifest))
    files = tuple(entry for entry in manifest.files if entry.path not in left)
    begun = bool(files) or MANIFEST not in left
    if not begun or not marker.matches(content):
        return None
    return None if unlike(storage, name, replace(manifest, files=files)) else manifest


def _walk(storage: Storage, directory: str, inner: str = "") -> Iterator[str]:
    """Paths of all that is no directory; links are not followed."""
    for child in storage.list(join(directory, inner)):
        path = join(inner, child.name)
        if child.is_directory and not child.is_link:
            yield from _walk(storage, directory, path)
        else:
            yield path


def _beside(storage: Storage, key: str) -> Collection[str]:
    """The small files of the host's that a rank lists in its chunk table; see `encode_table`."""
    try:
        table: Any = json.loads(read_small(storage, key))
        paths = table["beside"]
    except (FileNotFoundError, CheckpointError, ValueError, TypeError, KeyError, RecursionError):
        return ()
    return [path for path in paths if isinstance(path, str)] if isinstance(paths, list) else ()


def _tell_kept(url: str, name: str) -> None:
    """Once for each root: where a callback puts files into every checkpoint, this comes with every prune."""
    if url in _told:
        return
    _told.add(url)
    _logger.warning(
        "%s/%s was pruned; the files in it that are not of the checkpoint were kept, and so they are from "
        "now on: move or delete them if you do not need them",
        url,
        name,
    )
