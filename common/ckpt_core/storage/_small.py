"""Small files, read whole: never larger than they may be, and never what only passes for a file."""

from __future__ import annotations

import os
from typing import Final

from ckpt_core.errors import CorruptCheckpointError, FileFailure
from ckpt_core.storage._base import Storage

BIGGEST_SMALL_FILE: Final = 1 << 30
"""In bytes: what `.metadata`, a chunk table or a rank's items may have; no save makes one that is larger."""


class ForeignFileError(PermissionError):
    """What has the name is no file that anybody may read as ours: a link to outside, a pipe, a device."""


def read_small(storage: Storage, key: str, most_bytes: int = BIGGEST_SMALL_FILE) -> bytes:
    """Read a small file whole, once its size is known to be sane.

    Raises:
        FileNotFoundError: no such file.
        CorruptCheckpointError: it is larger than `most_bytes`, or is none of our files.
        OSError: storage is unwell.
    """
    try:
        with storage.open(key) as stream:
            size = stream.seek(0, os.SEEK_END)
            if size > most_bytes:
                raise _foreign(storage, key, f"has {size} bytes, and may have {most_bytes} at most")
            stream.seek(0)
            return stream.read()
    except ForeignFileError as error:
        raise _foreign(storage, key, str(error.strerror)) from error
    except IsADirectoryError as error:
        raise _foreign(storage, key, "is a directory, where a file should be") from error


def _foreign(storage: Storage, key: str, problem: str) -> CorruptCheckpointError:
    failure = FileFailure(path=key.partition("/")[2] or key, problem=problem)
    return CorruptCheckpointError(f"{storage.url}/{key}: {problem}", failures=(failure,))
