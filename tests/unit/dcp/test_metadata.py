from __future__ import annotations

import copyreg
import gc
import io
import os
import pickle
from pathlib import Path, PosixPath, PurePosixPath

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)

from ckpt_core.dcp import entries, load_metadata
from ckpt_core.errors import CorruptCheckpointError, UnsafeCheckpointError
from ckpt_core.types import SavedTensor
from tests.unit.dcp.tensors import all_dtypes, filled

PLACE = "root/step/.metadata"


class Planted:
    """Executes a command when unpickled."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self):
        return os.mkdir, (str(self.evidence),)


def metadata(relative_path: object = "__0_0.distcp", offset: int = 0, length: int = 1) -> Metadata:
    info = _StorageInfo(relative_path=relative_path, offset=offset, length=length)
    return Metadata(state_dict_metadata={}, storage_data={MetadataIndex("w"): info})


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stock") / "checkpoint"
    state = {str(dtype): filled(dtype, (2, 3)) for dtype in all_dtypes()}
    dcp.save(
        {"tensors": state, "values": {"a": [1, "x", None], "b": {"c": 2.5}}},
        checkpoint_id=folder,
        no_dist=True,
    )
    return folder


def test_what_stock_dcp_wrote_is_read_as_stock_reads_it(stock):
    ours = load_metadata((stock / ".metadata").read_bytes(), PLACE)
    theirs = without_strides(FileSystemReader(stock).read_metadata())
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data


def without_strides(metadata):
    """Take away what torch notes from 2.15 on, and nothing reads."""
    for entry in metadata.state_dict_metadata.values():
        if hasattr(getattr(entry, "properties", None), "strides"):
            entry.properties.strides = None
    return metadata


def test_entries_are_named_by_their_path_and_described(stock):
    found = entries(load_metadata((stock / ".metadata").read_bytes(), PLACE))
    assert found["tensors", "torch.bfloat16"] == SavedTensor(shape=(2, 3), dtype="bfloat16")
    assert found["values", "b", "c"] is None


@pytest.mark.parametrize("path", [Path("a"), PosixPath("/x/y"), PurePosixPath("b")], ids=repr)
def test_a_checkpoint_id_that_is_a_path_is_read(path):
    content = pickle.dumps(Metadata({}, storage_data={}, storage_meta=StorageMeta(checkpoint_id=path)))
    assert load_metadata(content, PLACE).storage_data == {}


def test_what_newer_pythons_and_torches_write_is_read(stock, monkeypatch):
    """Python 3.13 calls a path's module by another name, and torch 2.15 notes strides after the rest."""
    written = without_strides(FileSystemReader(stock).read_metadata())
    state = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*state(self)[:5], (3, 1)))
    written.storage_meta = StorageMeta(checkpoint_id=Path("run"))
    content = pickle.dumps(written, protocol=2).replace(b"cpathlib\n", b"cpathlib._local\n")
    assert b"pathlib._local" in content
    monkeypatch.undo()
    assert load_metadata(content, PLACE).state_dict_metadata == written.state_dict_metadata


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_planted_call_is_refused_and_not_executed(tmp_path, protocol):
    trap = metadata()
    trap.planner_data = {"w": Planted(tmp_path / "evidence")}
    with pytest.raises(UnsafeCheckpointError, match=r"root/step/\.metadata.*posix\.mkdir"):
        load_metadata(pickle.dumps(trap, protocol=protocol), PLACE)
    assert not (tmp_path / "evidence").exists()


@pytest.mark.parametrize(
    "name",
    ["os system", "builtins eval", "builtins getattr", "torch load", "torch._utils _rebuild_tensor_v2",
     "torch.serialization load", "pathlib Path.unlink",
     "functools partial", "torch.storage _load_from_bytes"],
)  # fmt: skip
def test_no_function_outside_the_allow_list_is_reached(name):
    module, attribute = name.split()
    content = b"c" + module.encode() + b"\n" + attribute.encode() + b"\n(I1\ntR."
    with pytest.raises(UnsafeCheckpointError, match="was not executed"):
        load_metadata(content, PLACE)


