"""Compression by nvCOMP: the same checkpoints, whatever the device does. No GPU has run it: its package is
replaced by one of the same interface."""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest
import torch
import zstandard

from ckpt_core.cli import main
from ckpt_core.formats import nvcomp as ours
from ckpt_core.formats.frames import BLOCK_BYTES, compress_all, compressor, decompress
from tests.guarantees.test_compressed_checkpoints import load, same, saved

RAW, ZSTD = 0, 1


class Batch(list):
    """BatchArray: on the device or not; iterates over arrays."""

    where = "cpu"

    def cuda(self) -> Batch:
        moved = Batch(self)
        moved.where = "cuda"
        return moved

    def cpu(self) -> Batch:
        assert self.where == "cuda"
        return Batch(self)


class Package(ModuleType):
    """The part of nvidia.nvcomp 6 that is used; `frame` is what its device makes of a block."""

    class BitstreamKind:
        RAW = "raw"

    def __init__(self, frame) -> None:
        super().__init__("nvidia.nvcomp")
        self.frame, self.batches = frame, list[int]()

    def as_arrays(self, sources):
        assert sources, "a batch cannot be empty"
        return Batch(sources)

    def Codec(self, *, algorithm, bitstream_kind, uncomp_chunk_size):  # noqa: N802 - its name
        assert (algorithm, bitstream_kind, uncomp_chunk_size) == ("Zstd", "raw", BLOCK_BYTES)
        package = self

        class Codec:
            def encode(self, batch: Batch) -> Batch:
                assert batch.where == "cuda"
                package.batches.append(len(batch))
                return Batch(np.frombuffer(package.frame(each.tobytes()), np.uint8) for each in batch).cuda()

        return Codec()


@pytest.fixture
def use(monkeypatch):
    """Install a package whose device makes such frames."""

    def install(frame) -> Package:
        package = Package(frame)
        monkeypatch.setitem(sys.modules, "nvidia", ModuleType("nvidia"))
        monkeypatch.setitem(sys.modules, "nvidia.nvcomp", package)
        monkeypatch.setattr(ours, "_unusable", [])
        ours._of_thread.__dict__.clear()
        return package

    yield install
    ours._of_thread.__dict__.clear()


def sound(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(content)


def without_size(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


def of_another(content: bytes) -> bytes:
    return sound(bytes(len(content)))


def too_long(content: bytes) -> bytes:
    return sound(content) + zstandard.ZstdCompressor().compress(bytes(4000)) * 9


def out_of_memory(content: bytes) -> bytes:
    raise RuntimeError("CUDA Runtime API failure: out of memory")


BLOCKS = [b"\7" * BLOCK_BYTES, b"ab" * 5000, np.arange(60_000, dtype=np.uint16).tobytes(), b"x", b"raw"]
CODECS = [ZSTD, ZSTD, 2, ZSTD, RAW]


@pytest.mark.parametrize(
    "frame", [sound, without_size, of_another, too_long, lambda content: b"no frame", out_of_memory]
)
def test_frames_hold_their_content_whatever_the_device_makes(use, frame):
    package = use(frame)
    made = compress_all(CODECS, BLOCKS)
    again = [bytearray(len(block)) for block in BLOCKS]
    for codec, stored, into in zip(CODECS, made, again, strict=True):
        decompress(codec, memoryview(stored), memoryview(into))
    assert again == BLOCKS
    assert package.batches == [4], "all that is compressed is one batch"
    assert (made[0] == sound(BLOCKS[0])) == (frame is sound)


def test_a_device_that_failed_is_not_asked_again(use, caplog):
    package = use(out_of_memory)
    assert compress_all([ZSTD], [b"a" * 99]) == compress_all([ZSTD], [b"a" * 99])
    assert package.batches == [1]
    assert len(caplog.records) == 1
    assert "without a GPU: CUDA Runtime API failure: out of memory" in caplog.text


def test_no_copy_of_a_device_is_continued_by_frames_of_another_time(use):
    use(sound)
    assert len({compressor() for _ in range(9)}) == 9


def halves(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(700, 900), torch.nn.Linear(900, 5)).bfloat16()


@pytest.mark.parametrize("codec", ["zstd", "planes"])
def test_a_copy_by_a_device_is_the_checkpoint(use, codec, tmp_path):
    plain, package = saved(tmp_path / "plain", halves(3)), use(sound)
    assert main(["cp", str(plain), str(tmp_path / "copy"), "--compress", codec]) == 0
    assert package.batches
    assert main(["verify", str(tmp_path / "copy")]) == 0
    assert same(load(tmp_path / "copy", halves), halves(3))
