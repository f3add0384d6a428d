from __future__ import annotations

import io
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core.checksums import checksum
from ckpt_core.dcp import Image, ImageLayout, spec_of

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
    image.copy(indexed)
    return image


def content_of(image: Image) -> bytes:
    return b"".join(bytes(piece) for piece in image.pieces())


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_shard_is_read_back_equal_whatever_the_view(view):
    live = view(torch.arange(12.0))
    image = image_of({"before": torch.ones(3), "w": live, "after": torch.ones(1, dtype=torch.bool)})
    data = content_of(image)
    slot = image.layout.slots[1]
    loaded = torch.load(io.BytesIO(data[slot.start : slot.end]), weights_only=True)
    assert torch.equal(loaded, live.detach())
    assert slot.payload % 4096 == 0
    for slot in image.layout.slots:
        assert zipfile.ZipFile(io.BytesIO(data[slot.start : slot.end])).testzip() is None


def test_what_is_reported_is_what_the_bytes_are():
    image = image_of({"a": torch.randn(700_000), "b": torch.randn(7), "c": torch.empty(0)})
    data = content_of(image)
    entry = image.file_entry("f")
    assert (entry.size_bytes, entry.checksum) == (len(data), checksum(data))
    for chunk in image.chunk_entries("f"):
        payload = data[chunk.payload_offset :][: chunk.payload_bytes]
        assert chunk.checksum == checksum(payload)


def test_copies_do_not_follow_later_changes():
    live = torch.arange(4.0)
    image = image_of({"w": live})
    live.add_(100)
    assert torch.load(io.BytesIO(content_of(image)), weights_only=True).tolist() == [0, 1, 2, 3]


def test_an_image_serves_one_save_after_another():
    image = image_of({"w": torch.zeros(5), "v": torch.zeros(2)})
    content_of(image)
    image.copy({MetadataIndex("w"): torch.ones(5), MetadataIndex("v"): torch.ones(2)})
    again = content_of(image)
    assert again == content_of(image_of({"w": torch.ones(5), "v": torch.ones(2)}))
    assert image.file_entry("f").checksum == checksum(again)
