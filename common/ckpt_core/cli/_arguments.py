"""Arguments that name a root or a checkpoint, and the right to write there."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

from ckpt_core.commit import (
    Catalog,
    Lease,
    Owner,
    Survey,
    file_as_root,
    look_around,
    refuse_as_root,
    remove_drafts,
)
from ckpt_core.disclosure import public_url
from ckpt_core.errors import CheckpointNotFoundError, ConfigError, RootBusyError
from ckpt_core.hosting import CheckpointPath, root_of
from ckpt_core.names import DAMAGED, JOURNAL, MARKER, PINS, TIERS, WRITER, can_count, is_own_file
from ckpt_core.options import parse_yaml
from ckpt_core.storage import Storage, excludes_others, open_storage

OPTIONS_VARIABLE: Final = "CKPT_SUITE_STORAGE_OPTIONS"
"""The same variable as of `accelerate_ckpt`."""
_COMMANDS: Final = frozenset({"ckpt cp", "ckpt prune", "ckpt upload"})
_LOCAL: Final = ("file://", "local://")
_MOST_DIGITS: Final = 18


CHECKPOINT: Final[Mapping[str, Any]] = {
    "metavar": "CHECKPOINT",
    "help": "ROOT@STEP, or the path or URL of a checkpoint",
}
"""The argument of a command that takes one checkpoint."""
ROOT_OR_CHECKPOINT: Final[Mapping[str, Any]] = {
    "metavar": "ROOT_OR_CHECKPOINT",
    "help": "path or URL of a run or of a checkpoint, or ROOT@STEP",
}


class Commands(Protocol):
    """The commands of a parser, to which each adds its own."""

    @property
    def choices(self) -> Mapping[str, ArgumentParser]:
        """The parsers by their commands."""
        ...

    def add_parser(self, *args: Any, **kwargs: Any) -> ArgumentParser:
        """Add a command; see `argparse`."""
        ...


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
    saves. So only a command that has ended on this host loses its claim without `take_over`.
    """
    owner = Owner.of(storage)
    known = take_over or is_left_over(owner) or owner is None or has_ended(owner)
    if not known and not _locks(storage):
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


def _locks(storage: Storage) -> bool:
    """Return whether a live job would hold a lock."""
    lock = storage.try_lock(WRITER)
    if lock is None:
        return True
    lock.release()
    return excludes_others(lock)


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
        raise nothing_at(storage.url)
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


def find_root(root: str, options: Mapping[str, Any]) -> tuple[Storage, Survey]:
    """Open a root that holds checkpoints, and list them."""
    storage = open_root(root, options)
    survey = Catalog(storage).survey()
    if not survey.everything and not survey.unreadable:
        raise none_committed(storage)
    return storage, survey


def none_committed(storage: Storage) -> CheckpointNotFoundError:
    """Return the error for a root without checkpoints, with what is there instead."""
    return CheckpointNotFoundError(
        "; ".join(
            [f"{storage.url}: no checkpoint is committed there", *look_around(storage).advice(storage.url)]
        )
    )


def open_target(root: str, options: Mapping[str, Any]) -> Storage:
    """Open the storage of a root to copy to, and prove that it can be written."""
    storage = open_storage(root_of(root), options)
    refuse_as_root(storage)
    storage.check_root()
    return storage


def number_in(text: str) -> int | None:
    """Return the number that digits from 0 to 9 write; None for other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MOST_DIGITS else None


def step_in(place: str) -> tuple[str, int] | None:
    """Split ROOT@STEP into root and step; None for any other place."""
    root, _, text = place.rpartition("@")
    step = number_in(text)
    return None if not root or step is None else (root, step)


def refuse_file_of_a_root(option: str, path: Path) -> None:
    """Refuse to write a file of the user's over one of a root, or into a checkpoint."""
    place = path.absolute()
    own = is_own_file(place.name) or place.name in JOURNAL | {DAMAGED, PINS, TIERS, WRITER}
    if own or any((parent / MARKER).exists() for parent in place.parents):
        what = "is the name of a file of checkpoints" if own else "lies in a checkpoint"
        raise ConfigError(f"{option} {path}: it {what}; write it elsewhere")


def nothing_at(place: str) -> CheckpointNotFoundError:
    """Return the error for an empty place."""
    return CheckpointNotFoundError(f"{place}: there is nothing")


def open_checkpoint(place: str, options: Mapping[str, Any]) -> tuple[Storage, str]:
    """Open the root of a checkpoint; return it and the checkpoint's name, unchecked."""
    found = CheckpointPath.of(place)
    return open_storage(found.root, options), found.name


def named_checkpoint(place: str, options: Mapping[str, Any]) -> tuple[Storage, str] | None:
    """Find the checkpoint that a place names: its own path, or ROOT@STEP.

    Returns the storage of its root, and its name, committed or torn; None if the place is none, but may be a
    root. A directory whose own name ends in @STEP is that directory.
    """
    found = step_in(place)
    try:
        storage, name = open_checkpoint(place, options)
    except ConfigError:
        if found is None:
            return None  # a bucket has no parent; any other error is raised when it is opened as a root
    else:
        if not can_count(name) or storage.exists(f"{name}/{MARKER}"):
            return storage, name
        if found is None or storage.entry(name) is not None:
            return None
    root = open_root(found[0], options)
    return root, Catalog(root).name_of(found[1])


def find_step(place: str, options: Mapping[str, Any]) -> tuple[Storage, int, str | None]:
    """Find root and step that a place names; and the name if it is a path."""
    found = step_in(place)
    with suppress(ConfigError):  # a bucket has no parent
        storage, name = open_checkpoint(place, options)
        if storage.exists(f"{name}/{MARKER}"):
            return storage, Catalog(storage).marker(name).step, name
        found = None if storage.entry(name) is not None else found
    if found is None:
        raise ConfigError(
            f"{public_url(place)!r} names no checkpoint: write ROOT@STEP (runs/llama@1200), or its path"
        )
    return open_root(found[0], options), found[1], None


def find_checkpoint(place: str, options: Mapping[str, Any], *, step: int | None) -> tuple[Storage, str]:
    """Find the checkpoint at a place, or one in the root that is there.

    Returns the storage of its root, and its name.
    """
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


def place_of(arguments: Namespace) -> str:
    """Return the place that a command is about, as given; of several, a URL."""
    given = vars(arguments)
    several = [*given.get("sources", ()), given.get("target"), given.get("other")]
    if found := [str(place) for place in several if "://" in str(place)] or given.get("sources"):
        return str(found[0])
    return str(next(given[name] for name in ("root", "place", "checkpoint") if name in given))


def storage_options(
    pairs: Sequence[str], place: str, environment: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Collect the storage options: of the environment, for a URL, then those given."""
    options: dict[str, Any] = {}
    if "://" in place and (text := environment.get(OPTIONS_VARIABLE)):
        found = _json(text)
        found = parse_yaml(text, OPTIONS_VARIABLE) if isinstance(found, str) else found
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


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
