"""Bounded reads of small files, which refuse anything but regular files."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from ckpt_core.errors import CorruptCheckpointError, FileFailure
from ckpt_core.storage._base import Storage

BIGGEST_SMALL_FILE: Final = 1 << 30
"""In bytes: the limit of `.metadata`, a chunk table or a rank's items; no save writes a larger one."""


class ForeignFileError(PermissionError):
    """An entry that must not be read as one of our files: a link out, pipe or device."""


def read_small(
    storage: Storage, key: str, most_bytes: int = BIGGEST_SMALL_FILE, *, committed_bytes: int | None = None
) -> bytes:
    """Read a whole small file after checking its size.

    Args:
        storage: where it is.
        key: of the file.
        most_bytes: the largest size that is read.
        committed_bytes: the only size that is right; None for any.

    Raises:
        FileNotFoundError: no such file.
        CorruptCheckpointError: it has another size, or is not a regular file.
        OSError: storage failed.
    """
    try:
        with storage.open(key) as stream:
            size = stream.seek(0, os.SEEK_END)
            if committed_bytes is not None and size != committed_bytes:
                raise _foreign(storage, key, f"has {size} bytes, {committed_bytes} were committed")
            if size > most_bytes:
                raise _foreign(storage, key, f"has {size} bytes, and may have {most_bytes} at most")
            stream.seek(0)
            return stream.read()
    except ForeignFileError as error:
        raise _foreign(storage, key, str(error.strerror)) from error
    except IsADirectoryError as error:
        raise _foreign(storage, key, "is a directory instead of a file") from error


def read_intact(read: Callable[[], bytes], problem: Callable[[bytes], str]) -> tuple[bytes, str]:
    """Read bytes, and once more if they are not intact: a transfer may have failed.

    Args:
        read: reads them.
        problem: returns what is wrong with them; "" if they are intact.

    Returns:
        the bytes that were read last, and what is wrong with them.

    Raises:
        Exception: what `read` raises.
    """
    content = read()
    if not problem(content):
        return content, ""
    content = read()
    return content, problem(content)


def _foreign(storage: Storage, key: str, problem: str) -> CorruptCheckpointError:
    failure = FileFailure(path=key.partition("/")[2] or key, problem=problem)
    return CorruptCheckpointError(f"{storage.url}/{key}: {problem}", failures=(failure,))
