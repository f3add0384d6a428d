"""Arguments that name a root or a checkpoint, and the right to write there."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from ckpt_core.commit import (
    Catalog,
    Lease,
    Owner,
    file_as_root,
    look_around,
    refuse_as_root,
    remove_drafts,
)
from ckpt_core.disclosure import public_url
from ckpt_core.errors import CheckpointNotFoundError, ConfigError, RootBusyError
from ckpt_core.hosting import CheckpointPath, root_of, step_in
from ckpt_core.names import DATA_SUFFIX, MARKER, WRITER, can_count
from ckpt_core.options import parse_yaml
from ckpt_core.storage import Storage, excludes_others, open_around, open_storage

OPTIONS_VARIABLE: Final = "CKPT_SUITE_STORAGE_OPTIONS"
"""The same variable as of `accelerate_ckpt`."""
_COMMANDS: Final = frozenset({"ckpt cp", "ckpt demote", "ckpt import", "ckpt prune", "ckpt upload"})
_LOCAL: Final = ("file://", "local://")


@contextmanager
def claimed(
    storage: Storage,
    command: str,
    *,
    take_over: bool,
    has_ended: Callable[[Owner], bool] = lambda _: False,
) -> Generator[Lease]:
    """Hold the lease of a root for a command.

    Where storage cannot lock, an owner in `writer.json` may be alive, and to take its root would stop its
    saves. So without `take_over` only a command that has ended on this host loses its claim, or an owner that
    `has_ended` for a reason that the command knows.
    """
    owner = Owner.of(storage)
    known = take_over or is_left_over(owner) or owner is None or has_ended(owner)
    if not known and is_idle(storage) is None:
        advice = ", or use --dry-run" if command == "ckpt prune" else ""
        raise RootBusyError(
            f"{storage.url} belongs to {owner}: if that job has ended, add --take-over; "
            f"if it is alive, let it {command.removeprefix('ckpt ')}{advice}"
        )
    with Lease.acquire(storage, command) as lease:
        if storage.supports_rename:
            remove_drafts(storage)
        yield lease


def is_left_over(owner: Owner | None) -> bool:
    """Return whether it is a command that was killed on this host."""
    return owner is not None and owner.job in _COMMANDS and owner.has_ended


def is_idle(storage: Storage) -> bool | None:
    """Return whether no job holds the lock of a root; None if no lock tells."""
    try:
        lock = storage.try_lock(WRITER)
    except OSError:  # a root that this user can only read
        return None
    if lock is None:
        return False
    lock.release()
    return True if excludes_others(lock) else None


def is_local(place: str) -> bool:
    """Return whether a place is a path, also one with a scheme."""
    return "://" not in place or place.startswith(_LOCAL)


def open_place(place: str, options: Mapping[str, Any]) -> Storage:
    """Open the storage of a directory or prefix that holds something."""
    storage = open_storage(root_of(place), options)
    try:
        entries = storage.list("")
    except NotADirectoryError:
        raise file_as_root(storage.url) from None
    if not entries:
        raise CheckpointNotFoundError(f"{storage.url}: there is nothing")
    return storage


def open_root(root: str, options: Mapping[str, Any]) -> Storage:
    """Open the storage of a root that holds something; touch nothing in it."""
    try:
        storage = open_place(root, options)
    except CheckpointNotFoundError:
        if (found := step_in(root)) is not None:
            raise ConfigError(
                f"{public_url(root)} names one checkpoint, and this command takes the root of a run: give "
                f"{public_url(found[0])}"
            ) from None
        raise
    refuse_as_root(storage)
    return storage


def none_committed(storage: Storage) -> CheckpointNotFoundError:
    """Return the error for a root without checkpoints, with what is there instead."""
    advice = look_around(storage).advice(storage.url)
    return CheckpointNotFoundError("; ".join([f"{storage.url}: no checkpoint is committed there", *advice]))


def open_target(root: str, options: Mapping[str, Any]) -> Storage:
    """Open the storage of a root to copy to, and prove that it can be written."""
    storage = open_storage(root_of(root), options)
    refuse_as_root(storage)
    storage.check_root()
    return storage


def open_checkpoint(place: str, options: Mapping[str, Any]) -> tuple[Storage, str]:
    """Open the root of a checkpoint; return it and the checkpoint's name, unchecked."""
    found = CheckpointPath.of(place)
    return open_storage(found.root, options), found.name


def resolve(place: str, options: Mapping[str, Any]) -> tuple[Storage, str | int] | None:
    """Find the root, and the committed name or the step, that a place names.

    The place is a path or ROOT@STEP; None if it names no checkpoint. A directory whose own name ends in @STEP
    is that directory.
    """
    found = step_in(place)
    with suppress(
        ConfigError
    ):  # a bucket has no parent; any other error is raised when it is opened as a root
        storage, name = open_checkpoint(place, options)
        if storage.exists(f"{name}/{MARKER}"):
            return storage, name
        if found is None or storage.entry(name) is not None:
            return None
    return None if found is None else (open_root(found[0], options), found[1])


