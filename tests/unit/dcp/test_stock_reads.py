"""What our writer wrote is read by everything that reads what stock DCP writes."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ckpt_core.storage import LocalStorage
from tests.unit.dcp import writing
from tests.unit.dcp.saved_entries import payload_bytes, stored_crc

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

STATES: dict[str, dict[str, Any]] = {
    "0-d": {"w": torch.tensor(3.5), "flag": torch.tensor(True)},
    "empty": {"w": torch.empty(0), "v": torch.empty(3, 0, 2, dtype=torch.bfloat16), "x": torch.ones(2)},
    "one byte": {f"w{i}": torch.tensor([i], dtype=torch.uint8) for i in range(9)},
    "values of many sizes": {f"v{i}": "x" * (i * 37) for i in range(40)} | {"w": torch.ones(3)},
    "a large one": {"w": torch.arange(5_000_000), "small": torch.ones(7)},
}


def written(directory: Path, state: dict[str, Any]) -> Any:
    """Write with our writer; what `.metadata` says."""
    writing.written(LocalStorage(directory.parent), directory.name, state)
    return pickle.loads((directory / ".metadata").read_bytes())


def blank(state: dict[str, Any]) -> dict[str, Any]:
    return {key: torch.zeros_like(v) if isinstance(v, torch.Tensor) else None for key, v in state.items()}


def same(actual: dict[str, Any], expected: dict[str, Any]) -> bool:
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[key], each) if isinstance(each, torch.Tensor) else actual[key] == each
        for key, each in expected.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_stock_load_the_converter_and_torch_read_it_and_find_its_checksums(tmp_path, state):
    metadata = written(tmp_path / "ours", state)
    target = blank(state)
    dcp.load(target, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert same(target, state)
    dcp_to_torch_save(tmp_path / "ours", tmp_path / "all.pt")
    assert same(torch.load(tmp_path / "all.pt", weights_only=True), state)
    assert len(metadata.storage_data) == len(state)
    for place in metadata.storage_data.values():
        data = (tmp_path / "ours" / place.relative_path).read_bytes()
        content = data[place.offset : place.offset + place.length]
        if zipfile.is_zipfile(io.BytesIO(content)):
            assert zipfile.ZipFile(io.BytesIO(content)).testzip() is None
        else:
            stored_crc(content, payload_bytes(content))


def test_plain_values_take_a_quarter_of_a_zip_and_others_are_zips(tmp_path):
    plain = {"step": 3, "lr": 0.1, "name": "x" * 40, "betas": (0.9, 0.99), "none": None, "raw": b"\0\xff" * 9}
    plain |= {"big": -(2**90), "shape": torch.Size([2, 3]), "dtype": torch.bfloat16, "list": [1, ["a"], ()]}
    others = {"set": {1, 2}, "pair": (torch.ones(2), 1), "long": "y" * (1 << 20), "complex": 1 + 2j}
    metadata = written(tmp_path / "ours", plain | others)
    target: dict[str, Any] = dict.fromkeys(plain | others)
    dcp.load(target, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert {key: target[key] for key in plain} == plain
    assert [type(target[key]) for key in plain] == list(map(type, plain.values()))
    data = (tmp_path / "ours" / "__0_1.distcp").read_bytes()
    entries = {i.fqn: data[p.offset : p.offset + p.length] for i, p in metadata.storage_data.items()}
    zips = {key for key, content in entries.items() if zipfile.is_zipfile(io.BytesIO(content))}
    assert zips == others.keys()
    assert max(len(entries[key]) for key in plain) < 300
    assert {len(entries[key]) % 64 for key in plain} == {0}


@pytest.mark.slow
def test_3000_tiny_tensors_are_read_by_stock_load(tmp_path):
    state = {f"layer{i}.w": torch.full((3,), float(i)) for i in range(3_000)}
    written(tmp_path / "ours", state)
    target = blank(state)
    dcp.load(target, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert same(target, state)
