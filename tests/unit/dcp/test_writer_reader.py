from __future__ import annotations

import io
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner

from ckpt_core import CheckpointManager
from ckpt_core.errors import CorruptCheckpointError, UnsafeCheckpointError
from ckpt_core.formats.checksums import checksum
from ckpt_core.formats.chunks import ChunkTable, encode_table
from ckpt_core.saving._files import RankFiles
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.types import ChunkEntry
from tests.kit.memory import MemoryStorage
from tests.unit.dcp.saved_entries import stored_crc
from tests.unit.dcp.shard_reader import ShardReader
from tests.unit.dcp.tensors import SHAPES, all_dtypes, content, filled
from tests.unit.dcp.writing import written

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Opaque:
    """Only pickle can rebuild it."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque)

    __hash__ = None


def state() -> dict[str, Any]:
    base = torch.arange(60, dtype=torch.float32)
    return {
        "dtypes": {str(dtype): filled(dtype, (3, 2)) for dtype in all_dtypes()},
        "shapes": [filled(torch.float32, shape) for shape in SHAPES],
        "views": {
            "transposed": base.reshape(6, 10).t(),
            "strided": base[::3],
            "offset": base[7:19],
            "expanded": base[:1].expand(4, 5),
            "conjugate": torch.complex(base, base + 1).conj(),
            "conjugate_transposed": torch.complex(base, base + 1).reshape(6, 10).mH,
            "negative": torch.complex(base, base + 1).conj().imag,
            "parameter": nn.Parameter(base[:9].reshape(3, 3).clone()),
        },
        "shared": [base, base, base[10:]],
        "values": {"step": 3, "name": "x", "ratio": 0.5, "none": None, "pair": (1, 2), "bytes": b"\0\1"},
    }


def blank(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.resolve_conj().resolve_neg()).contiguous()
    if isinstance(value, dict):
        return {key: blank(each) for key, each in value.items()}
    return [blank(each) for each in value] if isinstance(value, list) else None


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), where
        assert content(actual) == content(expected), where
    elif isinstance(expected, dict | list):
        assert len(actual) == len(expected), where
        for key, each in expected.items() if isinstance(expected, dict) else enumerate(expected):
            assert_same(actual[key], each, f"{where}.{key}")
    else:
        assert actual == expected, where


def chunks(writer: RankFiles) -> list[ChunkEntry]:
    """What the chunk table of this rank would say."""
    return list(ChunkTable.from_bytes(encode_table(writer.tables), source="chunks-00000.json.z"))


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


def test_stock_load_reads_what_our_writer_wrote(storage, tmp_path):
    written(storage, "ours", state())
    target = blank(state())
    dcp.load(target, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert_same(target, state())


def test_our_reader_reads_what_stock_save_wrote(storage, tmp_path):
    dcp.save(state(), checkpoint_id=tmp_path / "theirs", no_dist=True)
    target = blank(state())
    dcp.load(target, storage_reader=ShardReader(storage, "theirs"), no_dist=True)
    assert_same(target, state())


@pytest.mark.parametrize("directory", ["deep/inside", "top"])
def test_our_reader_reads_what_our_writer_wrote(directory):
    storage = MemoryStorage()
    written(storage, directory, state())
    target = blank(state())
    dcp.load(
        target, storage_reader=ShardReader(storage, directory), planner=DefaultLoadPlanner(), no_dist=True
    )
    assert_same(target, state())


def test_every_file_has_the_size_and_the_checksum_reported(storage, tmp_path):
    writer = written(storage, "ours", state())
    assert sorted(entry.path for entry in writer.entries) == [".metadata", "__0_0.distcp", "__0_1.distcp"]
    for entry in writer.entries:
        data = (tmp_path / "ours" / entry.path).read_bytes()
        assert (len(data), checksum(data)) == (entry.size_bytes, entry.checksum)


def test_every_chunk_is_where_the_writer_says_with_the_bytes_it_says(storage, tmp_path):
    writer = written(storage, "ours", state())
    for chunk in chunks(writer):
        data = (tmp_path / "ours" / chunk.path).read_bytes()
        whole = data[chunk.offset : chunk.offset + chunk.size_bytes]
        assert len(whole) == chunk.size_bytes
        if chunk.payload_offset is None:
            assert chunk.crc32 == zlib.crc32(whole), chunk.key
            continue
        assert chunk.payload_offset % 16 == 0
        payload = data[chunk.payload_offset : chunk.payload_offset + chunk.payload_bytes]
        assert chunk.crc32 == zlib.crc32(payload), chunk.key
        tensor = torch.load(io.BytesIO(whole), weights_only=True)
        assert content(tensor) == payload, chunk.key
        assert str(tensor.dtype) == f"torch.{chunk.dtype}"


def test_chunks_cover_the_data_files_without_gaps(storage):
    writer = written(storage, "ours", state())
    ends = dict.fromkeys((chunk.path for chunk in chunks(writer)), 0)
    for chunk in chunks(writer):
        assert chunk.offset == ends[chunk.path]
        ends[chunk.path] += chunk.size_bytes
    assert ends == {e.path: e.size_bytes for e in writer.entries if e.path.endswith(".distcp")}


def test_chunks_say_which_entry_of_the_metadata_they_are(storage):
    writer = written(storage, "ours", state())
    metadata = ShardReader(storage, "ours").read_metadata()
    assert {chunk.key for chunk in chunks(writer)} == set(metadata.state_dict_metadata)
    places = {(info.relative_path, info.offset, info.length) for info in metadata.storage_data.values()}
    assert {(chunk.path, chunk.offset, chunk.size_bytes) for chunk in chunks(writer)} == places


def test_a_view_writes_its_own_elements_only(storage):
    large = torch.zeros(100_000)
    writer = written(storage, "ours", {"small": large[5:8]})
    assert chunks(writer)[0].payload_bytes == 12
    assert writer.entries[0].size_bytes < 10_000


def test_a_part_is_written_into_its_own_directory_and_reported_with_it(storage, tmp_path):
    writer = written(storage, "ours", {"a": torch.ones(2)}, part="optimizer_0")
    assert {entry.path for entry in writer.entries} == {"optimizer_0/__0_0.distcp", "optimizer_0/.metadata"}
    target = {"a": torch.zeros(2)}
    dcp.load(target, checkpoint_id=tmp_path / "ours" / "optimizer_0", no_dist=True)
    assert target["a"].tolist() == [1, 1]


def test_a_file_is_never_overwritten(storage):
    written(storage, "ours", {"a": torch.ones(2)})
    with pytest.raises(FileExistsError, match=r"__0_0\.distcp"):
        written(storage, "ours", {"a": torch.zeros(2)})


def test_objects_that_only_pickle_can_hold_are_refused_unless_allowed(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, {"odd": {"value": Opaque(), "w": torch.ones(1)}})
        target: dict[str, Any] = {"odd": {"value": None, "w": torch.zeros(1)}}
        with pytest.raises(UnsafeCheckpointError, match="allow_pickle=True"):
            checkpoints.load(target, step=1)
    assert target["odd"] == {"value": None, "w": torch.zeros(1)}
    with CheckpointManager(tmp_path, allow_pickle=True) as checkpoints:
        checkpoints.load(target, step=1)
    assert target["odd"] == {"value": Opaque(), "w": torch.ones(1)}


def test_a_data_file_cut_short_is_corrupt_and_named(storage, tmp_path):
    written(storage, "ours", {"a": torch.ones(2)})
    file = tmp_path / "ours" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(CorruptCheckpointError, match=r"ours/__0_0\.distcp.*10 bytes too early"):
        read_tensor(storage, torch.zeros(2))


def test_a_damaged_archive_is_corrupt_and_named(storage, tmp_path):
    writer = written(storage, "ours", {"a": torch.ones(1 << 18)})
    file = tmp_path / "ours" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[chunks(writer)[0].payload_offset + 8 :] = bytes(len(data) - chunks(writer)[0].payload_offset - 8)
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpointError, match=r"ours/__0_0\.distcp"):
        read_tensor(storage, torch.zeros(1 << 18))


def test_a_pickle_in_the_place_of_a_tensor_is_not_executed(storage, tmp_path):
    written(storage, "ours", {"a": torch.ones(2)})
    metadata = ShardReader(storage, "ours").read_metadata()
    buffer = io.BytesIO()
    torch.save(Opaque(), buffer)
    metadata.storage_data = dict(metadata.storage_data)
    (info,) = metadata.storage_data.values()
    info.offset, info.length = 0, len(buffer.getvalue())
    (tmp_path / "ours" / "__0_0.distcp").write_bytes(buffer.getvalue())
    (tmp_path / "ours" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsafeCheckpointError, match="'a' is not a plain tensor"):
        read_tensor(storage, torch.zeros(2))


def read_tensor(storage: Storage, target: torch.Tensor) -> None:
    """As the life cycle reads: without the wrapping in which stock DCP hides the types of errors."""
    reader, planner = ShardReader(storage, "ours"), DefaultLoadPlanner()
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    planner.set_up_planner({"a": target}, metadata, is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner).wait()


def test_the_checksum_of_a_tensor_is_that_in_its_entry(storage, tmp_path):
    writer = written(storage, "ours", {"a": filled(torch.float32, (5,))})
    data = (tmp_path / "ours" / "__0_0.distcp").read_bytes()
    assert chunks(writer)[0].crc32 == stored_crc(data, 20)
