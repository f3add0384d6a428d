"""How a checkpoint becomes true.

The one rule: no `COMMITTED`, no checkpoint. A crash at any point leaves either the old set of checkpoints or
the new one, because exactly one operation, atomic on its storage, moves between them:

    POSIX                                    after a crash here, on disk is
    1. make `<name>.incomplete-<id>`         a torn directory, ignored by everyone
    2. every rank writes and fsyncs files    a torn directory
    3. manifest.json, then COMMITTED, fsync  a torn directory, complete, but under a name that never counts
    4. rename onto `<name>`                  the checkpoint, or (power loss before 5) the torn directory of 3
    5. fsync the parent                      the checkpoint

    object store                             after a crash here, in the bucket is
    1. clear what a torn save left           nothing, or fewer leftovers without marker
    2. every rank uploads its objects        objects without marker, ignored by everyone
    3. manifest.json                         objects without marker
    4. COMMITTED                             the checkpoint: a completed upload appears at once and whole
    5. ask whose the root is                 the checkpoint; unless another job has taken the root
                                             and cleared it away: then the marker goes too

On an object store an upload may arrive although its sender was told nothing, or is dead. No object takes the
place of another there, and a marker of which it is not known whether it arrived is not given up: its objects
stay, so that it tells the truth whenever it shows.

Nothing that is committed, or that we did not write, is ever overwritten or deleted on this path.
Any thread of the coordinator may call these, one save at a time per root.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import NoReturn

from ckpt_core.commit._catalog import can_count
from ckpt_core.commit._manifest import Manifest, Marker
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    CorruptCheckpointError,
    SaveError,
)
from ckpt_core.names import (
    DAMAGED,
    MANIFEST,
    MARKER,
    PINS,
    WRITER,
    incomplete_name,
    is_incomplete,
    parse_step_name,
)
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_logger = logging.getLogger(__name__)


def is_name(name: str) -> bool:
    """Whether a checkpoint may be called `name`: one plain directory name, none of those we use ourselves."""
    return "/" not in name and name not in {"", ".", "..", DAMAGED, PINS, WRITER} and can_count(name)


def working_name(storage: Storage, name: str, save_id: str) -> str:
    """The directory that checkpoint `name` is written into: beside it, or in place on an object store.

    `save_id` has 8 to 32 lower-case hex digits.
    """
    return incomplete_name(name, save_id) if storage.supports_rename else name


def begin(storage: Storage, name: str, save_id: str, *, replace: bool = False) -> str:
    """Prepare the directory that checkpoint `name` is written into, and return its name.

    With `replace`, `name` may be committed; then `commit` must be told so too.

    Raises:
        CheckpointExistsError: `name` is committed, or occupied by something that is not ours to remove.
        ConfigError: `name` cannot be the name of a checkpoint.
    """
    require_free(storage, name, replace=replace)
    working = working_name(storage, name, save_id)
    if not storage.supports_rename:
        if storage.list(name):
            storage.delete(name)  # what a torn save of ours left
        return working
    if not is_incomplete(working):
        raise ConfigError(f"save id {save_id!r} is not 8 to 32 lower-case hex digits")
    try:
        storage.make_directory(working)
    except FileExistsError:
        raise CheckpointExistsError(
            f"{storage.url}/{working} exists already: another save uses the id {save_id!r}"
        ) from None
    return working


def require_free(storage: Storage, name: str, *, replace: bool = False) -> None:
    """Refuse a name that a save could not take; see `begin` for the arguments and what is raised."""
    if not is_name(name):
        raise ConfigError(f"{name!r} cannot be the name of a checkpoint: one plain directory name is needed")
    committed = storage.exists(f"{name}/{MARKER}")
    if storage.supports_rename:
        if not (replace and committed) and any(entry.name == name for entry in storage.list("")):
            _refuse(storage, name)
        return
    # A name that `step_name` makes is ours, so what lies there without a marker is a torn save of ours.
    # Any other name may hold a checkpoint that a host framework wrote without us.
    if committed or (parse_step_name(name) is None and storage.list(name)):
        _refuse(storage, name)


def commit(
    storage: Storage,
    working: str,
    name: str,
    manifest: Manifest,
    *,
    replace: bool = False,
    check: Callable[[], None] = lambda: None,
) -> CheckpointInfo:
    """Make the files in `working` the checkpoint `name`, all or nothing.

    Every rank must have finished and synced its files.

    Args:
        storage: the root.
        working: what `begin` returned.
        name: of the checkpoint.
        manifest: what it holds.
        replace: whether a committed checkpoint of that name changes places with the new one, so that at every
            instant one of them has the name, and is then deleted.
        check: raises if another job has taken the root (see `Lease.check`); asked where nothing else keeps
            that job from writing under the same name.

    Raises:
        CheckpointExistsError: `name` has been taken since `begin`; nothing there was touched.
        SaveError: a file is missing or has another size than promised, or the manifest is not sound; or, with
            `in_doubt`, all is in place and its name could not be made durable, or storage, an object store,
            did not tell what became of the marker.
        ConfigError: the manifest holds what JSON cannot.
        RootBusyError: from `check`; if the checkpoint was complete by then, it stays.
    """
    content, marker = _encode(manifest)
    _check_files(storage, working, manifest)
    try:
        storage.write_bytes(f"{working}/{MANIFEST}", content)
        if storage.supports_rename:
            storage.write_bytes(f"{working}/{MARKER}", marker.to_bytes())
            _move_into_place(storage, working, name, manifest, replace=replace)
        else:
            _commit_in_place(storage, name, manifest, marker=marker.to_bytes(), check=check)
    except FileExistsError:
        _refuse(storage, name)
    return marker.info(name)


def _commit_in_place(
    storage: Storage, name: str, manifest: Manifest, *, marker: bytes, check: Callable[[], None]
) -> None:
    check()
    try:
        storage.write_bytes(f"{name}/{MARKER}", marker)
    except (FileExistsError, PermissionError):
        raise  # it was refused, for certain
    except OSError as error:
        raise SaveError(
            f"step {manifest.step} may or may not be committed to {storage.url}/{name}: storage did not tell "
            f"whether its marker arrived ({error}). It is whole if it shows, and was left; "
            "see `ckpt ls` when storage is well again",
            step=manifest.step,
            phase="commit",
            in_doubt=True,
        ) from error
    try:
        check()
    except OSError:
        return  # it was ours a moment ago, and the checkpoint is there
    except CheckpointError:
        _withdraw_if_torn(storage, name, manifest, marker)
        raise


def _withdraw_if_torn(storage: Storage, name: str, manifest: Manifest, marker: bytes) -> None:
    """Take back a marker that came after another job had cleared away what it stands for."""
    try:
        if _unlike(storage, name, manifest) and storage.read_bytes(f"{name}/{MARKER}") == marker:
            storage.delete(f"{name}/{MARKER}")
    except OSError as error:
        _logger.warning("%s/%s may be torn, and could not be looked at: %s", storage.url, name, error)


def _move_into_place(storage: Storage, working: str, name: str, manifest: Manifest, *, replace: bool) -> None:
    for directory in _directories(manifest):
        storage.sync_directory(_join(working, directory))
    replaced = replace and storage.exists(f"{name}/{MARKER}")
    if replaced:
        storage.exchange(working, name)
    else:
        storage.rename(working, name)
    _make_name_durable(storage, name, manifest)
    if replaced:
        abandon(storage, working)


def _make_name_durable(storage: Storage, name: str, manifest: Manifest) -> None:
    """Fsync the root. A failure is not tried again: the kernel may report the loss of a page only once."""
    try:
        storage.sync_directory("")
    except OSError as error:
        text = f"{type(error).__name__}: {error}"
        raise SaveError(
            f"step {manifest.step} is complete in {storage.url}/{name}, but its name could not be made "
            f"durable (phase commit): rank 0: {text}. It counts as long as it is there; a power cut may take "
            "it back. Nothing older was removed; see to the storage, then save another step",
            step=manifest.step,
            phase="commit",
            failures={0: text},
            in_doubt=True,
        ) from error


def abandon(storage: Storage, working: str) -> None:
    """Remove the directory of a save that failed, as far as possible; never one that is committed.

    On an object store the marker may have arrived although its upload reported an error: then the
    checkpoint is whole, and stays.
    """
    try:
        if storage.supports_rename:
            committed = not is_incomplete(working)
        else:
            committed = storage.exists(f"{working}/{MARKER}")
        if not committed:
            storage.delete(working)
    except OSError as error:
        # The failure that led here is reported by the caller; leftovers are collected by a later prune.
        _logger.warning("could not remove torn %s/%s: %s", storage.url, working, error)


def _encode(manifest: Manifest) -> tuple[bytes, Marker]:
    """The manifest's bytes and its marker, once it is known that both can be read back."""
    content = manifest.to_bytes()
    marker = Marker.of(manifest, content)
    try:
        Manifest.check_bytes(content)
        Marker.from_bytes(marker.to_bytes())
    except CorruptCheckpointError as error:
        raise SaveError(
            f"step {manifest.step} was not committed: {error}", step=manifest.step, phase="commit"
        ) from error
    return content, marker


