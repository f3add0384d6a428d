"""Exports to Hugging Face: what `save_pretrained` would have written, from a checkpoint alone."""

from __future__ import annotations

import json
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ckpt_core import CheckpointManager, ConfigError, IncompatibleCheckpointError, KeepLatest, export
from ckpt_core.cli import main
from ckpt_core.storage import ObjectStorage, open_storage
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


@pytest.mark.parametrize(
    "named", ["someone/kernel", "kernels-community/flash-attn3@main", {"": "someone/kernel:of"}]
)
def test_a_configuration_names_no_kernel_that_an_export_fetches(stock, tmp_path, named):
    config = json.loads((stock / "stock/config.json").read_text()) | {"attn_implementation": named}
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text(json.dumps(config))
    export(stock / "run", tmp_path / "out", like=tmp_path / "like")
    same(weights(tmp_path / "out"), weights(stock / "stock"))


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Path:
    """A folder of transformers, and a run beside it with the same model."""
    folder = tmp_path_factory.mktemp("qwen2")
    model = made("qwen2")
    model.save_pretrained(folder / "stock")
    (folder / "stock/tokenizer.json").write_text("{}")
    (folder / "stock/README.md").write_text("not of the tokenizer")
    saved(folder / "run", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
    return folder


def test_files_beside_the_weights_come_along_and_no_others(tmp_path, stock):
    export(stock / "run", tmp_path / "out", like=stock / "stock")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_a_folder_of_weights_is_exported_again_in_another_dtype(tmp_path, stock):
    export(stock / "stock", tmp_path / "half", dtype="fp16", shard_bytes=30_000)
    export(tmp_path / "half", tmp_path / "again")
    expected = {name: each.half() for name, each in weights(stock / "stock").items()}
    same(weights(tmp_path / "half"), expected)
    same(weights(tmp_path / "again"), expected)


def test_of_experts_files_that_transformers_wrote_keep_their_form(tmp_path):
    made("mixtral").save_pretrained(tmp_path / "stock")
    export(tmp_path / "stock", tmp_path / "out")
    same(weights(tmp_path / "out"), weights(tmp_path / "stock"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": 64}, "has shape"),
        ({"num_hidden_layers": 3}, "is missing"),
        ({"num_hidden_layers": 1}, "is not in that model"),
        ({"vocab_size": 97}, r"embed_tokens.weight has shape \[96, 32\], \[97, 32\] is expected"),
        ({"num_attention_heads": "four"}, "transformers cannot build Qwen2ForCausalLM"),
    ],
)
def test_the_configuration_of_another_model_is_refused_before_anything_is_written(
    tmp_path, stock, change, problem
):
    config = json.loads((stock / "stock/config.json").read_text())
    (tmp_path / "wrong").mkdir()
    layers = {"layer_types": ["full_attention"] * change.get("num_hidden_layers", 2)}
    (tmp_path / "wrong/config.json").write_text(json.dumps({**config, **layers, **change}))
    with pytest.raises((IncompatibleCheckpointError, ConfigError), match=problem):
        export(stock / "run", tmp_path / "out", like=tmp_path / "wrong")
    assert not (tmp_path / "out").exists()
    (tmp_path / "wrong/config.json").write_text("[]")
    with pytest.raises(ConfigError, match="is no JSON object"):
        export(stock / "run", tmp_path / "out", like=tmp_path / "wrong")


def test_tensors_that_are_tied_there_and_differ_here_are_not_dropped_silently(tmp_path, stock):
    state = {name: each.clone() for name, each in made("qwen2").state_dict().items()}
    state["lm_head.weight"][0, 0] += 1
    root = saved(tmp_path / "run", {"model": state})
    with pytest.raises(IncompatibleCheckpointError, match="are one tensor there, and differ here"):
        export(root, tmp_path / "out", like=stock / "stock")


def test_a_model_that_transformers_does_not_know_is_written_as_it_is_with_tied_tensors_once(tmp_path):
    shared = torch.randn(96, 4)
    state = {
        "decoder.out.weight": shared,
        "embed.weight": shared,
        "norm": torch.zeros(4),
        "bias": torch.zeros(4),
    }
    root = saved(tmp_path / "run", {"model": {**state, "count": torch.tensor([3])}})
    export(root, tmp_path / "plain", dtype="bf16")
    found = weights(tmp_path / "plain")
    assert {name: each.dtype for name, each in found.items()} == {
        **dict.fromkeys(state, torch.bfloat16),
        "count": torch.int64,
    }
    (tmp_path / "like").mkdir()
    (tmp_path / "like/config.json").write_text('{"tie_word_embeddings": true, "vocab_size": 96}')
    export(root, tmp_path / "tied", like=tmp_path / "like")
    assert sorted(weights(tmp_path / "tied")) == ["bias", "count", "embed.weight", "norm"]
    export(root, tmp_path / "some", include=["*.weight"])
    assert sorted(weights(tmp_path / "some")) == ["decoder.out.weight", "embed.weight"]


def test_an_export_reaches_a_bucket_and_its_index_is_the_last_to_come(tmp_path, stock, monkeypatch):
    order: list[str] = []
    plain = ObjectStorage.write_pieces

    def noted(self: Any, key: str, pieces: Any) -> None:
        order.append(key)
        plain(self, key, pieces)

    monkeypatch.setattr(ObjectStorage, "write_pieces", noted)
    place = f"memory://bucket-{uuid.uuid4().hex}/run/hf"
    summary = export(stock / "run", place, like=stock / "stock", shard_bytes=30_000)
    assert order[-1] == "hf/model.safetensors.index.json"
    assert [f"hf/{path}" for path in summary.files] == order
    storage = open_storage(place)
    assert sorted(entry.name for entry in storage.list("")) == sorted(summary.files)
    (tmp_path / "out").mkdir()
    for name in summary.files:
        (tmp_path / "out" / name).write_bytes(storage.read_bytes(name))
    same(weights(tmp_path / "out"), weights(stock / "stock"))
    export(place, tmp_path / "back")
    same(weights(tmp_path / "back"), weights(stock / "stock"))


def test_the_command_exports_and_says_what_is_wrong(tmp_path, stock, capsys):
    given = [
        f"{stock}/run@3",
        f"{tmp_path}/out",
        "--like",
        f"{stock}/stock",
        "--shard-size",
        "30 kB",
        "--json",
    ]
    assert main(["export", *given]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["url"]) == (3, f"{tmp_path}/out")
    assert told["files"][-1] == "model.safetensors.index.json"
    for wrong, problem in (
        (["--to", "onnx"], "to must be"),
        (["--dtype", "int4"], "dtype must be"),
        (["--adapters", "--merge-adapters"], "give one"),
        (["--include", "none*"], "nothing fits"),
        ([], "is not empty"),
    ):
        assert main(["export", *given, *wrong]) in {1, 2}
        assert problem in capsys.readouterr().err


def test_what_is_exported_is_not_pruned_meanwhile(tmp_path, stock):
    seen: list[Any] = []
    first = threading.Lock()
    with CheckpointManager(tmp_path / "run", keep=KeepLatest(1)) as manager:
        manager.save(1, {"model": made("qwen2")})
        manager.wait()

        def prunes(_: int) -> None:
            if first.acquire(blocking=False):
                manager.save(2, {"model": made("qwen2")})
                manager.wait()
                seen.extend(manager.checkpoints())

        export(tmp_path / "run", tmp_path / "out", like=stock / "stock", progress=prunes)
        assert [(info.step, str(info.pinned).partition(",")[0]) for info in seen] == [
            (1, "in use"),
            (2, "None"),
        ]
        manager.prune()
        assert [info.step for info in manager.checkpoints()] == [2]
    same(weights(tmp_path / "out"), weights(stock / "stock"))
