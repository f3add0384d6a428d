"""Data files made by hand, and what the engine is told about them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from ckpt_core.reading import Payload, RangeRead
from ckpt_core.storage import LocalStorage, Storage, object_storage
from tests.kit.memory import MemoryStorage

MIB = 1 << 20
STORAGES = ("local", "memory", "object")


def make_storage(kind: str, directory: Path) -> Storage:
    if kind == "local":
        return LocalStorage(directory / "root")
    return MemoryStorage() if kind == "memory" else object_storage(f"memory://{uuid.uuid4().hex}")


def payload_of(content: bytes, path: str, start: int, stop: int, *, block_bytes: int = 0) -> Payload:
    """As our tables describe it, with blocks if `block_bytes`, else as a stock zip does."""
    part = content[start:stop]
    blocks = [part[at : at + block_bytes] for at in range(0, len(part), block_bytes)] if block_bytes else []
    return Payload(
        path=path,
        key=f"{path}@{start}",
        offset=start,
        size_bytes=len(part),
        crc32=crc32(part),
        block_bytes=block_bytes or MIB,
        block_crcs=[crc32(block) for block in blocks],
    )


class DataFile:
    """A file of random bytes in which payloads follow one another with small gaps."""

    def __init__(self, path: str, sizes: Sequence[int], *, block_bytes: int = 0, gap: int = 100) -> None:
        self.path = path
        spots, at = [], gap
        for size in sizes:
            spots.append((at, at + size))
            at += size + gap
        self.content = random.Random(path).randbytes(at)
        self.payloads = [
            payload_of(
                self.content, path, start, stop, block_bytes=block_bytes if stop - start > block_bytes else 0
            )
            for start, stop in spots
        ]

    def put(self, storage: Storage, content: bytes | None = None) -> None:
        key = f"step/{self.path}"
        storage.delete(key)
        storage.write_bytes(key, self.content if content is None else content)

    def flipped(self, at: int) -> bytes:
        changed = bytearray(self.content)
        changed[at] ^= 0x10
        return bytes(changed)

    def bytes_of(self, wanted: RangeRead) -> bytes:
        start = wanted.payload.offset
        return self.content[start + wanted.start : start + wanted.stop]


def whole(payload: Payload) -> RangeRead:
    return RangeRead(payload=payload, start=0, stop=payload.size_bytes)


class TensorTarget:
    """Where ranges land, in both ways, and what was told about it."""

    def __init__(self) -> None:
        self._places: list[tuple[RangeRead, bytearray]] = []

    def range(self, payload: Payload, start: int, stop: int, *, take: bool = False) -> RangeRead:
        place = bytearray(b"\xaa" * (0 if take else stop - start))
        if take:
            wanted = RangeRead(payload=payload, start=start, stop=stop, take=place.extend)
        else:
            wanted = RangeRead(payload=payload, start=start, stop=stop, into=memoryview(place))
        self._places.append((wanted, place))
        return wanted

    def whole(self, payload: Payload, *, take: bool = False) -> RangeRead:
        return self.range(payload, 0, payload.size_bytes, take=take)

    def landed(self) -> list[tuple[RangeRead, bytes]]:
        return [(wanted, bytes(place)) for wanted, place in self._places]

    def untouched(self) -> bool:
        return all(place.count(0xAA) == len(place) for _, place in self._places)


def descriptors() -> int:
    """How many files this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
