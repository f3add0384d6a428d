from __future__ import annotations

import contextlib
import json
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_core.errors import CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkColumns, ChunkTable, TableEntry, encode_table
from ckpt_core.types import ChunkEntry

SOURCE = "chunks-00000.json.z"
GOLDEN = (
    b'{"format_version":2,"block_bytes":1048576,"files":[{"path":"part/__0_0.distcp","size_bytes":4000000,'
    b'"chunks":{"key":["model.w","opt"],"shard_offsets":[[0,8],null],"offset":[0,3000000],'
    b'"size_bytes":[3000000,512],"payload_offset":[4096,null],"payload_bytes":[1048577,null],'
    b'"dtype":["bfloat16",null]},"crc32":"0100000002000000","block_crc32":"0a0000000b00000f"}]}'
)

names = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="/\\"), min_size=1)
crcs = st.integers(0, 2**32 - 1)


def packed(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


@st.composite
def entries(draw: st.DrawFn, path: str) -> tuple[TableEntry, list[ChunkEntry]]:
    """One file's part of a table, and the chunks that should be read from it."""
    size = draw(st.integers(0, 5 * BLOCK_BYTES))
    expected: list[ChunkEntry] = []
    for key in draw(st.lists(names, max_size=3)):
        offset = draw(st.integers(0, size))
        length = draw(st.integers(0, size - offset))
        payload = draw(st.none() | st.integers(0, length))
        payload_bytes = None if payload is None else draw(st.integers(0, length - payload))
        large = payload_bytes is not None and payload_bytes > BLOCK_BYTES
        num_blocks = -(-payload_bytes // BLOCK_BYTES) if large else 0
        chunk = ChunkEntry(
            path=path,
            key=key,
            shard_offsets=draw(st.none() | st.lists(st.integers(0, 2**50), max_size=3).map(tuple)),
            offset=offset,
            size_bytes=length,
            crc32=draw(crcs),
            payload_offset=None if payload is None else offset + payload,
            payload_bytes=payload_bytes,
            dtype=draw(st.none() | st.just("float32")),
            block_crcs=tuple(draw(st.lists(crcs, min_size=num_blocks, max_size=num_blocks))),
        )
        expected.append(chunk)
    columns = ChunkColumns(
        **{name: [getattr(c, name) for c in expected] for name in ChunkColumns.__dataclass_fields__}
    )
    entry = TableEntry(
        path=path,
        size_bytes=size,
        num_chunks=len(expected),
        columns=columns.encode(),
        crcs=packed([chunk.crc32 for chunk in expected]),
        block_crcs=packed([crc for chunk in expected for crc in chunk.block_crcs]),
    )
    return entry, expected


@settings(max_examples=60, deadline=None)
@given(entries("__0_0.distcp"), entries("part/__0_1.distcp"))
def test_a_table_reads_back_as_it_was_written(first, second):
    table = ChunkTable.from_bytes(encode_table([first[0], second[0]]), source=SOURCE)
    assert list(table) == first[1] + second[1]
    assert list(table.files) == ["__0_0.distcp", "part/__0_1.distcp"]
    assert [len(chunks) for chunks in table.files.values()] == [len(first[1]), len(second[1])]


def test_the_table_of_format_version_2_is_frozen():
    table = ChunkTable.from_bytes(zlib.compress(GOLDEN), source=SOURCE)
    first, second = table
    assert first == ChunkEntry(
        path="part/__0_0.distcp",
        key="model.w",
        shard_offsets=(0, 8),
        offset=0,
        size_bytes=3000000,
        crc32=1,
        payload_offset=4096,
        payload_bytes=1048577,
        dtype="bfloat16",
        block_crcs=(10, 0x0F00000B),
    )
    assert (second.key, second.payload_offset, second.crc32, second.block_crcs) == ("opt", None, 2, ())
    chunks = table.files["part/__0_0.distcp"]
    entry = TableEntry(
        path=chunks.path,
        size_bytes=chunks.size_bytes,
        num_chunks=len(chunks),
        columns=chunks.columns.encode(),
        crcs=packed(list(chunks.crcs)),
        block_crcs=packed(list(chunks.block_crcs)),
    )
    assert zlib.decompress(encode_table([entry])) == GOLDEN


def test_a_newer_table_asks_for_an_upgrade():
    newer = json.dumps(json.loads(GOLDEN) | {"format_version": 3, "files": "of another shape"}).encode()
    with pytest.raises(IncompatibleCheckpointError, match=r"chunks-00000.*newer.*upgrade"):
        ChunkTable.from_bytes(zlib.compress(newer), source=SOURCE)


def refused(fields: Any) -> None:
    with pytest.raises(CorruptCheckpointError, match=r"chunks-00000\.json\.z is malformed"):
        ChunkTable.from_bytes(zlib.compress(json.dumps(fields).encode()), source=SOURCE)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", "../x"),
        ("path", "/etc/passwd"),
        ("path", "manifest.json"),
        ("path", 7),
        ("path", None),
        ("size_bytes", -1),
        ("size_bytes", 3_000_100),
        ("size_bytes", 10**400),
        ("size_bytes", True),
        ("chunks", []),
        ("chunks", {}),
        ("crc32", ""),
        ("crc32", "01000000"),
        ("crc32", "01 00 00 00 02 0"),
        ("crc32", "0100000002000000ff"),
        ("crc32", "zz00000002000000"),
        ("crc32", "\u0660100000002000000"),
        ("crc32", None),
        ("block_crc32", ""),
        ("block_crc32", "0a000000"),
    ],
)
def test_fields_of_a_file_that_no_honest_table_has_are_refused(field, value):
    fields = json.loads(GOLDEN)
    fields["files"][0][field] = value
    refused(fields)


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("key", ["a"]),
        ("key", [1, 2]),
        ("key", "ab"),
        ("shard_offsets", ["08", None]),
        ("shard_offsets", [[0.5], None]),
        ("shard_offsets", [[-1], None]),
        ("shard_offsets", [[2**60], None]),
        ("offset", [0, 3_999_900]),
        ("offset", [-1, 3_000_000]),
        ("offset", [0, None]),
        ("size_bytes", [3_000_000, -1]),
        ("size_bytes", [10**30, 512]),
        ("payload_offset", [None, None]),
        ("payload_offset", [2_999_999, None]),
        ("payload_bytes", [-1, None]),
        ("payload_bytes", [None, None]),
        ("payload_bytes", [3_000_000, None]),
        ("payload_bytes", [1048576, None]),
        ("payload_bytes", [1048577, 1]),
        ("dtype", [7, None]),
    ],
)
def test_columns_that_no_honest_table_has_are_refused(column, values):
    fields = json.loads(GOLDEN)
    fields["files"][0]["chunks"][column] = values
    refused(fields)