def _check_files(storage: Storage, working: str, manifest: Manifest) -> None:
    """Compare what the ranks say they wrote with what is there, at the price of one listing per directory."""
    problems = _unlike(storage, working, manifest)
    if problems:
        raise SaveError(
            f"step {manifest.step} was not committed: of the files in {storage.url}/{working}, "
            f"{len(problems)} are not what the ranks wrote, first {problems[0]}; check the storage for lost "
            "writes and save again",
            step=manifest.step,
            phase="commit",
        )


def _unlike(storage: Storage, working: str, manifest: Manifest) -> list[str]:
    """The files that are not as the manifest says, by their sizes, each with what is there."""
    sizes = {
        _join(directory, child.name): child.size_bytes
        for directory in _directories(manifest)
        for child in storage.list(_join(working, directory))
        if not child.is_directory
    }
    suspects = [entry for entry in manifest.files if sizes.get(entry.path) != entry.size_bytes]
    # By their names: a listing may not show yet what is there.
    found = {entry.path: _size(storage, f"{working}/{entry.path}") for entry in suspects}
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


def _directories(manifest: Manifest) -> list[str]:
    """Every directory that holds a file or a directory of the manifest, "" for the checkpoint's own."""
    holders = {entry.path.rpartition("/")[0] for entry in manifest.files}
    parents = {str(parent) for holder in holders for parent in PurePosixPath(holder).parents}
    return sorted({""} | holders | (parents - {"."}))


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory and name else directory or name


def _refuse(storage: Storage, name: str) -> NoReturn:
    """Say that `name` is taken, and by what."""
    place = f"{storage.url}/{name}"
    if storage.exists(f"{name}/{MARKER}"):
        raise CheckpointExistsError(f"{place} is committed already; checkpoints are never overwritten")
    raise CheckpointExistsError(
        f"{place} is occupied by something that is not a committed checkpoint; nothing there was touched: "
        "look at it, then move or delete it"
    )
