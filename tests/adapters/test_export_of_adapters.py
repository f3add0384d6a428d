"""Exports of models with adapters of PEFT: kept as PEFT reads them, merged as PEFT merges them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from ckpt_core import CheckpointManager, ConfigError, IncompatibleCheckpointError, TrainState, export
from tests.adapters.model_families import made

pytestmark = pytest.mark.filterwarnings("ignore")

LORA = {"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "gate_proj"]}


def adapted(family: str = "llama", dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    """Return a model whose adapters do something, as after a training."""
    model = peft.get_peft_model(made(family).to(dtype), peft.LoraConfig(**{**LORA, **config}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def saved(root: Path, model: Any, contents: str = "all") -> Path:
    with CheckpointManager(root) as manager:
        manager.save(1, TrainState(model=model, contents=contents))
    return root


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert sorted(one) == sorted(other)
    for name, tensor in one.items():
        assert tensor.dtype == other[name].dtype, name
        assert torch.equal(tensor, other[name]), name


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


@pytest.mark.parametrize("contents", ["all", "trainable"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama", {}),
        ("llama", {"use_dora": True, "modules_to_save": ["lm_head"]}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
        ("bert", {"target_modules": ["query"], "bias": "lora_only"}),
    ],
    ids=["plain", "dora", "embeddings", "biases"],
)
def test_kept_adapters_are_those_that_peft_saves_and_reads(tmp_path, family, config, contents):
    model = adapted(family, **config)
    model.save_pretrained(tmp_path / "stock")
    root = saved(tmp_path / "run", model, contents)
    export(root, tmp_path / "out", adapters="keep", like=tmp_path / "stock")
    expected = weights(tmp_path / "stock")
    if "embed_tokens" in config.get("target_modules", ()):  # PEFT saves the frozen embeddings, too
        expected = {name: each for name, each in expected.items() if "base_layer" not in name}
    if "bias" in config:  # which PEFT 0.20 loses
        expected |= {
            name: each for name, each in model.state_dict().items() if name.endswith("query.base_layer.bias")
        }
    same(weights(tmp_path / "out"), expected)
    again = peft.PeftModel.from_pretrained(made(family), tmp_path / "out")
    same(dict(again.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("contents", ["all", "trainable"])
@pytest.mark.parametrize(
    ("family", "dtype", "config"),
    [
        ("llama", torch.float32, {}),
        ("llama", torch.bfloat16, {"use_rslora": True, "alpha_pattern": {"q_proj": 5}}),
        ("llama", torch.float32, {"rank_pattern": {"layers.1.*v_proj": 2}, "modules_to_save": ["lm_head"]}),
        ("llama", torch.float32, {"target_modules": ["embed_tokens", "o_proj"]}),
        ("gpt2", torch.float32, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}),
        ("mixtral", torch.bfloat16, {"target_modules": ["q_proj", "k_proj"]}),
    ],
)
def test_adapters_are_merged_to_the_bits_of_merge_and_unload(tmp_path, family, dtype, config, contents):
    model = adapted(family, dtype, **config)
    base = made(family).to(dtype)
    base.save_pretrained(tmp_path / "base")
    model.peft_config["default"].save_pretrained(tmp_path / "base")
    root = saved(tmp_path / "run", model, contents)
    export(root, tmp_path / "out", adapters="merge", like=tmp_path / "base")
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "stock")
    same(weights(tmp_path / "out"), weights(tmp_path / "stock"))
    again = type(base).from_pretrained(tmp_path / "out", dtype=dtype, local_files_only=True)
    same(dict(again.state_dict()), dict(merged.state_dict()))


def test_what_becomes_of_adapters_must_be_said(tmp_path):
    model = adapted()
    root = saved(tmp_path / "run", model)
    with pytest.raises(ConfigError, match=r'adapters="keep" \(--adapters\).*adapters="merge"'):
        export(root, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has no adapter_config.json"):
        export(root, tmp_path / "out", adapters="keep")
    plain = saved(tmp_path / "plain", made("llama"))
    with pytest.raises(ConfigError, match="has no adapters of PEFT"):
        export(plain, tmp_path / "out", adapters="keep")
    assert not (tmp_path / "out").exists()


def test_only_plain_lora_is_merged_and_the_field_that_is_in_the_way_is_named(tmp_path):
    model = adapted(use_dora=True)
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    root = saved(tmp_path / "run", model)
    with pytest.raises(ConfigError, match="use_dora=True"):
        export(root, tmp_path / "out", adapters="merge", like=tmp_path / "config")
    other = peft.get_peft_model(
        made("llama"), peft.IA3Config(target_modules=["q_proj"], feedforward_modules=[])
    )
    other.save_pretrained(tmp_path / "ia3")
    root = saved(tmp_path / "other", other)
    with pytest.raises(ConfigError, match="peft_type='IA3'"):
        export(root, tmp_path / "out", adapters="merge", like=tmp_path / "ia3")
    export(root, tmp_path / "out", adapters="keep", like=tmp_path / "ia3")
    same(weights(tmp_path / "out"), weights(tmp_path / "ia3"))


def test_adapters_are_not_merged_into_another_base_than_they_were_trained_on(tmp_path):
    model = adapted()
    model.peft_config["default"].save_pretrained(tmp_path / "config")
    root = saved(tmp_path / "run", model, "trainable")
    with pytest.raises(ConfigError, match="give the folder of the base"):
        export(root, tmp_path / "out", adapters="merge", like=tmp_path / "config")
    base = made("llama")
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight[0, 0] += 1
    base.save_pretrained(tmp_path / "config")
    with pytest.raises(IncompatibleCheckpointError, match="is not the base"):
        export(root, tmp_path / "out", adapters="merge", like=tmp_path / "config")
    assert not (tmp_path / "out").exists()
