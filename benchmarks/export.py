"""`python -m benchmarks.export`: a committed checkpoint as weights of Hugging Face, and what else does that.

One Llama in float32, saved by one process. In turns within every round, each in fresh processes, from a warm
page cache, durable at the end:

- ours: `ckpt_core.export` of the committed files, with the folder's configuration;
- bare: the same bytes read, their CRC-32 computed, and written by the writer that ours uses, a file for each
  shard: what no export can do without;
- gather: two ranks that hold the model as FSDP2 shards gather it on the first one, which calls
  `save_pretrained`. A training waits for that one.

Memory is the most that the process has held beyond what it held before, by the kernel's VmHWM.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.loading.pages import warm
from benchmarks.loading.peak import Memory
from benchmarks.others import fsync_tree
from benchmarks.timing import Spread
from ckpt_core import CheckpointManager, export
from ckpt_core.formats.checksums import crc32
from ckpt_core.reading import page_memory
from ckpt_core.storage import open_storage
from tests.kit.ranks import run_ranks

_PIECE = 16 << 20
_LAYER_BYTES = 4 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
_OUTER_BYTES = 4 * 2 * 32000 * 2048


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Seconds, and bytes of memory at most beyond those before."""

    seconds: float
    peak_bytes: int


def main(arguments: Sequence[str]) -> int:
    """Measure, print a line for each, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export", description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0, help="of weights")
    parser.add_argument("--shard-mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default=None, help="cast by ours; bare and gather do not")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--root", type=Path, default=None, help="where to write; a temporary directory")
    parser.add_argument("--json", type=Path, default=None)
    given = parser.parse_args(arguments)
    found: dict[str, list[Exported]] = {name: [] for name in given.only.split(",")}
    with tempfile.TemporaryDirectory(prefix="bench-", dir=given.root) as folder:
        order = {
            "folder": folder,
            "layers": layers_of(given.gib),
            "shard": given.shard_mib << 20,
            "dtype": given.dtype,
        }
        run_ranks(prepare, 1, order, timeout_seconds=600)
        for number in range(given.rounds + 1):
            for name, values in found.items():
                contender, ranks = CONTENDERS[name]
                taken = run_ranks(measured, ranks, contender, order, timeout_seconds=600)[0]
                shutil.rmtree(Path(folder) / "out", ignore_errors=True)
                if number:  # the first round is not counted
                    values.append(taken)
    for name, values in found.items():
        seconds = Spread.of(each.seconds for each in values)
        print(f"{name:8} {seconds} s, {max(each.peak_bytes for each in values) / 2**20:.0f} MiB at most")
    for name in found.keys() - {"ours"} if "ours" in found else ():
        pairs = zip(found["ours"], found[name], strict=True)
        print(f"ours / {name}: {Spread.of(ours.seconds / other.seconds for ours, other in pairs)}")
    if given.json is not None:
        plain = {name: [asdict(each) for each in values] for name, values in found.items()}
        given.json.write_text(json.dumps(plain, indent=1))
    return 0


def layers_of(gib: float) -> int:
    """Return how many layers make the model that large."""
    return max(1, round((gib * 2**30 - _OUTER_BYTES) / _LAYER_BYTES))


def model_of(order: Mapping[str, Any]) -> Any:
    """Build the model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=order["layers"],
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    return LlamaForCausalLM(config)


def prepare(order: Mapping[str, Any]) -> None:
    """Save the checkpoint, and the configuration beside it."""
    model = model_of(order)
    folder = Path(order["folder"])
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder / "like")
    with CheckpointManager(folder / "run") as manager:
        manager.save(1, {"model": model})


def measured(
    contender: Callable[[Mapping[str, Any]], Callable[[], object]], order: Mapping[str, Any]
) -> Exported:
    """Run one contender in this process."""
    from transformers import LlamaForCausalLM

    assert LlamaForCausalLM  # none pays for the import
    act = contender(order)
    warm((Path(order["folder"]) / "run/step-000000001").glob("*.distcp"))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, began = Memory.now(), time.perf_counter()
    act()
    seconds = time.perf_counter() - began
    return Exported(seconds=seconds, peak_bytes=Memory.now().highest - before.resident)


def ours(order: Mapping[str, Any]) -> Callable[[], object]:
    """Return an export."""
    folder = Path(order["folder"])
    given = {"like": folder / "like", "dtype": order["dtype"], "shard_bytes": order["shard"]}
    return lambda: export(folder / "run", folder / "out", **given)


def bare(order: Mapping[str, Any]) -> Callable[[], object]:
    """Return a copy of the same bytes, with their checksum."""
    storage = open_storage(order["folder"])

    def copy() -> None:
        with storage.open_ranges("run/step-000000001/__0_0.distcp") as reader:
            for place, start in enumerate(range(0, reader.size_bytes, order["shard"])):
                stop = min(reader.size_bytes, start + order["shard"])

                def pieces(start: int = start, stop: int = stop) -> Any:
                    for offset in range(start, stop, _PIECE):
                        piece = page_memory(_PIECE)[: stop - offset]
                        reader.read_into(offset, piece)
                        crc32(piece)
                        yield piece

                storage.write_pieces(f"out/{place}", pieces())

    return copy


def gather(order: Mapping[str, Any]) -> Callable[[], object]:
    """Return a gathering of shards, and `save_pretrained` by the first rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = model_of(order)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    torch.distributed.barrier()
    out = Path(order["folder"]) / "out"

    def save() -> None:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if torch.distributed.get_rank() == 0:
            model.save_pretrained(out, state_dict=state, max_shard_size=order["shard"])
            fsync_tree(out)
        torch.distributed.barrier()

    return save


CONTENDERS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Callable[[], object]], int]] = {
    "ours": (ours, 1),
    "bare": (bare, 1),
    "gather": (gather, 2),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
