from __future__ import annotations

import io
import zipfile
import zlib

import pytest
import torch

from ckpt_core.commit._verify import zip_problem
from ckpt_core.dcp._torch_zip import (
    ALIGNMENT,
    build_archive,
    build_legacy,
    legacy_payload,
    tensor_pickle,
)
from ckpt_core.formats.zips import ZipError
from tests.unit.dcp.saved_entries import stored_crc
from tests.unit.dcp.tensors import SHAPES, all_dtypes, content, filled

OFFSETS = [0, 1, 63, 4095, 4096, 5000, (1 << 32) + 17, (1 << 40) - 3]


def archive_of(tensor: torch.Tensor, *, offset: int = 0, **options: int) -> tuple[bytes, int]:
    """The whole archive, and where the payload starts in it."""
    payload = content(tensor)
    record = tensor_pickle(tensor.dtype, tuple(tensor.shape))
    archive = build_archive(record, [(len(payload), zlib.crc32(payload))], offset=offset, **options)
    before, after = archive.frames
    return before + payload + after, len(before)


def loaded(data: bytes) -> torch.Tensor:
    return torch.load(io.BytesIO(data), weights_only=True)


def torch_record(tensor: torch.Tensor, name: str) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read(f"archive/{name}")


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual.dtype, actual.shape, actual.stride()) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
    )
    assert content(actual) == content(expected)


def test_the_dtypes_that_models_use_are_among_those_tested():
    names = {str(dtype).removeprefix("torch.") for dtype in all_dtypes()}
    assert names >= {
        "float32", "float64", "float16", "bfloat16", "bool", "uint8", "int8", "int64", "uint16", "uint32",
        "uint64", "complex32", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu",
    }  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_torch_loads_what_we_lay_out(dtype, shape):
    tensor = filled(dtype, shape)
    data, _ = archive_of(tensor)
    assert_same(loaded(data), tensor)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_every_record_equals_the_one_that_torch_writes(dtype, shape):
    tensor = filled(dtype, shape)
    data, _ = archive_of(tensor)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in ("data.pkl", "byteorder", "version", "data/0"):
            assert archive.read(f"archive/{name}") == torch_record(tensor, name), name


def test_the_record_is_the_same_whichever_sequence_gives_the_shape():
    tensor_pickle.cache_clear()
    shaped = filled(torch.float32, (7, 5))
    by_size = tensor_pickle(shaped.dtype, shaped.shape)
    tensor_pickle.cache_clear()
    assert by_size == tensor_pickle(shaped.dtype, (7, 5)) == torch_record(shaped, "data.pkl")


@pytest.mark.parametrize("offset", OFFSETS)
def test_the_payload_is_aligned_in_the_file_wherever_the_archive_starts(offset):
    data, payload_start = archive_of(filled(torch.float32, (9, 3)), offset=offset)
    assert (offset + payload_start) % ALIGNMENT == 0
    assert_same(loaded(data), filled(torch.float32, (9, 3)))


@pytest.mark.parametrize("zip64_from", [0xFFFFFFFF, 4001, 4000, 1000, 1])
@pytest.mark.parametrize("offset", [0, 4097])
def test_python_finds_the_archive_sound(offset, zip64_from):
    data, _ = archive_of(filled(torch.int16, (50, 40)), offset=offset, zip64_from=zip64_from)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == content(filled(torch.int16, (50, 40)))


@pytest.mark.parametrize("zip64_from", [16_001, 16_000, 4096, 1000, 100, 1])
@pytest.mark.parametrize("offset", OFFSETS)
def test_archives_too_large_for_32_bits_are_read_and_aligned_too(offset, zip64_from):
    tensor = filled(torch.float64, (40, 50))  # 16,000 bytes: below the first limit, but the archive is not
    data, payload_start = archive_of(tensor, offset=offset, zip64_from=zip64_from)
    assert (offset + payload_start) % ALIGNMENT == 0
    assert_same(loaded(data), tensor)


def test_a_payload_that_differs_from_its_checksum_is_noticed():
    data, payload_start = archive_of(filled(torch.float32, (100,)))
    damaged = bytearray(data)
    damaged[payload_start + 10] ^= 1
    with zipfile.ZipFile(io.BytesIO(bytes(damaged))) as archive:
        assert archive.testzip() == "archive/data/0"


def test_equal_content_gives_equal_bytes():
    tensor = filled(torch.float32, (10,))
    assert archive_of(tensor, offset=5) == archive_of(tensor.clone(), offset=5)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def small_of(tensor: torch.Tensor, *, offset: int = 0) -> tuple[bytes, int]:
    """The whole entry of a small tensor, and where the payload starts in it."""
    archive, payload = build_legacy(tensor.dtype, tuple(tensor.shape), offset=offset), content(tensor)
    head, tail = archive.frames
    data = bytearray(head + payload + tail)
    for field in archive.crc_fields[0]:
        data[field : field + 4] = zlib.crc32(payload).to_bytes(4, "little")
    assert len(data) == archive.size_bytes
    return bytes(data), len(head)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", all_dtypes(), ids=str)
def test_torch_loads_small_tensors_and_their_checksum_is_in_front(dtype, shape):
    tensor = filled(dtype, shape)
    data, payload = small_of(tensor)
    assert_same(loaded(data), tensor)
    assert stored_crc(data, tensor.nbytes) == zlib.crc32(content(tensor))
    assert payload < 256


@pytest.mark.parametrize("offset", OFFSETS)
def test_a_small_payload_is_where_any_dtype_may_be(offset):
    data, payload_start = small_of(filled(torch.complex128, (9, 3)), offset=offset)
    assert (offset + payload_start) % 16 == 0
    assert_same(loaded(data), filled(torch.complex128, (9, 3)))


def test_the_payload_of_a_small_tensor_is_found_without_a_table():
    tensor = filled(torch.float32, (4, 3))
    data, payload = small_of(tensor, offset=5)

    def read_at(offset: int, size: int) -> bytes:
        return data[offset : offset + size]

    assert legacy_payload(read_at, len(data), torch.float32, (4, 3)) == (payload, zlib.crc32(content(tensor)))
    for dtype, shape in ((torch.float32, (3, 4)), (torch.int32, (4, 3)), (torch.float32, (4, 4))):
        with pytest.raises(ZipError, match="not the tensor"):
            legacy_payload(read_at, len(data), dtype, shape)
    with pytest.raises(ZipError, match="not the tensor"):
        legacy_payload(read_at, len(data) + 1, torch.float32, (4, 3))
    whole = saved(tensor)
    assert legacy_payload(lambda at, size: whole[at : at + size], len(whole), torch.float32, (4, 3)) is None


def test_every_flipped_bit_of_a_small_payload_is_found_without_a_manifest():
    data, payload = small_of(filled(torch.float32, (5,)))
    assert zip_problem(io.BytesIO(data), 0, len(data)) is None
    for place in range(payload, len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1
        assert zip_problem(io.BytesIO(bytes(damaged)), 0, len(data)) is not None
    assert zip_problem(io.BytesIO(data[:60]), 0, 60) is not None
