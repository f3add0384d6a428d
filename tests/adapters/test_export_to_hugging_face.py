"""Exports to Hugging Face: what `save_pretrained` would have written, from a checkpoint alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckpt_core import CheckpointManager
from ckpt_core.convert import export
from tests.adapters.model_families import FAMILIES, made

pytestmark = pytest.mark.filterwarnings("ignore")


def saved(root: Path, state: Any) -> Path:
    with CheckpointManager(root) as manager:
        manager.save(3, state)
    return root


def weights(folder: Path, pattern: str = "*.safetensors") -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob(pattern) for name, each in load_file(path).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert tensor.shape == other[name].shape, name
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exported_as_save_pretrained_writes_it(tmp_path, family):
    model = made(family)
    model.save_pretrained(tmp_path / "stock")
    root = saved(tmp_path / "run", {"model": model})
    summary = export(root, tmp_path / "out", like=tmp_path / "stock", shard_bytes=20_000)
    same(weights(tmp_path / "out"), weights(tmp_path / "stock"))
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    total = sum(each.nbytes for each in weights(tmp_path / "out").values())
    assert index["metadata"]["total_size"] == total
    assert summary.step == 3
    assert summary.size_bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    again = type(model).from_pretrained(tmp_path / "out", local_files_only=True)
    same(dict(again.state_dict()), dict(model.state_dict()))

    config = json.loads((tmp_path / "stock/config.json").read_text())
    (tmp_path / "only").mkdir()
    (tmp_path / "only/config.json").write_text(json.dumps(config))
    export(root, tmp_path / "half", like=tmp_path / "only", dtype="bf16")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "stock-half")
    same(weights(tmp_path / "half"), weights(tmp_path / "stock-half"))
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "bfloat16"
