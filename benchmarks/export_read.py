"""`python -m benchmarks.export_read`: a folder of Hugging Face weights into a model that FSDP2 has sharded.

One Llama, written by `save_pretrained`. In turns, in the same processes, after a round that is not counted,
until the sharded model holds its weights in float32 on every rank:

- ours: the model on the meta device, `fully_shard`, `to_empty`, `CheckpointManager.load(source=...)`;
- stock: `from_pretrained` on every rank, then `fully_shard`.

Seconds are those of the slowest rank; those of processors, which other programs change less, are of all
ranks together. Read is what all ranks together have asked the kernel for, in parts of the folder; what stock
reads through a mapping is not counted.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks.export import layers_of, model_of
from benchmarks.loading.pages import Traffic, bring_to
from benchmarks.timing import Spread
from ckpt_core import CheckpointManager, TrainState
from tests.kit.ranks import run_ranks


def main(arguments: Sequence[str]) -> int:
    """Measure, and print a line for each number of ranks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_read", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="of weights")
    parser.add_argument("--shard-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--pages", choices=["warm", "cold"], default="warm", help="of the folder")
    parser.add_argument("--bf16", action="store_true", help="the folder is in bf16, the model in float32")
    parser.add_argument("--root", type=Path, default=None, help="where to write; a temporary directory")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="bench-", dir=given.root) as folder:
        order = {
            "folder": folder,
            "layers": layers_of(given.gib),
            "shard": given.shard_mib << 20,
            "pages": given.pages,
            "stored": torch.bfloat16 if given.bf16 else torch.float32,
        }
        size = run_ranks(prepare, 1, order, timeout_seconds=600)[0]
        for ranks in map(int, given.ranks.split(",")):
            of_ranks = run_ranks(measured, ranks, order, given.rounds, timeout_seconds=600)
            wall, cpu, read = ({name: list[float]() for name in CONTENDERS} for _ in range(3))
            for name in CONTENDERS:
                for taken in zip(*(each[name] for each in of_ranks), strict=True):
                    wall[name].append(max(each[0] for each in taken))
                    cpu[name].append(sum(each[1] for each in taken))
                    read[name].append(sum(each[2] for each in taken) / size)
                spent = f"{Spread.of(wall[name])} s, of processors {Spread.of(cpu[name])} s"
                print(f"{ranks} ranks, {name}: {spent}, read {Spread.of(read[name])}")
            for what, found in (("seconds", wall), ("of processors", cpu)):
                ratios = (stock / ours for ours, stock in zip(*found.values(), strict=True))
                print(f"{ranks} ranks, stock / ours, {what}: {Spread.of(ratios)}")
    return 0


def prepare(order: Mapping[str, Any]) -> int:
    """Write the folder; return its size in bytes."""
    model = model_of(order).to(order["stored"])
    model.save_pretrained(Path(order["folder"]) / "hf", max_shard_size=order["shard"])
    return sum(path.stat().st_size for path in (Path(order["folder"]) / "hf").iterdir())


def measured(order: Mapping[str, Any], rounds: int) -> dict[str, list[tuple[float, float, int]]]:
    """Run the contenders on this rank; return seconds, those of processors, and bytes asked for."""
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in CONTENDERS}
    for number in range(rounds + 1):
        for name, contender in CONTENDERS.items():
            act = contender(order)
            torch.distributed.barrier()
            if not torch.distributed.get_rank():
                bring_to(order["pages"], (Path(order["folder"]) / "hf").glob("*.safetensors"))
            torch.distributed.barrier()
            asked, cpu, began = Traffic.now(), time.process_time(), time.perf_counter()
            model = act()
            taken = time.perf_counter() - began, time.process_time() - cpu
            now = Traffic.now()
            del model
            if number:
                found[name].append((*taken, now.asked - asked.asked if now and asked else 0))
    return found


def ours(order: Mapping[str, Any]) -> Callable[[], object]:
    """Return a load of each rank's own bytes."""
    folder = Path(order["folder"])

    def load() -> object:
        with torch.device("meta"):
            model = model_of(order)
        model = _sharded(model)
        model.to_empty(device="cpu")
        with CheckpointManager(folder / "run") as manager:
            manager.load(TrainState(model=model), source=folder / "hf", items=["model"], cast=True)
        return model

    return load


def stock(order: Mapping[str, Any]) -> Callable[[], object]:
    """Return `from_pretrained`, and shards of what it has read."""
    from transformers import LlamaForCausalLM

    def load() -> object:
        folder = Path(order["folder"]) / "hf"
        return _sharded(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32))

    return load


def _sharded(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


CONTENDERS = {"ours": ours, "stock": stock}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
