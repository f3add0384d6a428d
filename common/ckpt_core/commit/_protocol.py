"""The commit protocol: how a save becomes a checkpoint.

The one rule: no `COMMITTED`, no checkpoint. A crash at any point leaves either the old set of checkpoints or
the new one, because exactly one operation, atomic on its storage, moves between them:

    POSIX                                    after a crash here, on disk is
    1. make `.incomplete-<id>-<name>~`       a torn directory, ignored by everyone
    2. every rank writes and fsyncs files    a torn directory
    3. manifest.json, then COMMITTED, fsync  a torn directory, complete, but under a name that never counts
    4. rename onto `<name>`                  the checkpoint, or (power loss before 5) the torn directory of 3
    5. fsync the parent                      the checkpoint

    Where each node has a disk of its own, every step is done on all of them before the next one begins. A
    crash within step 4 leaves the checkpoint on some disks, and the torn directory of 3, complete, on others:
    the next run renames it there, too (see `settle_parts`).

    If `<name>` is a checkpoint to be replaced, step 4 exchanges the names; then the user's files move from
    the old one to the new one, and the old one is deleted. So it is with a directory of the user's, but the
    save has the name `.aside-<id>-<name>~` first, by which the next run knows what is left after a crash
    (see `settle_asides`). Anything else is moved aside first (see `quarantine`).

    object store                             after a crash here, in the bucket is
    1. delete objects of a torn save         nothing, or fewer objects without marker
    2. every rank uploads its objects        objects without marker, ignored by everyone
    3. manifest.json                         objects without marker
    4. COMMITTED                             the checkpoint: a completed upload appears atomically
    5. check who owns the root               the checkpoint; if another job has taken the root and
                                             deleted its objects, the marker is deleted, too

On an object store an upload may arrive although its sender got no answer, or is dead. No object overwrites
another there. If the outcome of the marker's upload is unknown, the data objects are kept, so that the
checkpoint is complete should the marker appear later.

Files that we did not write are never overwritten or deleted on this path, nor is a committed checkpoint,
except one that is being replaced, after the new one has its name.
Any thread of the coordinator may call these, one save at a time per root.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

from ckpt_core.commit._manifest import MAX_MANIFEST_BYTES, MAX_MARKER_BYTES, Manifest, Marker, join
from ckpt_core.commit._occupant import Occupant, is_link, occupant, quarantine
from ckpt_core.commit._prune import delete_in_place, retire, retire_aside
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    ConfigError,
    CorruptCheckpointError,
    HalfRenamedError,
    SaveError,
)
from ckpt_core.names import (
    MANIFEST,
    MARKER,
    METADATA,
    OWN,
    SHARED,
    aside_name,
    can_count,
    data_rank,
    drafted,
    incomplete_name,
    is_incomplete,
    is_own_file,
    is_probe,
    original_name,
    set_aside,
)
from ckpt_core.storage import BIGGEST_SMALL_FILE, LocalStorage, Storage, read_small
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_RESERVED: Final = {MANIFEST, MARKER, METADATA, SHARED}
_KINDS: Final = {
    Occupant.UNREADABLE: "a torn or damaged checkpoint",
    Occupant.TORN: "a torn or damaged checkpoint",
    Occupant.STOCK: "another program's checkpoint",
}
_LONGEST_NAME: Final = 200
"""In bytes; most filesystems allow 255, and names of saves in flight are longer."""
_MOST_ATTEMPTS: Final = 8
"""How often another process may take the name between the check and the commit."""


def is_name(name: str) -> bool:
    """Return whether a checkpoint may be called so: one plain name, none of ours."""
    plain = name not in {".", ".."} and all(char >= " " and char not in "/\x7f" for char in name)
    reserved = name in _RESERVED or is_probe(name) or drafted(name) is not None
    return (
        plain and 0 < len(name.encode(errors="replace")) <= _LONGEST_NAME and not reserved and can_count(name)
    )


def working_name(storage: Storage, name: str, save_id: str) -> str:
    """Return the directory that a save writes into.

    Beside `name`, or in place on an object store. `save_id` has 8 to 32 lower-case hex digits.
    """
    return incomplete_name(name, save_id) if storage.supports_rename else name


def begin(storage: Storage, name: str, save_id: str, *, replace: bool = False) -> str:
    """Prepare the directory that checkpoint `name` is written into; return its name.

    With `replace`, `name` may be committed; then `commit` needs `replace`, too.
    """
    found = require_free(storage, name, replace=replace)
    working = working_name(storage, name, save_id)
    if not storage.supports_rename:
        if found is Occupant.UNREADABLE:
            quarantine(storage, name)
        if found in {Occupant.UNREADABLE, Occupant.TORN}:
            delete_in_place(storage, name)
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


def require_free(storage: Storage, name: str, *, replace: bool = False) -> Occupant:
    """Refuse a name that a save could not take; return its occupant.

    With renames, only a committed checkpoint that is not to be replaced is refused. On an object store
    nothing can be moved aside, so that any committed checkpoint is refused, and so is another program's
    checkpoint with file names like ours.
    """
    if not is_name(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a checkpoint: one plain directory name is needed, of at most "
            f"{_LONGEST_NAME} bytes, that is none of {', '.join(sorted({OWN, *_RESERVED}))}"
        )
    found = occupant(storage, name)
    if found is Occupant.COMMITTED and not (replace and storage.supports_rename):
        _refuse(storage, name)
    if found is Occupant.STOCK and not storage.supports_rename:
        raise CheckpointExistsError(
            f"{storage.url}/{name} is a checkpoint that another program wrote, and an object store cannot "
            "move it aside; nothing there was touched: move or delete it, or save under another name"
        )
    own = storage.own
    if found is Occupant.FILES and isinstance(own, LocalStorage) and own.local_path(name).samefile("."):
        raise ConfigError(
            f"{storage.url}/{name} is the working directory of this job, which cannot become a checkpoint: "
            "save under another name, such as that of a directory in it"
        )
    return found


def commit(
    storage: Storage,
    working: str,
    name: str,
    manifest: Manifest,
    *,
    replace: bool = False,
    check: Callable[[], None] = lambda: None,
) -> CheckpointInfo:
    """Turn the files in `working` into checkpoint `name`, all or nothing.

    Every rank must have finished and synced its files. With `replace`, a committed checkpoint of that name is
    replaced. `check` raises if another job has taken the root (see `Lease.check`); it is called where nothing
    else keeps that job from writing under the same name.

    Raises:
        CheckpointExistsError: `name` has been committed since `begin`; nothing there was touched.
        SaveError: a file is missing or has another size than reported, or the manifest is not valid; or,
            with `in_doubt`, all files are there, but the name could not be made durable, or an object store
            did not report the outcome of the marker's upload.
        ConfigError: the manifest holds values that JSON cannot.
        RootBusyError: from `check`; if the checkpoint was complete by then, it stays.
    """
    content, marker = _encode(manifest, storage.num_disks)
    _check_files(storage, working, manifest)
    with _name_outcomes(storage, name, manifest.step):
        storage.write_bytes(f"{working}/{MANIFEST}", content)
        if storage.supports_rename:
            storage.write_bytes(f"{working}/{MARKER}", marker.to_bytes())
            _move_into_place(storage, working, name, manifest, replace=replace)
        else:
            _commit_in_place(storage, name, manifest, marker=marker.to_bytes(), check=check)
    return marker.info(name)


@contextmanager
def _name_outcomes(storage: Storage, name: str, step: int) -> Generator[None]:
    """Say what it means that the name was taken meanwhile, or is on some disks."""
    try:
        yield
    except CheckpointExistsError:
        raise
    except HalfRenamedError as error:
        raise SaveError(
            f"step {step} is complete, and committed on the disks of some nodes only: {error}",
            step=step,
            phase="commit",
            in_doubt=True,
        ) from error
    except FileExistsError as error:
        if storage.exists(f"{name}/{MARKER}"):
            _refuse(storage, name)
        raise CheckpointExistsError(
            f"{storage.url}/{name} was created by others since the save began ({error}); nothing there "
            "was touched: inspect it, then move or delete it"
        ) from error


def commit_copy(
    storage: Storage,
    working: str,
    name: str,
    manifest: Manifest,
    *,
    check: Callable[[], None],
    repair: bool = False,
) -> CheckpointInfo:
    """Turn the copied files in `working`, manifest included, into checkpoint `name`.

    All of them were compared with the manifest. With `repair`, a damaged copy of the same save that has the
    name is replaced, as by a save that replaces. Other arguments and errors as by `commit`.
    """
    content = read_small(storage, f"{working}/{MANIFEST}", MAX_MANIFEST_BYTES)
    marker = Marker.of(manifest, content, groups=storage.num_disks)
    _check_files(storage, working, manifest)
    check()
    with _name_outcomes(storage, name, manifest.step):
        if storage.supports_rename:
            storage.delete(f"{working}/{MARKER}")
            storage.write_bytes(f"{working}/{MARKER}", marker.to_bytes())
            replace = repair and _holds_save(storage, name, manifest.save_id)
            _move_into_place(storage, working, name, manifest, replace=replace)
        else:
            _commit_in_place(storage, name, manifest, marker=marker.to_bytes(), check=check)
    return marker.info(name)


def _holds_save(storage: Storage, name: str, save_id: str) -> bool:
    try:
        return Marker.read(storage, name).save_id == save_id and not is_link(storage, name)
    except (FileNotFoundError, CheckpointError):
        return False


def _commit_in_place(
    storage: Storage, name: str, manifest: Manifest, *, marker: bytes, check: Callable[[], None]
) -> None:
    check()
    try:
        storage.write_bytes(f"{name}/{MARKER}", marker)
    except (FileExistsError, PermissionError):
        raise  # it was certainly refused
    except OSError as error:
        raise SaveError(
            f"step {manifest.step} may or may not be committed to {storage.url}/{name}: storage did not "
            f"report whether its marker arrived ({error}). Its files were kept, so it is whole if it is "
            "committed; run `ckpt ls` when storage works again",
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
    """Delete a marker that arrived after another job had deleted its objects."""
    try:
        torn = _unlike(storage, name, manifest)
        if torn and read_small(storage, f"{name}/{MARKER}", MAX_MARKER_BYTES) == marker:
            storage.delete(f"{name}/{MARKER}")
    except (CheckpointError, OSError) as error:
        _logger.warning("%s/%s may be torn, and could not be inspected: %s", storage.url, name, error)


def _move_into_place(storage: Storage, working: str, name: str, manifest: Manifest, *, replace: bool) -> None:
    for directory in manifest.directories:
        storage.sync_directory(join(working, directory))
    left = ""
    for attempt in range(_MOST_ATTEMPTS):
        # The name is checked first only for a replacement: mostly it is free.
        found = occupant(storage, name) if replace or attempt else Occupant.NOTHING
        try:
            left = _take_name(storage, working, name, found=found, replace=replace)
        except (FileExistsError, FileNotFoundError):
            if attempt == _MOST_ATTEMPTS - 1 or not storage.exists(f"{working}/{MARKER}"):
                raise
        else:
            break
    _make_name_durable(storage, name, manifest)
    if left:
        abandon(storage, left)


def _take_name(storage: Storage, working: str, name: str, *, found: Occupant, replace: bool) -> str:
    """Give the finished save its name; return where what is to be deleted is."""
    if found is Occupant.COMMITTED and replace and not is_link(storage, name):
        storage.exchange(working, name)
        return working
    if found is Occupant.COMMITTED and not replace:
        _refuse(storage, name)
    if found is Occupant.FILES:
        aside = aside_name(name, secrets.token_hex(4))
        storage.rename(working, aside)
        try:
            storage.sync_directory("")
            storage.exchange(aside, name)
        except HalfRenamedError:
            raise
        except OSError:
            with suppress(OSError):  # the first error is the one to raise
                if storage.exists(f"{aside}/{MARKER}"):  # else both have exchanged their places all the same
                    storage.rename(aside, working)
            raise
        return aside
    if found is not Occupant.NOTHING:
        _logger.warning(
            "%s/%s was %s and stood in the way of a new checkpoint: it was moved to %s/%s",
            storage.url,
            name,
            _KINDS.get(found, "not a checkpoint of ours"),
            storage.url,
            quarantine(storage, name),
        )
    storage.rename(working, name)
    return ""


def _make_name_durable(storage: Storage, name: str, manifest: Manifest) -> None:
    """Fsync the root. Not retried: the kernel may report a lost page only once."""
    try:
        storage.sync_directory("")
    except OSError as error:
        text = f"{type(error).__name__}: {error}"
        raise SaveError(
            f"step {manifest.step} is complete in {storage.url}/{name}, but its name could not be made "
            f"durable (phase commit): rank 0: {text}. It counts now, but a power cut may take it back. "
            "Nothing older was removed; fix the storage, then save another step",
            step=manifest.step,
            phase="commit",
            failures={0: text},
            in_doubt=True,
        ) from error


def abandon(storage: Storage, working: str) -> None:
    """Remove the directory of a save, but never a committed one or the user's files.

    Failures are logged. On an object store the marker may have arrived although its upload reported an error:
    then the checkpoint is whole, and stays.
    """
    try:
        if not storage.supports_rename:
            if not storage.exists(f"{working}/{MARKER}"):
                delete_in_place(storage, working)
        elif is_incomplete(working):
            retire(storage, working, original_name(working))
        elif set_aside(working) is not None:
            retire_aside(storage, working)
    except OSError as error:
        # A failure that led here is reported by the caller; leftovers are collected by a later prune.
        _logger.warning("could not remove torn %s/%s: %s", storage.url, working, error)


def _encode(manifest: Manifest, groups: int) -> tuple[bytes, Marker]:
    for entry in manifest.files:
        small = entry.size_bytes <= BIGGEST_SMALL_FILE or data_rank(entry.path) is not None
        if not small and is_own_file(entry.path):
            raise _uncommitted(
                manifest,
                f"{entry.path} has {entry.size_bytes} bytes, more than the {BIGGEST_SMALL_FILE} that a load "
                "accepts for such a file: keep large values in tensors, which have files of their own",
            )
    content = manifest.to_bytes()
    marker = Marker.of(manifest, content, groups=groups)
    try:
        Manifest.from_bytes(content, with_files=False)
        Marker.from_bytes(marker.to_bytes())
    except CorruptCheckpointError as error:
        raise _uncommitted(manifest, str(error)) from error
    return content, marker


def _check_files(storage: Storage, working: str, manifest: Manifest) -> None:
    problems = _unlike(storage, working, manifest)
    if problems:
        raise _uncommitted(
            manifest,
            f"of the files in {storage.url}/{working}, {len(problems)} differ from what the ranks wrote, "
            f"first {problems[0]}; check the storage for lost writes and save again",
        )


def _unlike(storage: Storage, directory: str, manifest: Manifest) -> list[str]:
    """List files whose size differs from the manifest, with their size in storage."""
    sizes = {
        join(inner, child.name): child.size_bytes
        for inner in manifest.directories
        for child in storage.list(join(directory, inner))
        if not child.is_directory
    }
    problems: list[str] = []
    for entry in manifest.files:
        if sizes.get(entry.path) == entry.size_bytes:
            continue
        found: int | str = "no"
        with suppress(FileNotFoundError):  # asked for by name: a listing may not show new objects yet
            found = storage.size(f"{directory}/{entry.path}")
        if found != entry.size_bytes:
            problems.append(f"{entry.path} has {found} bytes, not {entry.size_bytes}")
    return problems


def _uncommitted(manifest: Manifest, why: str) -> SaveError:
    return SaveError(f"step {manifest.step} was not committed: {why}", step=manifest.step, phase="commit")


def _refuse(storage: Storage, name: str) -> NoReturn:
    never = "" if storage.supports_rename else ", nor replaced on an object store: save under another name"
    raise CheckpointExistsError(
        f"{storage.url}/{name} is committed already; checkpoints are never overwritten{never}"
    )
