"""The place that a copy is written into, at its target.

The manifest comes first there, unlike that of a save: it tells whose unfinished copy this is, so that a later
one continues it. Without a marker it counts for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from ckpt_core.commit import (
    Catalog,
    Manifest,
    Occupant,
    abandon,
    require_free,
    settle_asides,
    working_name,
)
from ckpt_core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from ckpt_core.names import MANIFEST, is_incomplete, original_name
from ckpt_core.storage import Storage, read_small


def is_committed_as(storage: Storage, name: str, manifest: Manifest, content: bytes) -> bool:
    """Return whether a root holds that very checkpoint under `name`.

    A commit of a copy that was interrupted is completed first.

    Args:
        storage: the root; the caller owns it.
        name: of the checkpoint.
        manifest: of the checkpoint.
        content: the bytes of the manifest.

    Raises:
        CheckpointExistsError: it holds another checkpoint, or a damaged marker, under that name.
    """
    working = working_name(storage, name, manifest.save_id)
    for aside in settle_asides(storage):
        if original_name(aside) == name:
            abandon(storage, aside)
    try:
        marker = Catalog(storage).marker(name)
    except (CheckpointNotFoundError, NotADirectoryError):
        return False  # a file of the user's is moved aside by the commit
    except (CorruptCheckpointError, IncompatibleCheckpointError) as error:
        raise CheckpointExistsError(
            f"{storage.url}/{name} is a checkpoint whose marker cannot be read ({error}); nothing there was "
            "touched: move or delete it, then copy again"
        ) from error
    if marker.matches(content):
        if storage.supports_rename and storage.entry(working) is not None:
            abandon(storage, working)  # what is left after an interrupted commit into a user's directory
        return True
    raise CheckpointExistsError(
        f"{storage.url}/{name} is another checkpoint: step {marker.step} of save {marker.save_id}, not step "
        f"{manifest.step} of save {manifest.save_id}. Checkpoints are never overwritten: copy to another root"
    )


def begin_copy(
    storage: Storage, name: str, manifest: Manifest, beside: Mapping[str, bytes], *, repair: bool = False
) -> str:
    """Prepare the directory of a copy at the target; return its name.

    Files that an earlier copy of the same save has left there stay.

    Args:
        storage: the root to copy to; the caller owns it.
        name: of the checkpoint.
        manifest: of the checkpoint.
        beside: path -> content of the manifest, which comes first, and of files that it does not list.
        repair: whether a damaged copy of it may have the name.

    Raises:
        CheckpointExistsError: the name is taken, or on an object store belongs to another torn save.
        ConfigError: it cannot be the name of a checkpoint.
    """
    found = require_free(storage, name, replace=repair)
    working = working_name(storage, name, manifest.save_id)
    if storage.supports_rename:
        if not is_incomplete(working):
            raise ConfigError(f"save id {manifest.save_id!r} is not 8 to 32 lower-case hex digits")
        with suppress(FileExistsError):
            storage.make_directory(working)
    elif found is Occupant.TORN and not storage.exists(f"{name}/{MANIFEST}"):
        _refuse_torn(storage, name)
    try:
        for path, content in beside.items():
            _write_small(storage, working, path, content)
    except (FileNotFoundError, NotADirectoryError) as error:
        if not storage.exists(working):
            raise
        raise CheckpointExistsError(
            f"{storage.url}/{working} is a file, where the directory of a copy must be; it was not touched: "
            "move or delete it"
        ) from error
    return working


def _write_small(storage: Storage, working: str, path: str, content: bytes) -> None:
    """Write a small file of a copy, over that of an earlier attempt."""
    key = f"{working}/{path}"
    if storage.supports_rename:  # also if it is the same: a killed process may not have synced it
        storage.delete(key)
        storage.write_bytes(key, content)
        return
    try:
        storage.write_bytes(key, content)
    except FileExistsError:
        if read_small(storage, key) != content:
            _refuse_torn(storage, working)


def _refuse_torn(storage: Storage, name: str) -> NoReturn:
    raise CheckpointExistsError(
        f"{storage.url}/{name} holds what another save or copy has left unfinished; nothing there was "
        "touched: if no job writes there, `ckpt prune` collects it"
    )
