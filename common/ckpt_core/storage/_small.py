"""Bounded reads of small files, which refuse anything but regular files."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Final, cast

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CorruptCheckpointError, FileFailure
from ckpt_core.storage._base import Storage

_logger = logger_of(__name__)

BIGGEST_SMALL_FILE: Final = 1 << 30
"""In bytes: the limit of `.metadata`, a chunk table or a rank's items; no save writes a larger one."""


class ForeignFileError(PermissionError):
    """An entry that must not be read as one of our files: a link out, pipe or device."""


def read_small(
    storage: Storage, key: str, most_bytes: int = BIGGEST_SMALL_FILE, *, committed_bytes: int | None = None
) -> bytes:
    """Read a whole small file after checking its size.

    More than `most_bytes` are not read; `committed_bytes` is the only right size, None for any.

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


def read_intact(
    storage: Storage, key: str, read: Callable[[Storage], bytes], problem: Callable[[bytes], str]
) -> tuple[bytes, str]:
    """Read bytes, and again if they are not intact: a transfer may have failed.

    Of a root on several disks each may have the file: it is read from one after the other. `problem` returns
    what is wrong with bytes, "" if they are intact. Returns intact bytes and "", or others and what is wrong
    with them.

    Raises:
        Exception: what `read` raises on one disk, or on the first of several of which none has intact bytes.
    """
    disks = storage.parts
    if len(disks) == 1:
        content = read(storage)
        return (content, "") if not problem(content) else ((again := read(storage)), problem(again))
    found: tuple[bytes, str] | None = None
    failure: Exception | None = None
    for each in (storage, *disks):
        try:
            content = read(each)
        except (CorruptCheckpointError, OSError) as error:
            failure = failure or error
            continue
        if not (wrong := problem(content)):
            if found is not None or failure is not None:
                _tell_of_other_disk(f"{storage.url}/{key}", str(failure) if found is None else found[1])
            return content, ""
        found = found or (content, wrong)
    if found is None and failure is not None:
        raise failure
    return cast("tuple[bytes, str]", found)


@lru_cache(maxsize=256)
def _tell_of_other_disk(place: str, problem: str) -> None:
    _logger.warning(
        "%s is not whole on the disk of one node (%s), and is read from that of another", place, problem
    )


def _foreign(storage: Storage, key: str, problem: str) -> CorruptCheckpointError:
    failure = FileFailure(path=key.partition("/")[2] or key, problem=problem)
    return CorruptCheckpointError(f"{storage.url}/{key}: {problem}", failures=(failure,))