@pytest.mark.parametrize(
    "change",
    [
        {"files": [7]},
        {"files": {}},
        {"block_bytes": 0},
        {"block_bytes": 1},
        {"block_bytes": None},
        {"format_version": 0},
        {"files": json.loads(GOLDEN)["files"] * 2},
    ],
    ids=lambda change: str(change)[:40],
)
def test_malformed_tables_are_refused(change):
    refused(json.loads(GOLDEN) | change)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe\xff", b"[" * 100_000, GOLDEN[:-10]]
)
def test_what_is_no_json_object_is_refused(content):
    with pytest.raises(CorruptCheckpointError):
        ChunkTable.from_bytes(zlib.compress(content), source=SOURCE)


@pytest.mark.parametrize(
    "content",
    [b"", GOLDEN, zlib.compress(GOLDEN)[:-1], zlib.compress(GOLDEN) + b"x", zlib.compress(GOLDEN)[:2]],
    ids=["empty", "not compressed", "cut off", "more behind it", "only a header"],
)
def test_what_is_no_whole_table_is_refused(content):
    with pytest.raises(CorruptCheckpointError, match=r"chunks-00000\.json\.z is malformed"):
        ChunkTable.from_bytes(content, source=SOURCE)


def test_a_table_that_says_little_in_much_is_refused_before_it_fills_memory(monkeypatch):
    monkeypatch.setattr("ckpt_core.formats.chunks._MAX_TABLE_BYTES", 1 << 20)
    with pytest.raises(CorruptCheckpointError, match="larger than any table"):
        ChunkTable.from_bytes(zlib.compress(bytes(2 << 20)), source=SOURCE)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(GOLDEN) - 1), st.integers(0, 255))
def test_any_changed_byte_reads_or_fails_as_corrupt(position, value):
    content = GOLDEN[:position] + bytes([value]) + GOLDEN[position + 1 :]
    with contextlib.suppress(CorruptCheckpointError, IncompatibleCheckpointError):
        list(ChunkTable.from_bytes(zlib.compress(content), source=SOURCE))
