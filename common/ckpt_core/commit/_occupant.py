"""Names in a root that are no checkpoints, and advice for who looks for one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, final

from ckpt_core.commit._manifest import MAX_MANIFEST_BYTES, Manifest, Marker
from ckpt_core.errors import CheckpointError, ConfigError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.names import (
    MANIFEST,
    MARKER,
    METADATA,
    SIGNATURE,
    can_count,
    data_rank,
    is_own_file,
    is_own_json,
    is_replaced,
    parse_step_name,
    replaced_name,
)
from ckpt_core.storage import Storage, StorageEntry, read_small

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
    """Classify the directory of a name; on an object store, the prefix."""
    entry = storage.entry(name) if storage.supports_rename else None
    try:
        if storage.supports_rename and entry is None:
            return Occupant.NOTHING
        if entry is not None and (entry.is_link or not entry.is_directory):
            return Occupant.OTHER
        return content_of(storage, name)
    except PermissionError:
        if not storage.supports_rename:
            raise
        return Occupant.OTHER


def content_of(storage: Storage, name: str) -> Occupant:
    """Classify the content of a directory, or of one that a link leads to."""
    try:
        Marker.read(storage, name)
    except (FileNotFoundError, NotADirectoryError):
        return _unmarked(storage, name)
    except IncompatibleCheckpointError:
        return Occupant.COMMITTED
    except CorruptCheckpointError:
        return Occupant.UNREADABLE
    return Occupant.COMMITTED


def is_link(storage: Storage, name: str) -> bool:
    entry = storage.entry(name)
    return entry is not None and entry.is_link


def is_torn_step(storage: Storage, name: str) -> bool:
    """Return whether the directory of a step holds files of a save, and no marker."""
    torn = parse_step_name(name) is not None and not storage.exists(f"{name}/{MARKER}")
    return torn and _unmarked(storage, name) is Occupant.TORN


def _unmarked(storage: Storage, name: str) -> Occupant:
    paths = list(storage.paths_below(name, depth=2))
    if any(map(is_own_json, paths)):
        return Occupant.TORN
    if MANIFEST in paths:
        with suppress(CheckpointError, FileNotFoundError):
            content = read_small(storage, f"{name}/{MANIFEST}", MAX_MANIFEST_BYTES)
            Manifest.from_bytes(content, with_files=False)
            return Occupant.TORN
    in_place = not storage.supports_rename
    if SIGNATURE in paths and in_place:
        return Occupant.TORN  # a late upload: its checkpoint had been deleted already
    files = {path.rpartition("/")[2] for path in paths}
    has_data = any(data_rank(file) is not None for file in files)
    own = has_data or any("/" not in path and is_own_file(path) for path in paths)
    if own and METADATA not in files and in_place and parse_step_name(name) is not None:
        return Occupant.TORN  # a deletion that was interrupted leaves any of our files
    # Data without an index is no save of ours: ours gets its name only when it is whole.
    if has_data or METADATA in files or any(map(_TRAINING_STATE.fullmatch, files)):
        return Occupant.STOCK
    return Occupant.FILES if paths or storage.supports_rename else Occupant.NOTHING


def quarantine(storage: Storage, name: str, original: str = "") -> str:
    """Move aside what has or had the name of a checkpoint; return its place now.

    The caller owns the root. Only a user deletes it. An object store cannot rename: the marker is deleted,
    and the rest stays until the next save of that name deletes it.
    """
    if not storage.supports_rename:
        storage.delete(f"{name}/{MARKER}")
        return name
    target = replaced_name(original or name, secrets.token_hex(4))
    storage.rename(name, target)
    # Durable before anything else takes the name: a power cut that kept only the latter would lose this.
    storage.sync_directory("")
    return target


def replaced(storage: Storage) -> list[str]:
    """List what `quarantine` moved."""
    return [entry.name for entry in storage.list("") if is_replaced(entry.name)]


# --- advice

_MOST_DIRECTORIES: Final = 256
_MOST_CHILDREN: Final = 16
"""Limits of the search: on an object store each directory costs a request."""
_SHOWN: Final = 4
_OURS: Final = "a committed checkpoint"
_TORN: Final = f"a checkpoint without its {MARKER}"
_STOCK: Final = "a checkpoint that stock DCP wrote"
_ZIP: Final = b"PK\x03\x04"
_TORCH_SUFFIXES: Final = (".pt", ".pth", ".ckpt", ".bin")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """The directories of a root that are no checkpoints; whether it is one itself.

    `unmarked` have no marker; `runs` hold committed checkpoints of their own; `unlisted`, which this user may
    not list, may be anything.
    """

    is_checkpoint: bool
    is_stock: bool
    links: Sequence[str]
    unmarked: Sequence[str]
    stock: Sequence[str]
    runs: Sequence[str]
    unlisted: Sequence[str]

    def advice(self, url: str) -> list[str]:
        """Return advice for a user who finds no checkpoint at `url`, a line each."""
        lines: list[str] = []
        if self.is_checkpoint:
            lines.append(_is_itself(url, _OURS))
        if self.is_stock:
            lines.append(_is_itself(url, _STOCK))
        if self.stock:
            lines.append(
                f"stock DCP wrote {_some(self.stock)} there: load one by "
                f"CheckpointManager.load(state, name={self.stock[-1]!r})"
            )
        if self.runs:
            lines.append(f"{_some(self.runs)} there hold checkpoints: give one of them as the root")
        if self.unmarked:
            lines.append(
                f"{_some(self.unmarked)} there have no {MARKER}: torn, or the marker was lost; they do not "
                "count, and a new save of the same name takes their place"
            )
        if self.links:
            lines.append(
                f"{_some(self.links)} there are symbolic links, which do not count: put the directories "
                "themselves there, or give the root that they are in"
            )
        return lines


def look_around(storage: Storage, *, known: Collection[str] = ()) -> Surroundings:
    """Inspect the root and the directories in it, except the `known` checkpoints."""
    entries = storage.list("")
    files = _file_names(entries)
    found: dict[str, list[str]] = {"unmarked": [], "stock": [], "runs": [], "unlisted": []}
    # Names of steps sort by age: the newest matter.
    links = [entry.name for entry in entries if entry.is_link and entry.is_directory]
    others = {entry.name for entry in entries if entry.is_directory} - {*known, *links}
    for name in sorted(others, reverse=True)[:_MOST_DIRECTORIES]:
        try:
            kind = _kind(storage, name) if can_count(name) else None
        except PermissionError:
            kind = "unlisted"
        if kind is not None:
            found[kind].append(name)
    return Surroundings(
        is_checkpoint=MARKER in files and MANIFEST in files,
        is_stock=METADATA in files and MANIFEST not in files,
        links=links,
        **{kind: sorted(names) for kind, names in found.items()},
    )


def describe(storage: Storage, name: str) -> str:
    """Describe in words what is at `name` instead of a checkpoint; "" if nothing is."""
    parent, _, last = name.rpartition("/")
    entry = next((entry for entry in storage.list(parent) if entry.name == last), None)
    if entry is None:
        return ""
    if not entry.is_directory:
        with storage.open(name) as stream:
            return f"{last} is {_file_kind(stream.read(len(_ZIP)), name)}"
    if not can_count(last):
        return f"{last} is a checkpoint that was not finished, or is being deleted; it never counts"
    return f"{last} is {_describe_directory(storage, name)}"


def refuse_as_root(storage: Storage) -> None:
    """Refuse to take a checkpoint for a root, of ours or of stock DCP."""
    is_ours, is_dcp = storage.exists(MANIFEST), storage.exists(METADATA)
    if is_ours and storage.exists(MARKER):
        raise ConfigError(_is_itself(storage.url, _OURS))
    if is_dcp:
        raise ConfigError(_is_itself(storage.url, _TORN if is_ours else _STOCK))


def file_as_root(url: str) -> ConfigError:
    return ConfigError(f"{url} is no directory, as the root of a run must be, but {_file_kind(b'', url)}")


def _kind(storage: Storage, name: str) -> str | None:
    entries = storage.list(name)
    files = _file_names(entries)
    if MARKER in files:
        return None
    if MANIFEST in files:
        return "unmarked"
    if METADATA in files:
        return "stock"
    children = sorted((entry.name for entry in entries if entry.is_directory), reverse=True)[:_MOST_CHILDREN]
    if any(storage.exists(f"{name}/{child}/{mark}") for child in children for mark in (MARKER, MANIFEST)):
        return "runs"
    return "stock" if any(storage.exists(f"{name}/{child}/{METADATA}") for child in children) else None


def _describe_directory(storage: Storage, name: str) -> str:
    kind = _kind(storage, name)
    if kind == "unmarked":
        return (
            f"a checkpoint without its {MARKER}: torn, or the marker was lost; without it there is no "
            "proof that it is whole"
        )
    if kind == "runs":
        return "a root of checkpoints: give it as the root"
    files = _file_names(storage.list(name))
    if any(file.endswith(".safetensors") for file in files):
        return "a directory of safetensors files: load them by CheckpointManager.load(state, source=...)"
    if any(file.endswith(_TORCH_SUFFIXES) for file in files):
        return "a directory of files by `torch.save`: load them with `torch.load` and `load_state_dict`"
    return "a directory, but no checkpoint" if files else "a directory without files"


def _file_kind(start: bytes, name: str) -> str:
    if name.endswith(".safetensors"):
        return "a safetensors file: load it by CheckpointManager.load(state, source=...)"
    if start == _ZIP or name.endswith(_TORCH_SUFFIXES):
        return "a file by `torch.save`: load it with `torch.load` and `load_state_dict`"
    return "a file, not a checkpoint"


def _is_itself(url: str, what: str) -> str:
    parent, _, name = url.rpartition("/")
    return (
        f"{url} is itself {what}, not the root of a run: give {parent or '/'} as the root, and "
        f"name={name!r} to load this one; `ckpt show {url} --tensors` shows it"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[-_SHOWN:]) + (f" and {more} more" if more > 0 else "")


def _file_names(entries: Sequence[StorageEntry]) -> set[str]:
    return {entry.name for entry in entries if not entry.is_directory}
