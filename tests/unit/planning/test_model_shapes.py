"""Parameters of models: by a number, by Transformers, by a function, all on no memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.cli import main
from ckpt_core.errors import ConfigError
from ckpt_core.planning import find_model

PUBLISHED = {
    # model: the parameters that its own model card, or `sum(p.numel())` of its release, names.
    "Llama-3-8B": (
        {"model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336},
        8_030_261_248,
    ),
    "Llama-2-7B": (
        {"model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "intermediate_size": 11_008},
        6_738_415_616,
    ),
    "Mistral-7B": (
        {"model_type": "mistral", "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336},
        7_241_732_096,
    ),
    "Mixtral-8x7B": (
        {"model_type": "mixtral", "vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14_336},
        46_702_792_704,
    ),
    "Qwen2.5-7B": (
        {"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18_944},
        7_615_616_512,
    ),
    "GPT-2": (
        {"model_type": "gpt2", "vocab_size": 50_257, "n_embd": 768, "n_layer": 12, "n_positions": 1024},
        124_439_808,
    ),
    "Pythia-6.9B": (
        {"model_type": "gpt_neox", "vocab_size": 50_432, "hidden_size": 4096, "num_hidden_layers": 32}
        | {"num_attention_heads": 32, "intermediate_size": 16_384},
        6_857_302_016,
    ),
}


def config(folder: Path, values: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return str(folder)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_counts_the_parameters_of_published_models(name, tmp_path):
    pytest.importorskip("transformers")
    values, parameters = PUBLISHED[name]

    found = find_model(config(tmp_path, values))

    assert found.parameters == parameters
    assert "Transformers" in found.source


def test_the_dtype_of_a_config_is_that_of_its_weights(tmp_path):
    pytest.importorskip("transformers")
    values = {
        "model_type": "opt",
        "vocab_size": 97,
        "hidden_size": 32,
        "ffn_dim": 64,
        "word_embed_proj_dim": 32,
    }

    found = find_model(
        config(tmp_path, {**values, "num_hidden_layers": 2, "num_attention_heads": 4, "dtype": "float16"})
    )

    assert "Transformers" in found.source
    assert found.parameters > 97 * 32
    assert found.dtype == "float16"


def test_a_function_is_built_on_the_meta_device_with_what_is_frozen_and_buffers(tmp_path, monkeypatch):
    (tmp_path / "plan_of_mine.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Sequential(\n"
        "        torch.nn.Embedding(10, 4), torch.nn.Linear(4, 1_000_000_000), torch.nn.BatchNorm1d(4)\n"
        "    )\n"
        "    model[0].weight.requires_grad_(False)\n"
        "    model.again = model[1]\n"
        "    assert model[1].weight.device.type == 'meta'\n"
        "    return model\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    found = find_model("plan_of_mine:build")

    assert found.parameters == 40 + 5_000_000_000 + 8  # the layer named twice counts once
    assert found.trained == found.parameters - 40
    assert found.buffer_bytes == 4 * 4 + 4 * 4 + 8
    assert found.tensors == 5


def test_weights_have_the_dtype_of_the_model_unless_another_is_given(tmp_path, monkeypatch, capsys):
    (tmp_path / "plan_of_dtypes.py").write_text(
        "import torch\n"
        "def build():\n"
        "    low = torch.nn.Linear(100, 100, bias=False, dtype=torch.bfloat16)\n"
        "    return torch.nn.Sequential(low, torch.nn.LayerNorm(100))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for arguments, size in (((), 2 * 10_000 + 4 * 200), (("--weights", "fp32"), 4 * 10_200)):
        assert main(["plan", "plan_of_dtypes:build", *arguments, "--json", "--keep", "{latest: 1}"]) == 0

        components = json.loads(capsys.readouterr().out)["components"]
        assert components[0]["size_bytes"] == size


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("70B", 70e9),
        ("1T", 1e12),
        ("1.5b", 1.5e9),
        ("124_439_808", 124_439_808),
        ("7e9", 7e9),
        ("350M", 350e6),
    ],
)
def test_numbers_of_parameters(text, count):
    assert find_model(text).parameters == count


def test_what_is_no_model_is_refused_with_what_would_be(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_plan.py").write_text(
        "def fails():\n    raise ValueError('no')\ndef number():\n    return 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pytest.importorskip("transformers")
    llama = {"model_type": "llama", "vocab_size": 10, "hidden_size": 4}
    for values, named in (
        ({"hidden_size": 4}, "model_type"),
        ({**llama, "num_attention_heads": -2}, "cannot build"),
        ({"model_type": "nothing known"}, "does not recognize"),
    ):
        with pytest.raises(ConfigError, match=named):
            find_model(config(tmp_path, values))
    for text, named in (
        ("", "is no model"),
        ("0", "is no model"),
        ("-7B", "is no model"),
        ("llama 70", "is no model"),
        ("no_such_module:build", "cannot import"),
        ("broken_plan:missing", "cannot import"),
        ("broken_plan:fails", "ValueError"),
        ("broken_plan:number", "not a torch.nn.Module"),
    ):
        with pytest.raises(ConfigError, match=named):
            find_model(text)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not a valid JSON file"):
        find_model(str(tmp_path))


def test_a_config_without_transformers_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)

    with pytest.raises(ConfigError, match=r"not installed: install it, or.*such as 7B"):
        find_model(config(tmp_path, {"model_type": "opt"}))
