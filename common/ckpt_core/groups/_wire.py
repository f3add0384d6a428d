"""Requests to the disk of another group, and their answers, as plain fields.

A request names an operation and its arguments; bytes to be written follow in pieces, an empty one last. An
answer is a value or an error; bytes that were read follow in one piece.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Any, Final

from ckpt_core.errors import failure_text
from ckpt_core.storage import ForeignFileError, StorageEntry

MOST_ANSWER_BYTES: Final = 64 << 20
"""Enough for the listing of a directory with some 400,000 files."""


def entry_row(entry: StorageEntry) -> list[Any]:
    """Convert the entry of a directory to plain values."""
    return [entry.name, entry.is_directory, entry.size_bytes, entry.is_link]


def entry_of(row: list[Any]) -> StorageEntry:
    """Convert plain values back to the entry of a directory."""
    name, is_directory, size, is_link = row
    return StorageEntry(str(name), bool(is_directory), int(size), bool(is_link))


def error_row(error: Exception) -> list[Any]:
    """Convert an error to plain values: its kind, number, text and file."""
    if isinstance(error, EOFError):
        return ["end", 0, str(error), None]
    if not isinstance(error, OSError) or error.errno is None:
        return ["failure", errno.EREMOTEIO, failure_text(error), None]
    kind = "foreign" if isinstance(error, ForeignFileError) else "system"
    where = error.filename if isinstance(error.filename, str) else None
    return [kind, error.errno, str(error.strerror or error), where]


def raise_error(row: list[Any], rank: int) -> None:
    """Raise the error of another rank's disk here."""
    kind, number, text, where = str(row[0]), int(row[1]), str(row[2]), row[3]
    if kind == "end":
        raise EOFError(text)
    place = f"on the node of rank {rank}" if where is None else f"{where} on the node of rank {rank}"
    if kind == "foreign":
        raise ForeignFileError(number, text, place)
    raise OSError(number, text, place)


def value_of(answer: Mapping[str, Any], rank: int) -> Any:
    """Return the value of an answer.

    Raises:
        OSError: the operation failed on the other rank.
        EOFError: a file ended earlier than the range to be read.
    """
    if (error := answer.get("error")) is not None:
        raise_error(error, rank)
    return answer.get("value")
