"""Advice for a root without checkpoints: what is stored there instead."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, final

from ckpt_core.errors import ConfigError
from ckpt_core.names import MANIFEST, MARKER, METADATA, can_count
from ckpt_core.storage import Storage, StorageEntry

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
    """The content of a root that does not count as a checkpoint.

    Attributes:
        is_checkpoint: whether the root itself is a committed checkpoint.
        is_stock: whether the root itself is a directory that stock DCP wrote.
        unmarked: directories of checkpoints of ours without commit marker.
        stock: directories that stock DCP wrote.
        runs: directories that hold committed checkpoints of their own.
        links: symbolic links to directories.
        unlisted: directories that this user may not list, and that may be anything.
    """

    is_checkpoint: bool = False
    is_stock: bool = False
    unmarked: Sequence[str] = ()
    stock: Sequence[str] = ()
    runs: Sequence[str] = ()
    links: Sequence[str] = ()
    unlisted: Sequence[str] = ()

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
    """Inspect the root and the directories in it, except the `known` checkpoints.

    Raises:
        NotADirectoryError: the root is a file.
        OSError: storage failed.
    """
    entries = storage.list("")
    files = _file_names(entries)
    found: dict[str, list[str]] = {"unmarked": [], "stock": [], "runs": [], "unlisted": []}
    # Names of steps sort by age: the newest matter.
    links = [entry.name for entry in entries if entry.is_link and entry.is_directory]
    for name in sorted(set(_directory_names(entries)) - {*known, *links}, reverse=True)[:_MOST_DIRECTORIES]:
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
        return f"{last} is {_describe_file(storage, name)}"
    if not can_count(last):
        return f"{last} is a checkpoint that was not finished, or is being deleted; it never counts"
    return f"{last} is {_describe_directory(storage, name)}"


def refuse_as_root(storage: Storage) -> None:
    """Refuse to take a checkpoint for a root, of ours or of stock DCP.

    Raises:
        ConfigError: the root is one.
    """
    is_ours, is_dcp = storage.exists(MANIFEST), storage.exists(METADATA)
    if is_ours and storage.exists(MARKER):
        raise ConfigError(_is_itself(storage.url, _OURS))
    if is_dcp:
        raise ConfigError(_is_itself(storage.url, _TORN if is_ours else _STOCK))


def file_as_root(url: str) -> ConfigError:
    """Build the error for a root that is a file."""
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
    children = sorted(_directory_names(entries), reverse=True)[:_MOST_CHILDREN]
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
        return (
            "a directory of safetensors files: load them with `safetensors.torch.load_file` or "
            "`from_pretrained`, into the model before it is wrapped"
        )
    if any(file.endswith(_TORCH_SUFFIXES) for file in files):
        return "a directory of files by `torch.save`: load them with `torch.load` and `load_state_dict`"
    return "a directory, but no checkpoint" if files else "a directory without files"


def _describe_file(storage: Storage, name: str) -> str:
    with storage.open(name) as stream:
        return _file_kind(stream.read(len(_ZIP)), name)


def _file_kind(start: bytes, name: str) -> str:
    if name.endswith(".safetensors"):
        return "a safetensors file: load it with `safetensors.torch.load_file`"
    if start == _ZIP or name.endswith(_TORCH_SUFFIXES):
        return "a file by `torch.save`: load it with `torch.load` and `load_state_dict`"
    return "a file, not a checkpoint"


def _is_itself(url: str, what: str) -> str:
    parent, _, name = url.rpartition("/")
    return (
        f"{url} is itself {what}, not the root of a run: give {parent or '/'} as the root, and "
        f"name={name!r} to load this one; `ckpt show {url}` shows it"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[-_SHOWN:]) + (f" and {more} more" if more > 0 else "")


def _file_names(entries: Sequence[StorageEntry]) -> set[str]:
    return {entry.name for entry in entries if not entry.is_directory}


def _directory_names(entries: Sequence[StorageEntry]) -> list[str]:
    return [entry.name for entry in entries if entry.is_directory]
