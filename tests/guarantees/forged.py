"""Files changed on purpose, so that their CRC-32 stays what it was."""

from __future__ import annotations

import zlib
from pathlib import Path


def forge(path: Path, changes: dict[int, bytes], sacrificed: int) -> None:
    """Write `changes` (offset -> bytes) into a file, and four bytes at `sacrificed` that keep its CRC-32."""
    content = bytearray(path.read_bytes())
    before = zlib.crc32(content)
    for offset, new in changes.items():
        content[offset : offset + len(new)] = new
    wanted = zlib.crc32(content) ^ before
    patch = _solve(wanted, [_effect(len(content), sacrificed, bit) for bit in range(32)])
    for place in range(4):
        content[sacrificed + place] ^= patch >> 8 * place & 0xFF
    assert zlib.crc32(content) == before
    path.write_bytes(content)


def _effect(size: int, offset: int, bit: int) -> int:
    """What flipping one bit does to the CRC-32 of any content of that size."""
    flipped = bytearray(size)
    flipped[offset + bit // 8] = 1 << bit % 8
    return zlib.crc32(flipped) ^ zlib.crc32(bytes(size))


def _solve(wanted: int, effects: list[int]) -> int:
    """Which of 32 independent effects give `wanted` together, by elimination."""
    rows: dict[int, tuple[int, int]] = {}
    for bit, effect in enumerate(effects):
        value, made_of = _reduced(effect, 1 << bit, rows)
        rows[value.bit_length()] = value, made_of
    left, made_of = _reduced(wanted, 0, rows)
    assert left == 0
    return made_of


def _reduced(value: int, made_of: int, rows: dict[int, tuple[int, int]]) -> tuple[int, int]:
    while value and value.bit_length() in rows:
        other, parts = rows[value.bit_length()]
        value, made_of = value ^ other, made_of ^ parts
    return value, made_of
