"""Checkpoints of Megatron-Core are read bit by bit, in the shapes of parameters, and nothing is executed."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ckpt_core import CheckpointManager
from ckpt_core.cli import main
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, UnsafeCheckpointError
from ckpt_core.loading import open_parts
from ckpt_core.storage import LocalStorage
from tests.archives import unpack
from tests.unit.sources.make_megatron import CASES


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Megatron-Core 0.16.1 and 0.12.1 saved; see `make_megatron`."""
    place = tmp_path_factory.mktemp("megatron")
    unpack(Path(__file__).with_name("megatron.tar.xz"), place)
    return place


def ours(name: str) -> str:
    return name if "optimizer" in name else f"model.{name}"


def expected(place: Path) -> dict[str, torch.Tensor]:
    return {ours(name): each for name, each in load_file(place / "expected.safetensors").items()}


def read_tensors(place: Path) -> dict[str, torch.Tensor]:
    _, _, parts = open_parts(LocalStorage(place.parent), place.name)
    part, found = parts[""], dict[str, torch.Tensor]()
    for name, entry in part.metadata.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            continue
        found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        for chunk in entry.chunks:
            index = MetadataIndex(name, chunk.offsets)
            content = part.read_tensor(part.find([index])[index], entry.properties.dtype).reshape(chunk.sizes)
            box = tuple(slice(a, a + n) for a, n in zip(chunk.offsets, chunk.sizes, strict=True))
            found[name][box] = content
    return found


@pytest.mark.parametrize("name", CASES)
def test_tensors_and_flattened_shards_have_the_shapes_and_bits_of_the_whole(samples: Path, name: str) -> None:
    found, whole = read_tensors(samples / name), expected(samples / name)
    assert found.keys() == whole.keys()
    for key, tensor in whole.items():
        assert found[key].dtype == tensor.dtype
        assert torch.equal(found[key], tensor), key


@pytest.mark.parametrize("name", CASES)
def test_a_mapping_is_filled_with_weights_optimizer_and_what_ranks_have_in_common(
    samples: Path, tmp_path: Path, name: str
) -> None:
    whole = expected(samples / name)
    key = next(each for each in whole if "exp_avg_sq.decoder.layers" in each)
    weights = {
        each.removeprefix("model."): torch.zeros_like(tensor)
        for each, tensor in whole.items()
        if each.startswith("model.")
    }
    state: dict[str, Any] = {"model": weights, key: torch.zeros_like(whole[key]), "common": {"iteration": 0}}
    with CheckpointManager(tmp_path) as manager:
        manager.load(state, source=samples / name, include=["model.*", key, "common.iteration"])
    assert all(torch.equal(each, whole[f"model.{name}"]) for name, each in weights.items())
    assert torch.equal(state[key], whole[key])
    assert state["common"]["iteration"] == 7


def assert_refused(place: Path, error: type[CheckpointError], says: str) -> None:
    weights = {"model": {"decoder.final_layernorm.weight": torch.zeros(6, dtype=torch.bfloat16)}}
    with CheckpointManager(place.parent / "run") as manager, pytest.raises(error, match=says):
        manager.load(weights, source=place, strict=False)
    assert not weights["model"]["decoder.final_layernorm.weight"].any()


@pytest.fixture
def copied(samples: Path, tmp_path: Path) -> Any:
    def copy(name: str) -> Path:
        shutil.copytree(samples / name, tmp_path / name)
        return tmp_path / name

    return copy


def test_a_missing_file_of_a_rank_is_told(copied: Any) -> None:
    place = copied("tp2")
    (place / "__1_0.distcp").unlink()
    assert_refused(place, CorruptCheckpointError, "__1_0.distcp")


def test_missing_common_state_is_told(copied: Any) -> None:
    place = copied("tp2")
    (place / "common.pt").unlink()
    assert_refused(place, CorruptCheckpointError, "common.pt")


class _Attack:
    def __reduce__(self) -> Any:
        return os.system, ("touch attacked",)


def test_nothing_in_common_state_is_executed(
    copied: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = copied("tp1")
    torch.save({"iteration": 7, "args": _Attack()}, place / "common.pt")
    assert_refused(place, UnsafeCheckpointError, "system")
    assert not (tmp_path / "attacked").exists()


def test_a_shape_that_no_flattened_shards_make_up_is_told(copied: Any) -> None:
    place = copied("old-tp2-flat")
    content = (place / ".metadata").read_bytes()
    # Of the experts, (4, 3, 5), as a pickle has it.
    changed = content.replace(b"K\x04K\x03K\x05\x87", b"K\x04K\x03K\x06\x87")
    assert changed != content
    (place / ".metadata").write_bytes(changed)
    assert_refused(place, CorruptCheckpointError, "cannot be")


def test_another_programs_metadata_json_leaves_stock_dcp_as_it_is(copied: Any) -> None:
    place = copied("tp2")
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "other"}))
    assert all(not name.startswith("model.") for name in read_tensors(place))


def fuzz(sample: Path, scratch: Path, mutations: int) -> int:
    """Read mutations of a sample; return how many were refused."""
    chance, refused = random.Random(sample.name), 0
    for _ in range(mutations):
        place = scratch / sample.name
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(sample, place)
        files = sorted(each for each in place.iterdir() if each.suffix != ".safetensors")
        file = chance.choice([*files, place / ".metadata", place / "common.pt"])
        content = bytearray(file.read_bytes())
        if chance.randrange(8):
            for _ in range(chance.choice([1, 1, 2, 8])):
                content[chance.randrange(len(content))] = chance.randrange(256)
        else:
            content = content[: chance.randrange(len(content))]
        file.write_bytes(content)
        try:
            read_tensors(place)
        except CheckpointError:
            refused += 1
    return refused


@pytest.mark.parametrize("name", ["tp2", "old-tp1-flat"])
def test_damaged_files_raise_our_errors_and_nothing_else(samples: Path, tmp_path: Path, name: str) -> None:
    assert fuzz(samples / name, tmp_path, 25) > 3


def test_show_tells_what_it_is_with_the_shapes_of_parameters(
    samples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(samples / "old-tp2-flat"), "--tensors"]) == 0
    shown = capsys.readouterr().out
    assert "a checkpoint of Megatron-Core" in shown
    (row,) = [line for line in shown.splitlines() if "exp_avg.decoder.experts.weight" in line]
    assert "4x3x5" in row
