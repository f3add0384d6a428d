"""`python -m benchmarks.trainable`: bytes and stalls of LoRA checkpoints, beside the stock Trainer's.

The same base, adapters and Trainer; each contender trains alone, in fresh processes. Bytes are of the whole
checkpoint directory. A stall is the time of the Trainer's `_save_checkpoint`, on the slowest rank; that of
our first save includes the checksums of the base.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from tests.kit.ranks import run_ranks

LAYOUTS: Final = {"single": 1, "ddp": 2, "fsdp2": 2}
CONTENDERS: Final[Mapping[str, dict[str, Any] | None]] = {
    "stock": None,
    "ckpt-suite": {},
    'contents="all"': {"contents": "all", "stock_files": False},
}
_TARGETS: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
_LENGTH: Final = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the base and its adapters."""

    hidden: int = 1024
    layers: int = 3
    vocabulary: int = 4000
    rank: int = 8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The saves of one contender in one layout."""

    bytes: int
    first_stall_s: float
    stall_s: float
    parameters: int
    trained: int


def main(arguments: Sequence[str]) -> int:
    """Measure, print a line for each, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainable", description=__doc__)
    parser.add_argument("--hidden", type=int, default=Shape.hidden)
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--vocabulary", type=int, default=Shape.vocabulary)
    parser.add_argument("--rank", type=int, default=Shape.rank, help="of the adapters")
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--only", default=None, help="contenders beside stock")
    parser.add_argument("--root", type=Path, default=None, help="where to save; a temporary directory")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    shape = Shape(hidden=given.hidden, layers=given.layers, vocabulary=given.vocabulary, rank=given.rank)
    found: dict[str, dict[str, Measured]] = {}
    for layout in given.layouts.split(","):
        with tempfile.TemporaryDirectory(prefix="bench-", dir=given.root) as folder:
            found[layout] = measure(Path(folder), layout, shape, saves=given.saves, only=given.only)
        _print(layout, found[layout])
    if given.json is not None:
        plain = {layout: {name: asdict(each) for name, each in of.items()} for layout, of in found.items()}
        given.json.write_text(json.dumps(plain, indent=1))
    return 0


def measure(
    folder: Path, layout: str, shape: Shape, *, saves: int, only: str | None = None
) -> dict[str, Measured]:
    """Train once with each contender; stock is always one."""
    measured: dict[str, Measured] = {}
    for number, (name, options) in enumerate(CONTENDERS.items()):
        if only is not None and name not in {"stock", *only.split(",")}:
            continue
        root = folder / str(number)
        of_ranks = run_ranks(
            partial(_train, saves=saves, options=options), LAYOUTS[layout], str(root), layout, shape,
            timeout_seconds=600.0, process_group=LAYOUTS[layout] > 1,
        )  # fmt: skip
        stalls = [max(of_save) for of_save in zip(*(each[0] for each in of_ranks), strict=True)]
        parameters, trained = of_ranks[0][1:]
        last = root / f"checkpoint-{saves}"
        measured[name] = Measured(
            bytes=sum(path.stat().st_size for path in last.rglob("*") if path.is_file()),
            first_stall_s=stalls[0],
            stall_s=median(stalls[1:] or stalls),
            parameters=parameters,
            trained=trained,
        )
    return measured


def _print(layout: str, measured: Mapping[str, Measured]) -> None:
    stock = measured["stock"]
    print(f"{layout}: {stock.parameters:,} parameters, {stock.trained:,} of them trained")
    for name, each in measured.items():
        print(
            f"  {name:15} {each.bytes:12,} bytes, {each.bytes / stock.bytes:6.3f} times stock's; stall "
            f"{each.stall_s:.3f} s, first {each.first_stall_s:.3f} s"
        )


def _train(
    root: str, layout: str, shape: Shape, *, saves: int, options: dict[str, Any] | None
) -> tuple[list[float], int, int]:
    """Train with a save after each step; return the stalls, and how much is trained."""
    os.environ.update(ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.hidden * 11 // 4,
        num_hidden_layers=shape.layers,
        num_attention_heads=8,
    )
    lora = LoraConfig(r=shape.rank, target_modules=_TARGETS, task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)
    sizes = [each.numel() for each in model.parameters()]
    trained = [each.numel() for each in model.parameters() if each.requires_grad]
    arguments = TrainingArguments(
        output_dir=root, max_steps=saves, save_steps=1, per_device_train_batch_size=1, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    data = [{"input_ids": torch.arange(_LENGTH), "labels": torch.arange(_LENGTH)}] * (2 * saves)
    trainer: Any = Trainer(model=model, args=arguments, train_dataset=data)  # type: ignore[arg-type]  # a list will do
    if layout == "fsdp2":
        _choose_fsdp2(trainer)
    if options is not None:
        import accelerate_ckpt

        accelerate_ckpt.enable_trainer(trainer, **options)
    stalls: list[float] = []
    trainer._save_checkpoint = _timed(trainer._save_checkpoint, stalls)
    trainer.train()
    return stalls, sum(sizes), sum(trained)


def _timed(save: Callable[..., None], stalls: list[float]) -> Callable[..., None]:
    def timed(*args: Any, **kwargs: Any) -> None:
        begun = time.perf_counter()
        save(*args, **kwargs)
        stalls.append(time.perf_counter() - begun)

    return timed


def _choose_fsdp2(trainer: Any) -> None:
    """Do what the Trainer does for `fsdp=…` on a GPU, which it refuses on the CPU."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    trainer.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, state_dict_type="SHARDED_STATE_DICT"
    )
    trainer.accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    trainer.is_fsdp_enabled = True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
