"""Files in the page cache and out of it, and what a process asks of storage."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, final

from benchmarks.pieces import PIECE_BYTES

PageState = Literal["cold", "warm"]

CONDITIONS: dict[PageState, str] = {
    "warm": "Warm: before every load, outside the timing, its files are read through once, so that they are "
    "in the page cache; the bytes that the device delivers during the load are counted to prove it.",
    "cold": "Cold: before every load, outside the timing, os.sync(), then posix_fadvise(DONTNEED) on its "
    "files, so that they are not in the page cache; the bytes that the device delivers during the load are "
    "counted to prove it. What lies below a virtual disk may still be in its host's memory.",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that this process has read so far, as the kernel counts them.

    Attributes:
        asked: by read calls, from the page cache too; not what is reached through a mapping.
        device: that the block device had to deliver for this process.
    """

    asked: int
    device: int

    @classmethod
    def now(cls) -> Self | None:
        """None where the kernel does not count."""
        try:
            lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
        except OSError:
            return None
        counts = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        return cls(asked=counts["rchar"], device=counts["read_bytes"])


def bring_to(state: PageState, paths: Iterable[Path]) -> None:
    """Have the files in the page cache, or drop them from it."""
    if state == "cold":
        drop(paths)
    else:
        warm(paths)


def drop(paths: Iterable[Path]) -> None:
    """Write back what is dirty, then drop the files' pages; those that somebody maps stay."""
    os.sync()
    for path in paths:
        file = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def warm(paths: Iterable[Path]) -> None:
    """Read the files through."""
    buffer = bytearray(PIECE_BYTES)
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
