"""Where checkpoints go: the user's own directories, or the names that stock Accelerate gives."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import final

from accelerate import Accelerator

from ckpt_core.commit import Occupant, content_of, file_as_root
from ckpt_core.errors import ConfigError
from ckpt_core.names import is_incomplete, is_trash
from ckpt_core.storage import Storage
from ckpt_core.validation import location

_AUTOMATIC = re.compile(r"checkpoint_(\d+)(?:\..*)?")
_KINDS = {
    Occupant.COMMITTED: "committed",
    Occupant.UNREADABLE: "committed",
    Occupant.TORN: "torn",
    Occupant.STOCK: "stock",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A checkpoint directory as root and name."""

    root: str
    name: str

    @classmethod
    def of(cls, directory: str | os.PathLike[str]) -> Place:
        """The place of a path or URL.

        Raises:
            ConfigError: it is neither, or has no name of its own.
        """
        problem = location("the place of a checkpoint", directory)
        if problem is not None:
            raise ConfigError(problem)
        text = os.fspath(directory)
        if "://" in text:
            root, _, name = text.rstrip("/").rpartition("/")
            if root.endswith(("/", ":")):
                root = ""
        else:
            root, name = os.path.split(os.path.abspath(os.path.expanduser(text)))  # noqa: PTH100, PTH111
        if not root or not name:
            raise ConfigError(f"{text!r} cannot be a checkpoint: give a directory below the run's own")
        return cls(root=root, name=name)


def automatic_root(accelerator: Accelerator, root: str | None) -> str | None:
    """Where checkpoints without a name of their own go; None if the user has to name each."""
    configuration = accelerator.project_configuration
    if root is not None:
        return root
    if configuration.automatic_checkpoint_naming and configuration.project_dir is not None:
        return os.path.join(configuration.project_dir, "checkpoints")  # noqa: PTH118 - may be a URL
    return None


def automatic_name(iteration: int) -> str:
    """Stock Accelerate's own name."""
    return f"checkpoint_{iteration}"


def next_number(storage: Storage) -> int:
    """One more than the highest number in use, by whatever there is; stray entries have no number.

    Raises:
        ConfigError: the root is a file, or below one.
    """
    try:
        entries = storage.list("")
    except NotADirectoryError:
        raise file_as_root(storage.url) from None
    names = [_AUTOMATIC.fullmatch(entry.name) for entry in entries]
    return max((int(match[1]) + 1 for match in names if match is not None), default=0)


def newest_stock(storage: Storage) -> str | None:
    """The directory with the highest number that stock Accelerate wrote."""
    numbered = [
        (int(match[1]), entry.name)
        for entry in storage.list("")
        if (match := _AUTOMATIC.fullmatch(entry.name)) is not None and kind_of(storage, entry.name) == "stock"
    ]
    return max(numbered)[1] if numbered else None


def torn_in(storage: Storage) -> list[str]:
    """Directories of saves that did not end."""
    names = [entry.name for entry in storage.list("") if entry.is_directory]
    return [name for name in names if kind_of(storage, name) == "torn"]


def kind_of(storage: Storage, name: str) -> str:
    """What a directory is: `committed`, `torn` (ours, but not committed), `stock`, or `missing`.

    It is missing, too, where there is nothing but files of the user's, as in a pruned one that had some.
    """
    if is_incomplete(name) or is_trash(name):
        return "torn"
    return _KINDS.get(content_of(storage, name), "missing")
