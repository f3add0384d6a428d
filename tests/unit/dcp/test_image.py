from __future__ import annotations

import io
import zlib

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core.dcp import Image, ImageLayout, spec_of
from ckpt_core.dcp._image import PIECE_BYTES
from ckpt_core.formats.checksums import checksum
from ckpt_core.formats.chunks import BLOCK_BYTES, ChunkTable, encode_table
from ckpt_core.types import ChunkEntry
from tests.unit.dcp.saved_entries import stored_crc
from tests.unit.dcp.writing import copy_into

VIEWS = {
    "transposed": lambda base: base.reshape(3, 4).t(),
    "strided": lambda base: base[::3],
    "offset": lambda base: base[5:9],
    "expanded": lambda base: base[:1].expand(3, 2),
    "conjugate": lambda base: torch.complex(base, base).conj(),
    "negative": lambda base: torch.complex(base, base).conj().imag,
    "0-d": lambda base: base[0],
    "empty": lambda base: base[:0],
    "parameter": lambda base: torch.nn.Parameter(base.clone()),
    "large": lambda base: base.repeat(200_000),
}


def image_of(shards: dict[str, torch.Tensor]) -> Image:
    indexed = {MetadataIndex(name): shard for name, shard in shards.items()}
    layout = ImageLayout([spec_of(index, shard) for index, shard in indexed.items()])
    image = Image(layout, torch.full((layout.size_bytes,), 0xAA, dtype=torch.uint8))
    copy_into(image, indexed)
    return image


def content_of(image: Image) -> bytes:
    return b"".join(bytes(piece) for piece in image.pieces())


def chunks_of(image: Image) -> list[ChunkEntry]:
    return list(ChunkTable.from_bytes(encode_table([image.table_entry("f")]), source="chunks-00000.json.z"))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_shard_is_read_back_equal_whatever_the_view(view):
    live = view(torch.arange(12.0))
    image = image_of({"before": torch.ones(3), "w": live, "after": torch.ones(1, dtype=torch.bool)})
    data = content_of(image)
    slot = image.layout.slots[1]
    loaded = torch.load(io.BytesIO(data[slot.start : slot.end]), weights_only=True)
    assert torch.equal(loaded, live.detach())
    assert slot.payload % (16 if slot.payload_bytes < 1 << 20 else 4096) == 0
    for slot in image.layout.slots:
        stored_crc(data[slot.start : slot.end], slot.payload_bytes)


def test_what_is_reported_is_what_the_bytes_are():
    image = image_of({"a": torch.randn(700_000), "b": torch.randn(7), "c": torch.empty(0)})
    data = content_of(image)
    entry = image.file_entry("f")
    assert (entry.size_bytes, entry.checksum) == (len(data), checksum(data))
    for chunk in chunks_of(image):
        payload = data[chunk.payload_offset :][: chunk.payload_bytes]
        assert chunk.crc32 == zlib.crc32(payload)


def test_copies_do_not_follow_later_changes():
    live = torch.arange(4.0)
    image = image_of({"w": live})
    live.add_(100)
    assert torch.load(io.BytesIO(content_of(image)), weights_only=True).tolist() == [0, 1, 2, 3]


def test_an_image_serves_one_save_after_another():
    image = image_of({"w": torch.zeros(5), "v": torch.zeros(2)})
    content_of(image)
    copy_into(image, {MetadataIndex("w"): torch.ones(5), MetadataIndex("v"): torch.ones(2)})
    again = content_of(image)
    assert again == content_of(image_of({"w": torch.ones(5), "v": torch.ones(2)}))
    assert image.file_entry("f").checksum == checksum(again)


B = BLOCK_BYTES
SIZES = {
    "blocks, whole and not": [B - 1, B, B + 1, 3 * B, 2 * B + 7],
    "small around large": [10, 2 * B, 0, 1, 5 * B + 3, 100],
    "large at both ends": [2 * B, 17, 2 * B],
    "over several pieces": [100, 2 * PIECE_BYTES + 12345, 7, PIECE_BYTES, 9],
    "many small over pieces": [70_001] * 500,
    "one": [1],
    "nothing but empty": [0, 0],
    "no slots": [],
}


