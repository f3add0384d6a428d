"""The files of a manifest in their compact form, rows of path, size and checksum.

A large run has tens of thousands of files, and the coordinator writes them and reads them back before every
commit: whole columns are checked at once, which costs a fraction of a check by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt_core.checksums import is_checksum
from ckpt_core.codec import count, relative_paths
from ckpt_core.types import FileEntry


def to_rows(files: Sequence[FileEntry]) -> list[tuple[str, int, str]]:
    """One row per file."""
    return [(entry.path, entry.size_bytes, entry.checksum) for entry in files]


def from_rows(rows: list[Any]) -> tuple[FileEntry, ...]:
    """The files, each with a safe path and a sane size; ValueError for what is not right."""
    paths, sizes, checksums = check_rows(rows)
    return tuple(
        FileEntry(path=path, size_bytes=size, checksum=checksum)
        for path, size, checksum in zip(paths, sizes, checksums, strict=True)
    )


def check_rows(rows: list[Any]) -> tuple[Sequence[str], Sequence[int], Sequence[str]]:
    """Paths, sizes and checksums of the rows; ValueError if one of them is not right."""
    if not {list}.issuperset(map(type, rows)) or not {3}.issuperset(map(len, rows)):
        raise ValueError("'files' should hold rows of path, size and checksum")
    if not rows:
        return (), (), ()
    paths, sizes, checksums = zip(*rows, strict=True)
    relative_paths(paths)
    if len(set(paths)) != len(paths):
        raise ValueError("a file is listed twice")
    if not {int}.issuperset(map(type, sizes)):
        raise ValueError("the size of a file should be an integer")
    count(min(sizes), "size")
    count(max(sizes), "size")
    if not {str}.issuperset(map(type, checksums)) or not all(map(is_checksum, checksums)):
        raise ValueError("the checksum of a file should be `<algorithm>:<hex>`")
    return paths, sizes, checksums
