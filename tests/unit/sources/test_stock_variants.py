"""Stock DCP through its stream extensions, of which zstd is known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint._extension import StreamTransformExtension, ZStandard

from ckpt_core import CheckpointManager
from ckpt_core.commit import verify_stock
from ckpt_core.errors import CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.storage import LocalStorage
from tests.unit.sources.test_torch_save import bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Rotated(StreamTransformExtension):
    """An extension of somebody's own, which changes nothing."""

    @staticmethod
    def registry_name():
        return "stream.rotated"

    @staticmethod
    def from_descriptor(version):
        return Rotated()

    def get_descriptor(self):
        return "stream.rotated/1"

    def transform_to(self, output):
        return output

    def transform_from(self, source):
        return source


def state() -> dict[str, object]:
    torch.manual_seed(0)
    return {
        "large": torch.rand(300, 40),
        "zeros": torch.zeros(100_000),
        "transposed": torch.rand(5, 7).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "epoch": 3,
        "list": ["a", {"b": (1, 2)}],
    }


def compressed(root: Path, extension: StreamTransformExtension) -> Path:
    writer = FileSystemWriter(root / "x", _extensions=[extension])
    dcp.save(state(), storage_writer=writer, no_dist=True)
    return root


def empty() -> dict[str, object]:
    return {
        name: torch.zeros_like(each) if isinstance(each, torch.Tensor) else None
        for name, each in state().items()
    }


def loaded(root: Path) -> dict[str, object]:
    target = empty()
    target["list"] = ["", {"b": None}]
    with CheckpointManager(root) as checkpoints:
        checkpoints.load(target, name="x")
    return target


def test_entries_compressed_by_dcps_extension_are_read(tmp_path):
    found = loaded(compressed(tmp_path, ZStandard()))
    for name, each in state().items():
        assert bits(found[name]) == bits(each) if isinstance(each, torch.Tensor) else found[name] == each, (
            name
        )
    assert verify_stock(LocalStorage(tmp_path), "x") == []


def test_damage_of_a_compressed_entry_is_found_before_anything_is_loaded(tmp_path):
    compressed(tmp_path, ZStandard())
    (data,) = (tmp_path / "x").glob("*.distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 0xFF
    data.write_bytes(content)
    target = {"large": torch.zeros(300, 40), "half": torch.zeros(3, dtype=torch.bfloat16)}
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(CorruptCheckpointError, match="large"):
        checkpoints.load(target, name="x")
    assert not target["half"].any()
    assert [failure.path for failure in verify_stock(LocalStorage(tmp_path), "x")] == [data.name]


def test_without_the_library_that_decompresses_the_error_names_it(tmp_path, monkeypatch):
    compressed(tmp_path, ZStandard())
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(IncompatibleCheckpointError, match=r"pip install .*compress"):
        loaded(tmp_path)


def test_an_unknown_extension_is_refused_by_name(tmp_path):
    with pytest.raises(IncompatibleCheckpointError, match=r"stream\.rotated/1.*dcp\.load"):
        loaded(compressed(tmp_path, Rotated()))