def random_shards(sizes: list[int]) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.randint(0, 255, (size,), dtype=torch.uint8) for i, size in enumerate(sizes)}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_checksum_is_right_wherever_blocks_and_pieces_end(sizes):
    shards = random_shards(sizes)
    image = image_of(shards)
    data = content_of(image)
    assert image.file_entry("f").checksum == checksum(data)
    found = chunks_of(image)
    assert [chunk.key for chunk in found] == list(shards)
    for chunk, shard in zip(found, shards.values(), strict=True):
        payload = shard.numpy().tobytes()
        assert chunk.crc32 == zlib.crc32(payload)
        blocks = [payload[start : start + B] for start in range(0, len(payload), B)]
        assert chunk.block_crcs == (tuple(map(zlib.crc32, blocks)) if len(payload) > B else ())
        whole = data[chunk.offset : chunk.offset + chunk.size_bytes]
        assert chunk.crc32 == stored_crc(whole, len(payload))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_a_piece_that_was_given_is_final(sizes):
    image = image_of(random_shards(sizes))
    given = [bytes(piece) for piece in image.pieces()]
    assert b"".join(given) == bytes(image._bytes)
    assert all(len(piece) == PIECE_BYTES for piece in given[:-1])
    assert all(0 < len(piece) <= PIECE_BYTES for piece in given)


def test_nothing_is_made_anew_for_a_layout_from_save_to_save():
    image = image_of({"w": torch.zeros(5), "v": torch.zeros(2)})
    content_of(image)
    first = image.table_entry("f")
    copy_into(image, {MetadataIndex("w"): torch.ones(5), MetadataIndex("v"): torch.ones(2)})
    content_of(image)
    second = image.table_entry("f")
    assert second.columns is first.columns
    assert second.crcs != first.crcs
    assert image.layout.spans is image.layout.spans


def test_spans_and_targets_are_those_of_the_slots_in_order():
    image = image_of({"a": torch.arange(3), "b": torch.ones(()), "c": torch.empty(0, 2)})
    assert image.layout.spans.tolist() == [[slot.start, slot.end] for slot in image.layout.slots]
    assert [target.tolist() for target in image.targets] == [[0, 1, 2], 1.0, []]
    image.targets[0].fill_(7)
    assert torch.load(io.BytesIO(content_of(image)[slice(*image.layout.spans[0])])).tolist() == [7, 7, 7]


def test_large_chunks_use_the_64_bit_fields_of_zip():
    """The layout of a chunk that is larger than 32 bits can say, tried on a small one."""
    shards = {"before": torch.ones(3), "w": torch.arange(300_000.0), "after": torch.ones(2)}
    indexed = {MetadataIndex(name): shard for name, shard in shards.items()}
    layout = ImageLayout([spec_of(*each) for each in indexed.items()], zip64_from=5000)
    image = Image(layout, torch.zeros(layout.size_bytes, dtype=torch.uint8))
    copy_into(image, indexed)
    data = content_of(image)
    assert image.file_entry("f").checksum == checksum(data)
    for slot, shard in zip(layout.slots, shards.values(), strict=True):
        content = data[slot.start : slot.end]
        stored_crc(content, slot.payload_bytes)
        assert (b"PK\6\6" in content) == (slot.payload_bytes >= 5000)
        assert torch.equal(torch.load(io.BytesIO(content), weights_only=True), shard)


def test_offsets_beyond_4_gib_are_laid_out_without_the_memory():
    spec = (MetadataIndex("w"), torch.uint8, (5 << 30,))
    layout = ImageLayout([spec, (MetadataIndex("v"), torch.float32, (3,))])
    first, second = layout.slots
    assert (first.payload_bytes, first.payload % 4096, second.payload % 16) == (5 << 30, 0, 0)
    assert second.start == first.end > 5 << 30
    assert second.crc_fields[0] > second.start
    assert layout.crc_places[1].tolist() == [[field + i for i in range(4)] for field in second.crc_fields]
