"""How bytes are mutated: as noise, as JSON, as a zip of torch around a pickle."""

from __future__ import annotations

import copy
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

from ckpt_core.codec import add_checksum

_INTEGERS: Final = (
    0,
    1,
    -1,
    127,
    255,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53,
    2**53 + 1,
    2**63 - 1,
    2**64,
)
_TEXTS: Final = (
    "", ".", "..", "../x", "/etc/passwd", "a/../../b", "a//b", "\0", "\ud800", "\x1b[31m", "x" * 5000,
    "crc32:00000000", "sha256:00", "nan", "COMMITTED", ".metadata", "__0_0.distcp", "float32", "complex128",
)  # fmt: skip
_VALUES: Final[tuple[Any, ...]] = (
    *_INTEGERS, *_TEXTS, None, True, 1.5, 1e308, float("inf"), float("nan"), [], {}, [[]], {"": 0}, 10**400,
    {"$type": "tuple", "value": []}, {"$type": "tensor", "dtype": "float32", "shape": [2**40], "value": ""},
    [0] * 1000, {"a": {"b": {"c": []}}},
)  # fmt: skip
_TOKENS: Final = (
    b"cos\nmakedirs\n", b"cposix\nsystem\n", b"\x8c\x02os\x8c\x06system\x93", b"R", b"b", b"o", b"i", b"0",
    b"Q", b"P0\n", b"(", b")", b"t", b"l", b"d", b"\x85", b"\x86", b"\x87", b"\x81", b"\x92", b"\x93", b"2",
    b"r\xff\xff\xff\x7f", b"j\xff\xff\xff\x7f", b"\x95" + b"\xff" * 8, b"B\xff\xff\xff\x7f", b"\x94",
    b"X\xff\xff\xff\x7f", b"\x8a\xff", b"\x8b\xff\xff\xff\x7f", b"\x80\x05", b"\x80\xff", b".", b"N", b"}",
    b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"[" * 2000, b'{"a":' * 500,
    b"9" * 5000, b"\xff\xfe", b"null", b"-1", b"1e999", b'"', b"\\ud800", b"ctorch\nSize\n", b"]",
    b"ctorch\nfloat64\n", b"\x8e" + b"\xff" * 8,
)  # fmt: skip


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """Mutated bytes.

    Attributes:
        origin: what they were.
        content: what they are.
        forged: whether checksums in them were made to fit.
    """

    origin: bytes
    content: bytes
    forged: bool


def mutate(seeds: Sequence[bytes], chance: random.Random) -> Mutation:
    """Mutate one of the seeds, in one of the ways that make sense for it."""
    origin = chance.choice(seeds)
    ways: list[Callable[[bytes, random.Random], bytes]] = [_noise]
    if origin.startswith(b"{"):
        ways += [_json, _json]
    elif origin.startswith(b"PK"):
        ways += [_rezipped, _rezipped]
    way = chance.choice(ways)
    return Mutation(origin=origin, content=way(origin, chance), forged=way is not _noise)


def _noise(content: bytes, chance: random.Random) -> bytes:
    """One change to the bytes, or a few."""
    changed = bytearray(content)
    for _ in range(chance.choice((1, 1, 1, 2, 4, 16))):
        chance.choice(_NOISES)(changed, chance)
    return bytes(changed)


def _flip(content: bytearray, chance: random.Random) -> None:
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def _set(content: bytearray, chance: random.Random) -> None:
    if content:
        content[chance.randrange(len(content))] = chance.choice((0, 1, 127, 128, 255, chance.randrange(256)))


def _insert(content: bytearray, chance: random.Random) -> None:
    place = chance.randrange(len(content) + 1)
    content[place:place] = chance.choice(_TOKENS) if chance.random() < 0.7 else chance.randbytes(8)


def _overwrite(content: bytearray, chance: random.Random) -> None:
    token = chance.choice((chance.choice(_TOKENS), _packed(chance)))
    place = chance.randrange(len(content) + 1)
    content[place : place + len(token)] = token


def _packed(chance: random.Random) -> bytes:
    number = chance.choice(_INTEGERS) & (2**64 - 1)
    return chance.choice((struct.pack("<Q", number), struct.pack("<I", number & 0xFFFFFFFF)))


def _span(content: bytearray, chance: random.Random) -> tuple[int, int]:
    first = chance.randrange(len(content) + 1)
    return first, min(len(content), first + chance.choice((1, 2, 8, 64, 1024)))


def _remove(content: bytearray, chance: random.Random) -> None:
    first, last = _span(content, chance)
    del content[first:last]


def _repeat(content: bytearray, chance: random.Random) -> None:
    first, last = _span(content, chance)
    content[last:last] = content[first:last] * chance.choice((1, 2, 50))


def _move(content: bytearray, chance: random.Random) -> None:
    first, last = _span(content, chance)
    taken = content[first:last]
    del content[first:last]
    place = chance.randrange(len(content) + 1)
    content[place:place] = taken


def _cut(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content) + 1) :]


_NOISES: Final = (
    _flip,
    _flip,
    _flip,
    _set,
    _insert,
    _insert,
    _overwrite,
    _overwrite,
    _remove,
    _repeat,
    _move,
    _cut,
)


def _json(content: bytes, chance: random.Random) -> bytes:
    """Change values somewhere in a JSON document; of one with a checksum in it, make that fit."""
    document = json.loads(content)
    vouched = isinstance(document, dict) and document.pop("checksum", None) is not None
    for _ in range(chance.choice((1, 1, 2, 5))):
        document = _changed(document, chance)
    try:
        text = json.dumps(document, separators=(",", ":"), ensure_ascii=chance.random() < 0.5)
        changed = text.encode(errors="surrogatepass")
    except ValueError:  # more digits than Python writes
        return content
    return add_checksum(changed) if vouched and changed.endswith(b"}") else changed


def _changed(node: Any, chance: random.Random) -> Any:
    """The document with one of its nodes replaced, dropped, doubled or renamed."""
    children = (
        list(node) if isinstance(node, dict) else list(range(len(node))) if isinstance(node, list) else []
    )
    if not children or chance.random() < 0.15:
        return _replaced(node, chance)
    key = chance.choice(children)
    if chance.random() < 0.75:
        node[key] = _changed(node[key], chance)
    elif isinstance(node, dict):
        value = node.pop(key)
        if chance.random() < 0.5:
            node[chance.choice((*_TEXTS, *map(str, children)))] = value
    elif chance.random() < 0.5:
        del node[key]
    else:
        node.insert(key, node[key])
    return node


def _replaced(node: Any, chance: random.Random) -> Any:
    if isinstance(node, int) and chance.random() < 0.5:
        return node + chance.choice((-1, 1, 4096, -4096, 2**32))
    if isinstance(node, str) and node and chance.random() < 0.4:
        return _noise(node.encode(errors="replace"), chance).decode(errors="replace")
    return copy.deepcopy(chance.choice(_VALUES))


def _rezipped(content: bytes, chance: random.Random) -> bytes:
    """Change records of a zip and write them again, with checksums that fit."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    names = [name for name in records if name.endswith("data.pkl")] * 4 + list(records)
    for _ in range(chance.choice((1, 1, 2))):
        name = chance.choice(names)
        records[name] = _noise(records[name], chance)
    if chance.random() < 0.1:
        records[f"archive/{chance.choice(('data/9', 'x', '../x', 'data/0'))}"] = chance.randbytes(16)
    buffer = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if chance.random() < 0.05 else zipfile.ZIP_STORED
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, record in records.items():
            archive.writestr(name, record)
    return buffer.getvalue()
