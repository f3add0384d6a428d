"""What a path that Lightning hands over stands for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import final

from ckpt_core.commit import Catalog
from ckpt_core.errors import CheckpointNotFoundError
from ckpt_core.messages import message
from ckpt_core.names import MARKER, METADATA
from ckpt_core.storage import Storage

LIGHTNINGS_OWN = "meta.pt"
"""The file by which Lightning tells the directories that its sharded strategies write."""


@message
class Kind(Enum):
    """What lies at a path."""

    CHECKPOINT = auto()
    ROOT = auto()
    STOCK = auto()


def real_root(root: str | os.PathLike[str]) -> str:
    """One spelling for every way to write a root, so that a run never opens it twice."""
    text = os.fspath(root)
    return text.rstrip("/") if "://" in text else os.path.realpath(os.path.expanduser(text))  # noqa: PTH111


def _plain(path: str | os.PathLike[str]) -> str:
    """The path with a last part that is a name."""
    text = os.fspath(path).rstrip("/")
    return real_root(text) if text.rpartition("/")[2] in {".", ".."} else text


@final
@dataclass(frozen=True, slots=True)
class Place:
    """A checkpoint as the core names it: a directory under a root."""

    root: str
    name: str

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Place:
        """The root is the path's directory, the name its last part, but for dots before it, as a Tuner sets.

        Names that begin with a dot are those of saves in flight.
        """
        root, slash, name = _plain(path).rpartition("/")
        return cls(real_root(root or ("/" if slash else ".")), name.lstrip(".") or name)


def kind_of(path: str, storage_at: Callable[[str], Storage]) -> Kind:
    """Whether `path` is a checkpoint of ours, a root of such, or something that stock Lightning wrote.

    Raises:
        CheckpointNotFoundError: it is none of these.
    """
    place = Place.of(path)
    parent = storage_at(place.root)
    if parent.exists(f"{place.name}/{MARKER}"):
        return Kind.CHECKPOINT
    literal = _plain(path).rpartition("/")[2]
    if parent.exists(literal) or parent.exists(f"{literal}/{LIGHTNINGS_OWN}"):
        return Kind.STOCK
    if parent.exists(f"{place.name}/{METADATA}"):
        return Kind.CHECKPOINT
    if Catalog(storage_at(real_root(path))).committed():
        return Kind.ROOT
    raise CheckpointNotFoundError(
        f"{path} is neither a committed checkpoint ({MARKER} is missing), nor a directory that holds some, "
        "nor a file or directory that Lightning wrote; check ckpt_path"
    )
