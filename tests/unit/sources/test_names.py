"""Tables of names rename every entry once, and back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.cli import main
from ckpt_core.errors import ConfigError
from ckpt_core.sources import NameTable
from tests.archives import unpack
from tests.unit.sources.make_deepspeed import net

MEGATRON = NameTable(
    (
        ("decoder.layers.*.self_attention.linear_proj", "layers.*.self_attn.o_proj"),
        ("decoder.layers.*.mlp.experts.*.fc", "layers.*.experts.*.up"),
        ("decoder.layers", "layers"),
        ("embedding.word_embeddings", "embed_tokens"),
        ("output_layer", "lm_head"),
    )
)
NAMES = {
    "decoder.layers.0.self_attention.linear_proj.weight": "layers.0.self_attn.o_proj.weight",
    "decoder.layers.17.mlp.experts.3.fc.weight": "layers.17.experts.3.up.weight",
    "decoder.layers.2.input_layernorm.bias": "layers.2.input_layernorm.bias",
    "embedding.word_embeddings.weight": "embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "output_layer_norm.weight": "output_layer_norm.weight",
}


def test_names_go_there_and_back() -> None:
    assert MEGATRON.of_all(NAMES) == NAMES
    assert MEGATRON.inverse.of_all(NAMES.values()) == {new: old for old, new in NAMES.items()}


def test_a_catch_all_does_not_hide_other_names_on_the_way_back() -> None:
    table = NameTable((("decoder", ""), ("output_layer", "lm_head")))
    names = {"decoder.a.weight": "a.weight", "output_layer.weight": "lm_head.weight"}
    assert table.of_all(names) == names
    assert table.back(names.values()) == {new: old for old, new in names.items()}
    with pytest.raises(ConfigError, match=r"'a\.x' would be called 'c\.x', which the table does not"):
        NameTable((("c.x", "d"), ("c", "a"))).back(["a.x"])


@pytest.mark.parametrize("to", ["hf", "torch", "dcp"])
def test_names_there_are_written_and_come_back(tmp_path: Path, to: str) -> None:
    (tmp_path / "names.json").write_text('{"decoder.layers.*": "body.*", "decoder": "", "out": "head"}')
    model = nn.ModuleDict(
        {"body": nn.ModuleList([nn.Linear(2, 3)]), "head": nn.Linear(3, 2), "x": nn.Linear(1, 1)}
    )
    optimizer = torch.optim.Adam(model.parameters())
    sum(each.sum() for each in model.parameters()).backward()
    optimizer.step()
    table, (run, out, back) = (
        str(tmp_path / "names.json"),
        map(str, map(tmp_path.joinpath, ("run", "out", "back"))),
    )
    with CheckpointManager(run) as manager:
        manager.save(3, TrainState(model=model, optimizer=optimizer, rng=False))
    assert main(["export", run, out, "--to", to, "--map", table]) == 0
    assert main(["import", out, back, "--map", table, "--step", "3"]) == 0
    assert main(["diff", run, back, *(["--only", "model.*"] if to == "hf" else ())]) == 0
    if to == "hf":
        found = load_file(f"{out}/model.safetensors")
        assert {"decoder.layers.0.weight", "out.bias", "decoder.x.weight"} <= found.keys()


def test_a_module_is_put_below_another_and_taken_out() -> None:
    below = NameTable((("", "net"),))
    assert below.renamed("a.weight") == "net.a.weight"
    assert below.inverse.renamed("net.a.weight") == "a.weight"


def test_two_entries_never_get_one_name() -> None:
    with pytest.raises(ConfigError, match=r"a.x and b.x would be called 'c.x'"):
        NameTable((("a", "c"), ("b", "c"))).of_all(["a.x", "b.x"])
    with pytest.raises(ConfigError, match="would be called ''"):
        NameTable((("a", ""),)).of_all(["a"])


def test_wildcards_must_be_on_both_sides() -> None:
    with pytest.raises(ConfigError, match=r"layers\.\* -> layers"):
        NameTable((("layers.*", "layers"),))


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_table_is_read_from_a_file(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"names.{suffix}"
    file.write_text(json.dumps(dict(MEGATRON.pairs)))
    assert NameTable.read(file) == MEGATRON


def test_a_file_that_is_no_table_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "names.json"
    file.write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="not a mapping of names"):
        NameTable.read(file)


def test_an_import_renames_weights_state_and_groups(tmp_path: Path) -> None:
    unpack(Path(__file__).with_name("deepspeed.tar.xz"), tmp_path)
    (tmp_path / "names.json").write_text('{"inner": "body.first", "embedding": "body.words", "*": "*"}')
    place = str(tmp_path / "stage2-fp32")
    assert main(["import", place, str(tmp_path / "run"), "--map", str(tmp_path / "names.json")]) == 0

    model = net()
    model.body = nn.ModuleDict({"first": model.inner, "words": model.embedding})
    del model.inner, model.embedding
    groups = [
        [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) is wide] for wide in (True, False)
    ]
    optimizer = torch.optim.AdamW([{"params": each} for each in groups])
    with CheckpointManager(tmp_path / "run") as manager:
        manager.load(TrainState(model=model, optimizer=optimizer, rng=False))
    expected = load_file(tmp_path / "stage2-fp32" / "expected.safetensors")
    assert torch.equal(model.body["first"].weight, expected["model.inner.weight"])
    moment = optimizer.state[model.body["first"].weight]["exp_avg"]
    assert torch.equal(moment, expected["exp_avg.inner.weight"])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
