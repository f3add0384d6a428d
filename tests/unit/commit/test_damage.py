from __future__ import annotations

import struct
import zlib

import pytest

from ckpt_core.commit import begin, commit, verify
from ckpt_core.errors import FileFailure
from ckpt_core.formats.checksums import checksum
from ckpt_core.formats.chunks import ChunkColumns, TableEntry, encode_table
from tests.unit.commit.checkpoints import bucket_like, manifest_of, posix_like, write_files

NAME = "step-000000001"
PATH = "part/__3_0.distcp"
BLOCK = 1 << 20
LARGE = bytes(range(256)) * (3 * BLOCK // 256) + b"end"  # three whole blocks and a bit
# header, a.w of 100 bytes, between, large, a byte entry
DATA = b"h" * 10 + b"a" * 100 + b"between" + LARGE + b"byte entry"
LARGE_AT = 117
VALUE_AT = LARGE_AT + len(LARGE)


def packed(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def table() -> bytes:
    columns = ChunkColumns(
        key=["a.w", "large", "value"],
        shard_offsets=[[0], [0], None],
        offset=[0, 110, VALUE_AT],
        size_bytes=[110, 7 + len(LARGE), 10],
        payload_offset=[10, LARGE_AT, None],
        payload_bytes=[100, len(LARGE), None],
        dtype=["uint8", "uint8", None],
    )
    blocks = [zlib.crc32(LARGE[start : start + BLOCK]) for start in range(0, len(LARGE), BLOCK)]
    entry = TableEntry(
        path=PATH,
        size_bytes=len(DATA),
        num_chunks=3,
        columns=columns.encode(),
        crcs=packed(zlib.crc32(b"a" * 100), zlib.crc32(LARGE), zlib.crc32(b"byte entry")),
        block_crcs=packed(*blocks),
    )
    return encode_table([entry])


FILES = {PATH: DATA, "chunks-00003.json.z": table(), "rank-00003.json": b"{}"}


@pytest.fixture(params=[posix_like, bucket_like])
def storage(request):
    storage = request.param()
    working = begin(storage, NAME, "00000001")
    write_files(storage, working, FILES)
    commit(storage, working, NAME, manifest_of(1, FILES))
    return storage


def flip(storage, *places: int, path: str = PATH) -> str:
    """Flip a bit at each place; the checksum of what is then there."""
    content = bytearray(FILES[path])
    for place in places:
        content[place] ^= 1
    storage.replace(f"{NAME}/{path}", bytes(content))
    return checksum(content)


@pytest.mark.parametrize(
    ("places", "told"),
    [
        ([10], "damaged: a.w (bytes 10 to 110)"),
        ([109], "damaged: a.w (bytes 10 to 110)"),
        ([LARGE_AT + BLOCK], f"damaged: large (bytes {LARGE_AT + BLOCK} to {LARGE_AT + 2 * BLOCK})"),
        ([LARGE_AT + 5, VALUE_AT - 1], f"damaged: large (bytes {LARGE_AT} to {VALUE_AT})"),
        ([50, VALUE_AT], f"damaged: a.w (bytes 10 to 110), value (bytes {VALUE_AT} to {len(DATA)})"),
        ([0, 112], "every value in it is intact, the damage is between them"),
    ],
)
def test_a_damaged_data_file_names_the_tensors_that_are_lost(storage, places, told):
    found = flip(storage, *places)
    (failure,) = verify(storage, NAME)
    assert failure == FileFailure(
        path=PATH, problem=f"checksum is {found}, {checksum(DATA)} was committed; {told}"
    )


@pytest.mark.parametrize("lost", ["damaged", "missing", "cut"])
def test_without_a_sound_chunk_table_the_damage_is_still_found(storage, lost):
    found = flip(storage, 50)
    if lost == "missing":
        storage.delete(f"{NAME}/chunks-00003.json.z")
    elif lost == "cut":
        storage.replace(f"{NAME}/chunks-00003.json.z", FILES["chunks-00003.json.z"][:-5])
    else:
        flip(storage, 30, path="chunks-00003.json.z")
    failures = {failure.path: failure.problem for failure in verify(storage, NAME)}
    assert failures.keys() == {PATH, "chunks-00003.json.z"}
    assert failures[PATH] == f"checksum is {found}, {checksum(DATA)} was committed"


def test_of_many_damaged_tensors_the_first_are_named():
    storage = posix_like()
    columns = ChunkColumns(
        key=[f"w{i}" for i in range(20)],
        shard_offsets=[None] * 20,
        offset=list(range(20)),
        size_bytes=[1] * 20,
        payload_offset=[None] * 20,
        payload_bytes=[None] * 20,
        dtype=[None] * 20,
    )
    entry = TableEntry(
        path="__0_1.distcp",
        size_bytes=20,
        num_chunks=20,
        columns=columns.encode(),
        crcs=packed(*[zlib.crc32(b"\0")] * 20),
    )
    files = {"__0_1.distcp": bytes(20), "chunks-00000.json.z": encode_table([entry])}
    working = begin(storage, NAME, "00000001")
    write_files(storage, working, files)
    commit(storage, working, NAME, manifest_of(1, files))
    storage.replace(f"{NAME}/__0_1.distcp", b"\1" * 20)
    (failure,) = verify(storage, NAME)
    assert "w7 (bytes 7 to 8) and 12 more" in failure.problem
    assert "w8" not in failure.problem