def named_checkpoint(place: str, options: Mapping[str, Any]) -> tuple[Storage, str] | None:
    """Find root and name of a checkpoint, also a torn one; None for a possible root."""
    with suppress(ConfigError):
        storage, name = open_checkpoint(place, options)
        if not can_count(name):
            return storage, name
    if (found := resolve(place, options)) is None:
        return None
    root, which = found
    return root, Catalog(root).name_of(which) if isinstance(which, int) else which


def find_step(place: str, options: Mapping[str, Any]) -> tuple[Storage, int, str | None]:
    """Find root and step that a place names; and the name if it is a path."""
    if (found := resolve(place, options)) is None:
        raise ConfigError(
            f"{public_url(place)!r} names no checkpoint: write ROOT@STEP (runs/llama@1200), or its path"
        )
    root, which = found
    if isinstance(which, int):
        return root, which, None
    return root, Catalog(root).marker(which).step, which


def find_checkpoint(place: str, options: Mapping[str, Any], *, step: int | None) -> tuple[Storage, str]:
    """Find root and name of a checkpoint; of a root, its step or the newest usable."""
    if step is not None:
        root = open_root(place, options)
        return root, Catalog(root).name_of(step)
    if (named := named_checkpoint(place, options)) is not None:
        return named
    root = open_storage(root_of(place), options)
    try:
        latest = Catalog(root).latest()
    except NotADirectoryError:
        raise file_as_root(root.url) from None
    if latest is not None:
        return root, latest.name
    try:
        return open_checkpoint(place, options)
    except ConfigError:
        raise none_committed(root) from None


def find_any(place: str, options: Mapping[str, Any], *, step: int | None) -> tuple[Storage, str, str]:
    """Find a checkpoint as `find_checkpoint` does, or a file or folder of others.

    Returns the storage around it, the name of its directory, and that of a file there, or "".
    """
    others = None if step is not None else find_others(place, options)
    if others is not None and (others[2] or "/" in others[1]):  # in the cache of `huggingface_hub`
        return others
    return *find_checkpoint(place, options, step=step), ""


def find_others(place: str, options: Mapping[str, Any]) -> tuple[Storage, str, str] | None:
    """Open what is around a folder or file, see `open_around`; None if there is none."""
    try:
        found = open_around(place, options)
    except (CheckpointNotFoundError, ConfigError):
        return None
    if found[2].endswith(DATA_SUFFIX):
        raise file_as_root(public_url(place))
    return found


def place_of(arguments: Namespace) -> str:
    """Return the place that a command is about, as given; of several, a URL."""
    given = vars(arguments)
    several = [*given.get("sources", ()), given.get("target"), given.get("other")]
    if found := [str(place) for place in several if "://" in str(place)] or given.get("sources"):
        return str(found[0])
    return str(next((given[name] for name in ("root", "place", "checkpoint") if name in given), ""))


def options_for(place: str, arguments: Namespace) -> dict[str, Any]:
    """Return the storage options for one place of a command; a path takes none."""
    return {} if is_local(place) else storage_options(arguments.storage_option, place)


def storage_options(
    pairs: Sequence[str], place: str, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Collect the storage options: of the environment, for a URL, then those given.

    A pair is `key=value`, the value JSON where it reads as such, else text; or `key=@NAME`, the value of the
    variable NAME, JSON if that is an object or a list, else text; `key=@@text` is the text `@text`. Errors
    show no value.
    """
    options: dict[str, Any] = {}
    if "://" in place and (text := environment.get(OPTIONS_VARIABLE)):
        found = json_or_yaml(text, OPTIONS_VARIABLE)
        if not isinstance(found, Mapping):
            raise ConfigError(f"{OPTIONS_VARIABLE} must be a mapping of options, not {type(found).__name__}")
        options.update(found)
    for number, pair in enumerate(pairs, start=1):
        key, found, text = pair.partition("=")
        if not key or not found:
            raise ConfigError(
                f"--storage-option takes KEY=VALUE, or KEY=@NAME for the value of the variable NAME; number "
                f"{number} of those given {'has no key' if found else 'has no ='}"
            )
        options[key] = _value(key, text, environment)
    return options


def _value(key: str, text: str, environment: Mapping[str, str]) -> Any:
    if text.startswith("@@"):
        return text[1:]
    if not text.startswith("@"):
        return _json(text)
    name = text[1:]
    if name not in environment:
        raise ConfigError(f"--storage-option {key}=@{name}: there is no variable of that name")
    # A number in such a variable is more often a password.
    value = environment[name]
    return _json(value) if value.lstrip().startswith(("{", "[")) else value


def json_or_yaml(text: str, source: str) -> Any:
    """Parse text; YAML, which needs its package, only if it is no JSON."""
    found = _json(text)
    return parse_yaml(text, source) if isinstance(found, str) else found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
