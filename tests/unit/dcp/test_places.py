from __future__ import annotations

import io
import json
import pickle
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_core.dcp import ChunkLocation, ChunkLocator, check_metadata, load_chunk, load_metadata
from ckpt_core.dcp._torch_zip import build_archive, tensor_pickle
from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.formats.chunks import ChunkTable, decode_table, encode_table
from ckpt_core.formats.zips import read_directory
from ckpt_core.storage import LocalStorage
from tests.unit.dcp.tensors import SHAPES, all_dtypes, content, filled
from tests.unit.dcp.writing import written

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TABLE = "chunks-00000.json.z"


def state() -> dict[str, Any]:
    tensors = {f"{dtype} {shape}": filled(dtype, shape) for dtype in all_dtypes() for shape in SHAPES}
    large = torch.arange(700_000, dtype=torch.float32)
    return {"tensors": tensors, "large": large, "lr": 0.1, "betas": (0.9, 0.99)}


def read_at(root: Path) -> Callable[[str, int, int], bytes]:
    def read(path: str, offset: int, size: int) -> bytes:
        with (root / path).open("rb") as file:
            file.seek(offset)
            return file.read(size)

    return read


def metadata_of(root: Path, part: str = "") -> Metadata:
    return load_metadata((root / part / ".metadata").read_bytes(), ".metadata")


def save_ours(root: Path, tree: dict[str, Any], part: str = "") -> None:
    writer = written(LocalStorage(root.parent), root.name, tree, part=part)
    (root / TABLE).write_bytes(encode_table(writer.tables))


def save_stock(root: Path, tree: dict[str, Any]) -> None:
    dcp.save(tree, checkpoint_id=root, no_dist=True)


def ours(root: Path, part: str = "") -> ChunkLocator:
    return ChunkLocator(
        metadata_of(root, part), part=part, directory="root/x", read_table=lambda _: table_of(root)
    )


def table_of(root: Path) -> ChunkTable:
    return ChunkTable.from_bytes((root / TABLE).read_bytes(), source=f"root/x/{TABLE}")


def stock(root: Path) -> ChunkLocator:
    return ChunkLocator(metadata_of(root), directory="root/x", read_at=read_at(root))


def all_of(root: Path, places: ChunkLocator, part: str = "") -> dict[str, ChunkLocation]:
    return {index.fqn: place for index, place in places.find(metadata_of(root, part).storage_data).items()}


def bytes_of(root: Path, place: ChunkLocation) -> bytes:
    assert place.payload is not None, place.reason
    return read_at(root)(place.payload.path, place.payload.offset, place.payload.size_bytes)


def check(root: Path, found: dict[str, ChunkLocation], tree: dict[str, Any]) -> None:
    tensors = {f"tensors.{name}": tensor for name, tensor in tree["tensors"].items()}
    for key, tensor in (tensors | {"large": tree["large"]}).items():
        place = found[key]
        assert (place.dtype, place.shape) == (tensor.dtype, tuple(tensor.shape)), key
        assert bytes_of(root, place) == content(tensor), key
        assert place.payload.crc32 == zlib.crc32(content(tensor)), key


@pytest.fixture(scope="module")
def stock_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stock") / "checkpoint"
    save_stock(root, state())
    return root


@pytest.fixture(scope="module")
def our_root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ours") / "checkpoint"
    save_ours(root, state())
    return root


def test_the_payloads_of_our_checkpoint_are_the_tensors_for_every_dtype_and_shape(our_root):
    check(our_root, all_of(our_root, ours(our_root)), state())


def test_the_payloads_of_a_stock_checkpoint_are_the_tensors_for_every_dtype_and_shape(stock_root):
    check(stock_root, all_of(stock_root, stock(stock_root)), state())


def test_our_writers_zips_are_understood_without_their_table(our_root):
    check(our_root, all_of(our_root, stock(our_root)), state())


def test_what_we_and_stock_dcp_write_is_consistent(our_root, stock_root):
    for root in (our_root, stock_root):
        check_metadata(metadata_of(root), ".metadata", lambda path, root=root: (root / path).stat().st_size)


