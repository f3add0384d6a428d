"""The files of a manifest in their compact form: columns of paths, sizes and checksums.

A large run has tens of thousands of files, and the coordinator writes them and reads them back before every
commit: columns cost a fraction of an object per file, to make and to check.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Final

from ckpt_core.checksums import is_checksum
from ckpt_core.codec import count, relative_paths
from ckpt_core.types import FileEntry

_COLUMNS: Final = ("path", "size_bytes", "checksum")


def to_columns(files: Sequence[FileEntry]) -> dict[str, list[Any]]:
    """Columns of equal length."""
    return {name: list(map(attrgetter(name), files)) for name in _COLUMNS}


def from_columns(columns: dict[str, Any]) -> tuple[FileEntry, ...]:
    """The files, each with a safe path and a sane size; ValueError for what is not right."""
    check_columns(columns)
    return tuple(
        FileEntry(path=path, size_bytes=size, checksum=checksum)
        for path, size, checksum in zip(*(columns[name] for name in _COLUMNS), strict=True)
    )


def check_columns(columns: dict[str, Any]) -> None:
    """ValueError if one of the files is not right."""
    lengths = {len(columns[name]) if type(columns.get(name)) is list else -1 for name in _COLUMNS}
    if len(lengths) != 1 or -1 in lengths:
        raise ValueError("'files' should hold columns of equal length")
    paths, sizes, checksums = (columns[name] for name in _COLUMNS)
    relative_paths(paths)
    if len(set(paths)) != len(paths):
        raise ValueError("a file is listed twice")
    if not {int}.issuperset(map(type, sizes)):
        raise ValueError("the size of a file should be an integer")
    count(min(sizes, default=0), "size")
    count(max(sizes, default=0), "size")
    if not {str}.issuperset(map(type, checksums)) or not all(map(is_checksum, checksums)):
        raise ValueError("the checksum of a file should be `<algorithm>:<hex>`")
