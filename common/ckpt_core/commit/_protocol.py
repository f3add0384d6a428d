"""How a checkpoint becomes true.

The one rule: no `COMMITTED`, no checkpoint. A crash at any point leaves either the old set of checkpoints or
the new one, because exactly one operation, atomic on its storage, moves between them:

    POSIX                                    after a crash here, on disk is
    1. make `.incomplete-<id>-<name>`        a torn directory, ignored by everyone
    2. every rank writes and fsyncs files    a torn directory
    3. manifest.json, then COMMITTED, fsync  a torn directory, complete, but under a name that never counts
    4. rename onto `<name>`                  the checkpoint, or (power loss before 5) the torn directory of 3
    5. fsync the parent                      the checkpoint

    Where `<name>` is a directory of the user's, 4 is: move the files into it one by one, fsync, then the
    marker. After a crash on the way both directories are there, and the next run goes on (see `merge`). Where
    a checkpoint is replaced, 4 exchanges the names; then what is not ours moves from the old one to the new
    one, and the old one is deleted. What is neither makes way under another name (see `set_aside`).

    object store                             after a crash here, in the bucket is
    1. clear what a torn save of ours left   nothing, or fewer leftovers without marker
    2. every rank uploads its objects        objects without marker, ignored by everyone
    3. manifest.json                         objects without marker
    4. COMMITTED                             the checkpoint: a completed upload appears at once and whole
    5. ask whose the root is                 the checkpoint; unless another job has taken the root
                                             and cleared it away: then the marker goes too

On an object store an upload may arrive although its sender was told nothing, or is dead. No object takes the
place of another there, and a marker of which it is not known whether it arrived is not given up: its objects
stay, so that it tells the truth whenever it shows.

Nothing that we did not write is ever overwritten or deleted on this path, and nothing that is committed but
what is to be replaced, after the new one has its name.
Any thread of the coordinator may call these, one save at a time per root.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NoReturn

from ckpt_core.commit._catalog import can_count
from ckpt_core.commit._manifest import MAX_MARKER_BYTES, Manifest, Marker
from ckpt_core.commit._occupant import Occupant, is_link, occupant, quarantine, set_aside
from ckpt_core.commit._strangers import delete_in_place, directories_of, join, merge, retire, unlike
from ckpt_core.disclosure import logger_of
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
    METADATA,
    PINS,
    SHARED,
    WRITER,
    data_rank,
    drafted,
    incomplete_name,
    is_incomplete,
    is_own_file,
    is_probe,
    original_name,
)
from ckpt_core.storage import BIGGEST_SMALL_FILE, Storage, read_small
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_RESERVED: Final = frozenset({DAMAGED, PINS, WRITER, MANIFEST, MARKER, METADATA, SHARED})
_LONGEST_NAME: Final = 200
"""In bytes; most filesystems allow 255, of which the names in flight need some for themselves."""
_MOST_ATTEMPTS: Final = 8
"""So often somebody else may take the name between a look at it and the commit."""


def is_name(name: str) -> bool:
    """Whether a checkpoint may be called `name`: one plain directory name, none of those we use ourselves."""
    plain = name not in {".", ".."} and all(char >= " " and char not in "/\x7f" for char in name)
    reserved = name.removesuffix(".lock") in _RESERVED or is_probe(name) or drafted(name) is not None
    return (
        plain and 0 < len(name.encode(errors="replace")) <= _LONGEST_NAME and not reserved and can_count(name)
    )


def working_name(storage: Storage, name: str, save_id: str) -> str:
    """The directory that checkpoint `name` is written into: beside it, or in place on an object store.

    `save_id` has 8 to 32 lower-case hex digits.
    """
    return incomplete_name(name, save_id) if storage.supports_rename else name


def begin(storage: Storage, name: str, save_id: str, *, replace: bool = False) -> str:
    """Prepare the directory that checkpoint `name` is written into, and return its name.

    With `replace`, `name` may be committed; then `commit` must be told so too.

    Raises:
        CheckpointExistsError: `name` is committed, or nothing can make way for it; see `require_free`.
        ConfigError: `name` cannot be the name of a checkpoint.
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
    """Refuse a name that a save could not take, before anything is written; tell what has it now.

    Where things can be renamed, only a committed checkpoint that is not to be replaced is in the way. On an
    object store nothing can make way for a checkpoint, so that what counts, and what another program wrote
    under file names that ours has too, is refused.

    Raises:
        CheckpointExistsError: `name` is taken.
        ConfigError: `name` cannot be the name of a checkpoint.
    """
    if not is_name(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a checkpoint: one plain directory name is needed, of at most "
            f"{_LONGEST_NAME} bytes, that is none of "
            f"{', '.join(sorted(_RESERVED))}"
        )
    found = occupant(storage, name)
    if found is Occupant.COMMITTED and not (replace and storage.supports_rename):
        _refuse(storage, name)
    if found is Occupant.STOCK and not storage.supports_rename:
        raise CheckpointExistsError(
            f"{storage.url}/{name} is a checkpoint that another program wrote, and an object store cannot "
            "move it aside; nothing there was touched: move or delete it, or save under another name"
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
        CheckpointExistsError: `name` has been committed since `begin`; nothing there was touched.
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
    except CheckpointExistsError:
        raise
    except FileExistsError as error:
        if storage.exists(f"{name}/{MARKER}"):
            _refuse(storage, name)
        raise CheckpointExistsError(
            f"{storage.url}/{name} is occupied by what was not there when the save began ({error}); nothing "
            "there was touched: look at it, then move or delete it"
        ) from error
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
        torn = unlike(storage, name, manifest)
        if torn and read_small(storage, f"{name}/{MARKER}", MAX_MARKER_BYTES) == marker:
            storage.delete(f"{name}/{MARKER}")
    except (CheckpointError, OSError) as error:
        _logger.warning("%s/%s may be torn, and could not be looked at: %s", storage.url, name, error)


def _move_into_place(storage: Storage, working: str, name: str, manifest: Manifest, *, replace: bool) -> None:
    for directory in directories_of(manifest):
        storage.sync_directory(join(working, directory))
    found = Occupant.NOTHING
    for attempt in range(_MOST_ATTEMPTS):
        # Only what is to be replaced is looked for beforehand: mostly nothing has the name.
        found = occupant(storage, name) if replace or attempt else Occupant.NOTHING
        try:
            found = _take_name(storage, working, name, manifest, found=found, replace=replace)
        except FileExistsError:
            if attempt == _MOST_ATTEMPTS - 1:
                raise
        else:
            break
    for directory in (name, "") if found is Occupant.FILES else ("",):
        _make_name_durable(storage, name, manifest, directory)
    if found in {Occupant.COMMITTED, Occupant.FILES}:
        abandon(storage, working)


def _take_name(
    storage: Storage, working: str, name: str, manifest: Manifest, *, found: Occupant, replace: bool
) -> Occupant:
    """Give the finished save its name, whatever has it now; returns what had it.

    Raises:
        FileExistsError: something else has taken it meanwhile.
        CheckpointExistsError: it is committed.
    """
    if found is Occupant.COMMITTED and replace and not is_link(storage, name):
        storage.exchange(working, name)
        return found
    if found is Occupant.COMMITTED and not replace:
        _refuse(storage, name)
    if found is Occupant.FILES:
        try:
            merge(storage, working, name, manifest)
        except PermissionError as error:
            _logger.warning("files cannot be put into %s/%s (%s)", storage.url, name, error)
        else:
            return found
    if found is not Occupant.NOTHING:
        _clear_away(storage, name, found)
    storage.rename(working, name)
    return Occupant.NOTHING


def _clear_away(storage: Storage, name: str, found: Occupant) -> None:
    if found in {Occupant.UNREADABLE, Occupant.TORN}:
        what, moved = "a torn or damaged checkpoint", quarantine(storage, name)
    else:
        what = "another program's checkpoint" if found is Occupant.STOCK else "not a checkpoint of ours"
        moved = set_aside(storage, name)
    _logger.warning(
        "%s/%s was %s and stood in the way of a new checkpoint: it is %s/%s now",
        storage.url,
        name,
        what,
        storage.url,
        moved,
    )


def _make_name_durable(storage: Storage, name: str, manifest: Manifest, directory: str) -> None:
    """Fsync what holds it. No second try after a failure: the kernel may tell of a lost page only once."""
    try:
        storage.sync_directory(directory)
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
    """Remove the directory of a save, as far as possible; never one that is committed, nor the user's files.

    On an object store the marker may have arrived although its upload reported an error: then the
    checkpoint is whole, and stays.
    """
    try:
        if not storage.supports_rename:
            if not storage.exists(f"{working}/{MARKER}"):
                delete_in_place(storage, working)
        elif is_incomplete(working):
            retire(storage, working, original_name(working))
    except OSError as error:
        # A failure that led here is reported by the caller; leftovers are collected by a later prune.
        _logger.warning("could not remove torn %s/%s: %s", storage.url, working, error)


def _encode(manifest: Manifest) -> tuple[bytes, Marker]:
    """The manifest's bytes and its marker, once it is known that both can be read back."""
    _refuse_unreadable(manifest)
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


def _refuse_unreadable(manifest: Manifest) -> None:
    """Refuse what no load would read into memory: see `read_small`."""
    for entry in manifest.files:
        small = entry.size_bytes <= BIGGEST_SMALL_FILE or data_rank(entry.path) is not None
        if not small and is_own_file(entry.path):
            raise SaveError(
                f"step {manifest.step} was not committed: {entry.path} has {entry.size_bytes} bytes, more "
                f"than the {BIGGEST_SMALL_FILE} that a load reads of such a file: keep large values in "
                "tensors, which have files of their own",
                step=manifest.step,
                phase="commit",
            )


def _check_files(storage: Storage, working: str, manifest: Manifest) -> None:
    """Compare what the ranks say they wrote with what is there, at the price of one listing per directory."""
    problems = unlike(storage, working, manifest)
    if problems:
        raise SaveError(
            f"step {manifest.step} was not committed: of the files in {storage.url}/{working}, "
            f"{len(problems)} are not what the ranks wrote, first {problems[0]}; check the storage for lost "
            "writes and save again",
            step=manifest.step,
            phase="commit",
        )


def _refuse(storage: Storage, name: str) -> NoReturn:
    never = "" if storage.supports_rename else ", nor replaced on an object store: save under another name"
    raise CheckpointExistsError(
        f"{storage.url}/{name} is committed already; checkpoints are never overwritten{never}"
    )
