"""Running checksums, written in the manifest as `<algorithm>:<hex>`.

The algorithm's name is part of the text on disk, so that a faster implementation of the same algorithm
changes nothing there, and a new algorithm is one more row in `_ALGORITHMS`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias, final

# The polynomial of zip and zlib with SIMD: 7 to 8 times as fast as zlib's on the machines measured.
from isal import isal_zlib

Bytes: TypeAlias = bytes | bytearray | memoryview

CRC32: Final = "crc32"
SHA256: Final = "sha256"

_TEXT = re.compile(r"[a-z][a-z0-9_-]{0,31}:[0-9a-f]{2,128}")


@final
class _Crc32:
    """CRC32 with hashlib's interface; releases the GIL on all but tiny pieces."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Bytes, /) -> None:
        self._value = crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


_ALGORITHMS: dict[str, Callable[[], Any]] = {CRC32: _Crc32, SHA256: hashlib.sha256}


def crc32(data: Bytes, start: int = 0) -> int:
    """Return the CRC-32 of `data`, as in zip and zlib; releases the GIL.

    `start` is the CRC-32 of the bytes before `data`.
    """
    return isal_zlib.crc32(data, start)


@final
class Checksum:
    """A running checksum; `str()` is its text on disk. Not thread-safe."""

    def __init__(self, algorithm: str = CRC32) -> None:
        if algorithm not in _ALGORITHMS:
            known = ", ".join(sorted(_ALGORITHMS))
            raise ValueError(
                f"checksum algorithm {algorithm!r} is unknown to this version (it knows {known}): "
                "upgrade ckpt-suite"
            )
        self.algorithm = algorithm
        self._hash = _ALGORITHMS[algorithm]()

    @classmethod
    def like(cls, text: str) -> Checksum:
        """Return an empty checksum of the algorithm in `text`."""
        return cls(text.partition(":")[0])

    def update(self, data: Bytes) -> None:
        """Add the next bytes of the stream."""
        self._hash.update(data)

    def __str__(self) -> str:
        return f"{self.algorithm}:{self._hash.hexdigest()}"


def checksum(data: Bytes, algorithm: str = CRC32) -> str:
    """Return the checksum of bytes, as text."""
    running = Checksum(algorithm)
    running.update(data)
    return str(running)


def is_checksum(text: str) -> bool:
    """Return whether `text` has the form of a checksum, of any algorithm."""
    return _TEXT.fullmatch(text) is not None


def crc32_text(value: int) -> str:
    """Return the text of a CRC32 that was computed elsewhere."""
    return f"{CRC32}:{value:08x}"


def crc32_value(text: str) -> int | None:
    """Return the CRC-32 in `text`, None for another algorithm."""
    algorithm, _, digits = text.partition(":")
    return int(digits, 16) if algorithm == CRC32 else None


def combine_crc32(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC32 of two joined byte strings, from their CRC32s.

    Threads that each write a range of a file can so compute the checksum of the file without reading it
    again.
    """
    return isal_zlib.crc32_combine(first, second, second_bytes)
