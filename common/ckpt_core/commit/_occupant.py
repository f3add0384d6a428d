"""Occupants of a checkpoint's name, and how they are moved aside unharmed."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from enum import Enum, auto
from typing import Final

from ckpt_core.commit._manifest import MAX_MANIFEST_BYTES, Manifest, Marker
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.names import (
    MANIFEST,
    MARKER,
    METADATA,
    SIGNATURE,
    corrupt_name,
    data_rank,
    is_own_file,
    is_own_json,
    is_replaced,
    parse_step_name,
    replaced_name,
)
from ckpt_core.storage import Storage, read_small

# Training state as Accelerate, the Trainer, Lightning's sharded strategies and DeepSpeed write it: these make
# a directory one of their checkpoints. Weights alone do not: users put exported models beside ours.
_TRAINING_STATE: Final = re.compile(
    r"optimizer(_\d+)?\.(bin|pt)|scheduler(_\d+)?\.(bin|pt)|random_states_\d+\.pkl|rng_state(_\d+)?\.pth"
    r"|trainer_state\.json|meta\.pt|zero_to_fp32\.py|.*_(optim|model)_states\.pt"
)


class Occupant(Enum):
    """The kinds of directories in a root."""

    NOTHING = auto()
    COMMITTED = auto()
    """A committed checkpoint, also of a newer version."""
    UNREADABLE = auto()
    """A checkpoint of ours whose marker is damaged."""
    TORN = auto()
    """Files of ours without a marker."""
    STOCK = auto()
    """A checkpoint that another program wrote."""
    FILES = auto()
    """A directory with the user's files only, or an empty one."""
    OTHER = auto()
    """A file, a symbolic link, or a directory without read permission."""


def occupant(storage: Storage, name: str) -> Occupant:
    """Classify the directory of a name; on an object store, the prefix.

    Raises:
        OSError: storage failed.
    """
    if not storage.supports_rename:
        return content_of(storage, name)
    entry = storage.entry(name)
    if entry is None:
        return Occupant.NOTHING
    try:
        if entry.is_link or not entry.is_directory:
            return Occupant.OTHER
        return content_of(storage, name)
    except PermissionError:
        return Occupant.OTHER


def content_of(storage: Storage, name: str) -> Occupant:
    """Classify the content of a directory, or of one that a link leads to.

    Raises:
        OSError: it is no directory, or storage failed.
    """
    return _marked(storage, name) or _unmarked(storage, name)


def is_link(storage: Storage, name: str) -> bool:
    """Return whether `name` is a symbolic link in the root."""
    entry = storage.entry(name)
    return entry is not None and entry.is_link


def holds_torn_save(storage: Storage, name: str) -> bool:
    """Return whether a directory without marker holds files of a save of ours."""
    return _unmarked(storage, name) is Occupant.TORN


def _marked(storage: Storage, name: str) -> Occupant | None:
    try:
        Marker.read(storage, name)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except IncompatibleCheckpointError:
        return Occupant.COMMITTED
    except CorruptCheckpointError:
        return Occupant.UNREADABLE
    return Occupant.COMMITTED


def _unmarked(storage: Storage, name: str) -> Occupant:
    paths = list(_files(storage, name, depth=2))
    if any(map(is_own_json, paths)) or (MANIFEST in paths and _has_manifest(storage, name)):
        return Occupant.TORN
    if SIGNATURE in paths and not storage.supports_rename:
        return Occupant.TORN  # a late upload: its checkpoint had been deleted already
    files = {path.rpartition("/")[2] for path in paths}
    in_place = not storage.supports_rename and parse_step_name(name) is not None
    has_data = any(data_rank(file) is not None for file in files)
    if (
        METADATA not in files
        and in_place
        and (has_data or any("/" not in p and is_own_file(p) for p in paths))
    ):
        return Occupant.TORN  # a deletion that was interrupted leaves any of our files
    if METADATA not in files and has_data:
        # Incomplete: DCP writes its index last, and ours gets its name only when it is whole.
        return Occupant.STOCK
    if METADATA in files or any(map(_TRAINING_STATE.fullmatch, files)):
        return Occupant.STOCK
    return Occupant.FILES if paths or storage.supports_rename else Occupant.NOTHING


def _has_manifest(storage: Storage, name: str) -> bool:
    try:
        Manifest.check_bytes(read_small(storage, f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES))
    except (CheckpointError, FileNotFoundError):
        return False
    return True


def _files(storage: Storage, directory: str, *, depth: int) -> Iterator[str]:
    """Yield the paths of files and links down to a depth; links are not followed."""
    for child in storage.list(directory):
        if not child.is_directory or child.is_link:
            yield child.name
        elif depth > 1:
            for path in _files(storage, f"{directory}/{child.name}", depth=depth - 1):
                yield f"{child.name}/{path}"


def quarantine(storage: Storage, name: str) -> str:
    """Move a damaged checkpoint aside.

    The caller owns the root and has verified the damage.

    Returns:
        Its place now: another name on POSIX; on an object store the same place, without marker, until the
        next save of that name deletes it.
    """
    if not storage.supports_rename:
        storage.delete(f"{name}/{MARKER}")
        return name
    return _rename(storage, name, corrupt_name(name, secrets.token_hex(4)))


def set_aside(storage: Storage, name: str) -> str:
    """Move aside, unchanged, what another program or the user put under a name.

    POSIX only; the caller owns the root.

    Returns:
        Its new name.
    """
    return _rename(storage, name, replaced_name(name, secrets.token_hex(4)))


def replaced(storage: Storage) -> list[str]:
    """List what `set_aside` moved; only a user deletes it."""
    return [entry.name for entry in storage.list("") if is_replaced(entry.name)]


def _rename(storage: Storage, name: str, target: str) -> str:
    storage.rename(name, target)
    # Durable before anything else takes the name: a power cut that kept only the latter would lose this.
    storage.sync_directory("")
    return target
