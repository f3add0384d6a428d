"""The files of a checkpoint that a host reads by itself: compared with the manifest before it does."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_core.commit import Catalog
from ckpt_core.lifecycle import Files
from ckpt_core.storage import Storage


def verified_files(storage: Storage, name: str, wanted: Callable[[str], bool]) -> dict[str, bytes]:
    """Read some files of a committed checkpoint, by path, each one as it was committed.

    Args:
        storage: the root.
        name: the checkpoint's directory.
        wanted: whether a path of the manifest is to be read.

    Raises:
        CorruptCheckpointError: one of them is missing, or is not what was committed.
        CheckpointNotFoundError: there is no committed checkpoint of that name.
        OSError: storage is unwell.
    """
    manifest = Catalog(storage).manifest(name)
    files = Files(storage, name, manifest)
    return {entry.path: files.read(entry.path) for entry in manifest.files if wanted(entry.path)}