def by_name(member):
    """As Python 3.11.0 to 3.11.3 pickle the member of an enum."""
    return getattr, (type(member), member.name)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("encoding", _MEM_FORMAT_ENCODING)
def test_memory_formats_are_read_as_any_python_writes_them(stock, encoding, protocol):
    written = without_strides(FileSystemReader(stock).read_metadata())
    key, entry = next((k, e) for k, e in written.state_dict_metadata.items() if hasattr(e, "properties"))
    dtype, layout, grad, _, *further = entry.properties.__getstate__()
    entry.properties.__setstate__((dtype, layout, grad, encoding, *further))
    expected = entry.properties.memory_format
    found = []
    for reduce in (by_name, lambda member: (type(member), (member.value,))):
        content = io.BytesIO()
        pickler = pickle.Pickler(content, protocol)
        pickler.dispatch_table = copyreg.dispatch_table | {_MEM_FORMAT_ENCODING: reduce}
        pickler.dump(written)
        found.append(load_metadata(content.getvalue(), PLACE).state_dict_metadata[key].properties)
    assert found == [entry.properties] * 2
    assert all(properties.memory_format == expected for properties in found)


@pytest.mark.parametrize(
    ("owner", "name"),
    [("torch Size", "__new__"), ("pathlib PosixPath", "cwd"),
     ("torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING", "__reduce__"),
     ("torch.distributed.checkpoint.metadata Metadata", "TORCH_CHANNELS_LAST")],
)  # fmt: skip
def test_no_attribute_but_a_memory_format_is_reached(owner, name):
    module, attribute = owner.split()
    asked = b"\x8c" + bytes([len(name)]) + name.encode()
    content = f"cbuiltins\ngetattr\n(c{module}\n{attribute}\n".encode() + asked + b"tR."
    with pytest.raises(UnsafeCheckpointError, match="was not executed"):
        load_metadata(content, PLACE)


def test_classes_of_the_allow_list_cannot_be_altered_by_a_pickle():
    # BUILD with a slot state calls setattr on whatever lies on the stack: here on a class of everybody's.
    content = b"cpathlib\nPurePosixPath\n(N(dVis_absolute\nctorch\nSize\nstb."
    before = PurePosixPath.is_absolute
    try:
        with pytest.raises((UnsafeCheckpointError, CorruptCheckpointError)):
            load_metadata(content, PLACE)
        assert PurePosixPath.is_absolute is before
    finally:
        PurePosixPath.is_absolute = before


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x05.", b"\0" * 100, pickle.dumps({"a": 1})])
def test_what_is_no_metadata_is_corrupt_and_named(content):
    with pytest.raises(CorruptCheckpointError, match=r"root/step/\.metadata") as caught:
        load_metadata(content, PLACE)
    assert [failure.path for failure in caught.value.failures] == [PLACE]


def test_metadata_cut_short_anywhere_is_corrupt(stock):
    content = (stock / ".metadata").read_bytes()
    for length in range(0, len(content), max(1, len(content) // 60)):
        with pytest.raises(CorruptCheckpointError):
            load_metadata(content[:length], PLACE)


@pytest.mark.parametrize(
    "path", ["../other/__0_0.distcp", "/etc/passwd", "a/../../b", "..", "..\\..\\b", 7, None, b"__0_0.distcp"]
)
def test_places_outside_the_directory_are_refused(path):
    with pytest.raises(CorruptCheckpointError):
        load_metadata(pickle.dumps(metadata(path)), PLACE)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, -1), ("0", 1), (0, None)])
def test_impossible_places_are_refused(offset, length):
    with pytest.raises(CorruptCheckpointError):
        load_metadata(pickle.dumps(metadata(offset=offset, length=length)), PLACE)


def test_storage_data_of_another_kind_is_refused():
    odd = Metadata({}, storage_data={MetadataIndex("w"): torch.float32})
    with pytest.raises(CorruptCheckpointError, match="not supported"):
        load_metadata(pickle.dumps(odd), PLACE)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(stock, enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        load_metadata((stock / ".metadata").read_bytes(), PLACE)
        assert gc.isenabled() is enabled
        with pytest.raises(CorruptCheckpointError):
            load_metadata(b"", PLACE)
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