def test_a_file_one_byte_short_is_noticed_at_once(our_root):
    def size(path: str) -> int:
        return (our_root / path).stat().st_size - (path == "__0_0.distcp")

    with pytest.raises(CorruptCheckpointError, match=r"ends at byte \d+ of '__0_0\.distcp', which has \d+"):
        check_metadata(metadata_of(our_root), ".metadata", size)


def test_a_large_payload_of_ours_has_a_checksum_for_every_block(our_root):
    payload = all_of(our_root, ours(our_root))["large"].payload
    raw = content(state()["large"])
    blocks = [raw[start : start + (1 << 20)] for start in range(0, len(raw), 1 << 20)]
    assert list(payload.block_crcs) == [zlib.crc32(block) for block in blocks]
    assert payload.block_bytes == 1 << 20
    assert all_of(our_root, stock(our_root))["large"].payload.block_crcs == ()


def test_a_byte_entry_is_its_whole_zip_with_a_checksum_only_in_ours(our_root, stock_root):
    for root, places in ((our_root, ours(our_root)), (stock_root, stock(stock_root))):
        place = all_of(root, places)["lr"]
        assert (place.dtype, place.shape) == (None, None)
        raw = bytes_of(root, place)
        assert torch.load(io.BytesIO(raw), weights_only=True) == 0.1
        assert place.payload.crc32 == (zlib.crc32(raw) if root is our_root else None)


def test_the_place_of_a_payload_is_relative_to_the_checkpoint_in_a_part_too(tmp_path):
    root = tmp_path / "x"
    tree = {"w": torch.arange(5.0)}
    save_ours(root, tree, part="model_0")
    place = all_of(root, ours(root, "model_0"), "model_0")["w"]
    assert place.payload.path == place.path == "model_0/__0_0.distcp"
    assert bytes_of(root, place) == content(tree["w"])


def test_only_the_tables_of_the_ranks_asked_for_are_read(our_root):
    asked: list[int] = []

    def read_table(rank: int) -> ChunkTable:
        asked.append(rank)
        return table_of(our_root)

    places = ChunkLocator(metadata_of(our_root), read_table=read_table)
    assert asked == []
    places.find([MetadataIndex("large", (0,)), MetadataIndex("lr")])
    assert set(asked) == {0}


def test_a_stock_checkpoint_is_searched_with_few_requests_and_little_reading(tmp_path):
    root = tmp_path / "x"
    save_stock(root, {f"w{i}": torch.ones(300) for i in range(500)} | {"large": torch.ones(1_000_000)})
    asked: list[int] = []

    def read(path: str, offset: int, size: int) -> bytes:
        asked.append(size)
        return read_at(root)(path, offset, size)

    indices = list(metadata_of(root).storage_data)
    ChunkLocator(metadata_of(root), read_at=read).find(indices)
    assert len(asked) <= 5
    asked.clear()
    ChunkLocator(metadata_of(root), read_at=read).find([MetadataIndex("large", (0,))])
    assert len(asked) <= 2
    assert sum(asked) <= 4096


