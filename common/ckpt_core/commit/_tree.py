"""The files of a checkpoint as they lie in its directory."""

from __future__ import annotations

from pathlib import PurePosixPath

from ckpt_core.commit._manifest import Manifest
from ckpt_core.storage import Storage


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
