"""A tiny language model with a tokenizer, made on this machine, and trl's scripts on it."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.outside.probe import OURS, RESUME

WORDS = "the cat cow fox sees dogs three no dog 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23"


def make_model(folder: Path) -> Path:
    """Write a Llama of some thousand parameters and a tokenizer of words, as `from_pretrained` reads them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if (folder / "config.json").exists():
        return folder
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(vocabulary), max_position_embeddings=64, eos_token_id=1, pad_token_id=0, **sizes
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _newest(folder: Path) -> str:
    return str(max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2])))


def run_trl(script: str, rows: Sequence[Mapping[str, Any]], options: Sequence[str]) -> None:
    """Run a script of trl as its user would from a shell, with ours by the launcher."""
    data = Path("data")
    data.mkdir(exist_ok=True)
    (data / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    package = find_spec("trl")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "scripts" / f"{script}.py"
    arguments = [
        *("--model_name_or_path", str(make_model(Path("model").absolute()))),
        *("--dataset_name", str(data.absolute()), "--output_dir", "out", "--report_to", "none"),
        *("--max_steps", "12", "--save_steps", "3", "--logging_steps", "1", "--learning_rate", "1e-2"),
        *("--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "2", "--use_cpu"),
        *("--bf16", "False", "--gradient_checkpointing", "False", "--seed", "23" if RESUME else "42"),
        *(["--resume_from_checkpoint", _newest(Path("out"))] if RESUME else []),
        *options,
    ]
    if OURS:
        from accelerate_ckpt._runner import main

        main([str(path), *arguments])
    else:
        sys.argv = [str(path), *arguments]
        runpy.run_path(str(path), run_name="__main__")