UNUSUAL = {
    "transposed": torch.arange(6.0).reshape(2, 3).t(),
    "parameter": torch.nn.Parameter(torch.arange(6.0)),
    "requires grad": torch.arange(6.0).requires_grad_(),
    "length one": torch.arange(6.0).reshape(6, 1).t().contiguous().as_strided((1, 6), (7, 1)),
    "channels last": torch.ones(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
}


def stock_chunk(root: Path, raw: bytes, tensor: torch.Tensor) -> None:
    """A stock checkpoint whose only chunk is `raw`."""
    save_stock(root, {"w": tensor.detach().contiguous()})
    metadata = pickle.loads((root / ".metadata").read_bytes())
    (info,) = metadata.storage_data.values()
    info.length = len(raw)
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    (root / "__0_0.distcp").write_bytes(raw)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_tensor_that_is_pickled_in_an_unusual_way_is_loaded_as_a_whole(tmp_path, name):
    tensor = UNUSUAL[name]
    stock_chunk(tmp_path / "x", saved(tensor), tensor)
    (place,) = all_of(tmp_path / "x", stock(tmp_path / "x")).values()
    assert place.payload is None
    assert place.reason
    whole = read_at(tmp_path / "x")(place.path, place.offset, place.size_bytes)
    assert torch.equal(load_chunk(whole, "w", place.form), tensor)


@pytest.mark.parametrize(
    "view",
    [torch.arange(9.0)[3:], torch.arange(9.0)[:4], torch.arange(3.0).expand(4, 3),
     torch.complex(torch.ones(3), torch.ones(3)).conj()],
    ids=["offset", "shorter", "expanded", "conjugate"],
)  # fmt: skip
def test_a_view_is_loaded_as_a_whole(tmp_path, view):
    stock_chunk(tmp_path / "x", saved(view), view.resolve_conj())
    (place,) = all_of(tmp_path / "x", stock(tmp_path / "x")).values()
    assert place.payload is None
    assert place.reason
    whole = read_at(tmp_path / "x")(place.path, place.offset, place.size_bytes)
    assert torch.equal(load_chunk(whole, "w"), view)


def test_without_torchs_checksums_a_payload_cannot_be_verified(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        save_stock(tmp_path / "x", {"w": torch.arange(4.0)})
    finally:
        torch.serialization.set_crc32_options(True)
    place = all_of(tmp_path / "x", stock(tmp_path / "x"))["w"]
    assert place.payload.crc32 is None
    assert bytes_of(tmp_path / "x", place) == content(torch.arange(4.0))


def test_another_byte_order_is_not_read_raw(tmp_path):
    raw = saved(torch.arange(4.0)).replace(b"little", b"bigend")
    crc, other = (zlib.crc32(text).to_bytes(4, "little") for text in (b"little", b"bigend"))
    stock_chunk(tmp_path / "x", raw.replace(crc, other), torch.arange(4.0))
    place = all_of(tmp_path / "x", stock(tmp_path / "x"))["w"]
    assert place.payload is None
    assert "byte order" in place.reason


def test_an_entry_behind_a_stream_extension_is_to_be_read_whole(stock_root):
    metadata = metadata_of(stock_root)
    index = MetadataIndex("large", (0,))
    metadata.storage_data = dict(metadata.storage_data)
    metadata.storage_data[index].transform_descriptors = ["stream.zstd/1"]
    place = ChunkLocator(metadata, directory="root/x", read_at=read_at(stock_root)).find([index])[index]
    assert place.payload is None
    assert (place.transforms, place.reason) == (("stream.zstd/1",), "it was written through stream.zstd/1")


def edited(root: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> ChunkLocator:
    table = json.loads(decode_table((root / TABLE).read_bytes()))
    change(table)
    content = zlib.compress(json.dumps(table).encode())

    def read_table(_rank: int) -> ChunkTable:
        return ChunkTable.from_bytes(content, source=f"root/x/{TABLE}")

    return ChunkLocator(metadata_of(root), directory="root/x", read_table=read_table)


def set_of_large(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(table: dict[str, Any]) -> None:
        chunks = table["files"][0]["chunks"]
        chunks[name][chunks["key"].index("large")] = value

    return change


@pytest.mark.parametrize(
    ("name", "value"),
    [("dtype", "float64"), ("dtype", None), ("dtype", "{x}"), ("key", "other"), ("shard_offsets", [1])],
)
def test_a_table_that_contradicts_the_metadata_is_corrupt_and_both_are_named(our_root, tmp_path, name, value):
    places = edited(our_root, tmp_path, set_of_large(name, value))
    with pytest.raises(CorruptCheckpointError, match=rf"'large'.*\.metadata.*{TABLE}") as caught:
        places.find([MetadataIndex("large", (0,))])
    assert [failure.path for failure in caught.value.failures] == ["__0_0.distcp"]


@pytest.mark.parametrize("name", ["offset", "size_bytes", "payload_bytes"])
def test_a_table_with_another_place_is_corrupt(our_root, tmp_path, name):
    def change(table: dict[str, Any]) -> None:
        chunks = table["files"][0]["chunks"]
        row = chunks["key"].index("large")
        chunks[name][row] -= 1

    with pytest.raises(CorruptCheckpointError, match=rf"'large'.*\.metadata.*{TABLE}"):
        edited(our_root, tmp_path, change).find([MetadataIndex("large", (0,))])


def test_a_file_without_a_table_entry_is_corrupt(our_root, tmp_path):
    def change(table: dict[str, Any]) -> None:
        table["files"][0]["path"] = "__0_7.distcp"

    with pytest.raises(CorruptCheckpointError, match=rf"{TABLE} does not list"):
        edited(our_root, tmp_path, change).find([MetadataIndex("large", (0,))])


@pytest.mark.parametrize("other", [torch.zeros(3), torch.zeros(4, dtype=torch.int32)], ids=["shape", "dtype"])
def test_a_stock_chunk_that_contradicts_the_metadata_is_corrupt(tmp_path, other):
    stock_chunk(tmp_path / "x", saved(other), torch.zeros(4))
    (place,) = all_of(tmp_path / "x", stock(tmp_path / "x")).values()
    assert place.payload is None
    with pytest.raises(CorruptCheckpointError, match=r"__0_0\.distcp: 'w': \.metadata says"):
        load_chunk((tmp_path / "x" / place.path).read_bytes(), "__0_0.distcp: 'w'", place.form)


def test_every_flipped_bit_of_a_stock_zip_is_found_or_leaves_the_place_as_it_was(tmp_path):
    tensor = torch.arange(4.0)
    raw = saved(tensor)
    stock_chunk(tmp_path / "x", raw, tensor)
    metadata = metadata_of(tmp_path / "x")
    (index,) = metadata.storage_data

    def place_in(content: bytes) -> ChunkLocation:
        places = ChunkLocator(metadata, read_at=lambda _, offset, size: content[offset : offset + size])
        return places.find([index])[index]

    intact = place_in(raw)
    found = 0
    for position in range(len(raw)):
        flipped = bytearray(raw)
        flipped[position] ^= 1 << position % 8
        try:
            place = place_in(bytes(flipped))
        except CorruptCheckpointError:
            found += 1
            continue
        if place == intact:
            continue
        # What differs is the checksum that the payload is to have, or where it is: then it does not fit.
        payload = place.payload
        assert payload.crc32 != zlib.crc32(flipped[payload.offset : payload.offset + payload.size_bytes])
    assert found > 100


@pytest.mark.parametrize("zip64_from", [0xFFFFFFFF, 401, 400, 100, 1])
def test_the_64_bit_fields_of_a_zip_are_understood(zip64_from):
    tensor = torch.arange(100.0)
    raw = content(tensor)
    archive = build_archive(
        tensor_pickle(torch.float32, (100,)), [(400, zlib.crc32(raw))], offset=0, zip64_from=zip64_from
    )
    before, after = archive.frames
    whole = before + raw + after
    index, info = MetadataIndex("w", (0,)), _StorageInfo("__0_0.distcp", 0, len(whole))
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([100]))
    entry = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([100]), [chunk])
    metadata = Metadata({"w": entry}, storage_data={index: info})
    places = ChunkLocator(metadata, read_at=lambda _, offset, size: whole[offset : offset + size])
    payload = places.find([index])[index].payload
    assert (payload.offset, payload.crc32) == (len(before), zlib.crc32(raw))
    assert torch.equal(load_chunk(whole, "w"), tensor)


@pytest.mark.parametrize("comment", [1, 511, 2048, 60_000])
def test_a_directory_before_a_long_comment_is_found(comment):
    whole = pad(saved(torch.arange(4.0)), comment)
    assert read_directory(lambda offset, size: whole[offset : offset + size], len(whole)).find("data/0")


def pad(zipped: bytes, comment: int) -> bytes:
    return zipped[:-2] + comment.to_bytes(2, "little") + bytes(comment)


@pytest.mark.parametrize("cut", [1, 22, 100, 500])
def test_a_truncated_stock_file_is_corrupt(tmp_path, cut):
    stock_chunk(tmp_path / "x", saved(torch.zeros(4)), torch.zeros(4))
    file = tmp_path / "x" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(CorruptCheckpointError, match="not a whole torch zip"):
        all_of(tmp_path / "x", stock(tmp_path / "x"))
