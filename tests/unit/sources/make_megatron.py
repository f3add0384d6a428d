"""Make the checkpoints of Megatron-Core that the tests read: `megatron.tar.xz`.

Megatron-Core is too heavy for a development environment. Once, in one of its own, where OLD is a directory
with 0.12.1, of the releases that wrote flattened shards of optimizers (0.16 refuses them):

    pip install torch==2.13.0 safetensors numpy packaging && pip install --no-deps megatron-core==0.16.1
    pip install --no-deps --target OLD megatron-core==0.12.1
    python tests/unit/sources/make_megatron.py OLD

Each directory holds what two ranks on gloo saved by `dist_checkpointing.save`, and `expected.safetensors`,
the whole tensors that they cut.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
from functools import partial
from pathlib import Path

TENSORS = {
    "embedding.word_embeddings.weight": ((8, 6), 0),
    "decoder.layers.mlp.linear_fc2.weight": ((6, 8), 1),
    "decoder.final_layernorm.weight": ((6,), None),
    "decoder.experts.weight": ((4, 3, 5), 0),
}
"""Name -> shape, and the dimension along which tensor-parallel ranks cut it."""


def whole() -> dict:
    import torch

    generator = torch.Generator().manual_seed(3)
    found = {name: torch.randn(shape, generator=generator).bfloat16() for name, (shape, _) in TENSORS.items()}
    for kind in ("fp32_param", "exp_avg", "exp_avg_sq"):
        for name, (shape, _) in TENSORS.items():
            found[f"optimizer.state.{kind}.{name}"] = torch.randn(shape, generator=generator)
    return found


def save(place: Path, tensor_parallel: int, *, flat: bool, chained: bool) -> None:
    import numpy
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    torch.cuda.synchronize, torch.cuda.current_device = (
        lambda *_: None,
        lambda: "cpu",
    )  # all that asks for a GPU
    if flat:  # 0.12 is older than numpy 2 and torch 2.7
        numpy.product = numpy.prod
        filesystem_async._write_item = partial(
            filesystem_async._write_item, serialization_format=SerializationFormat.TORCH_SAVE
        )
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tp_rank, dp_rank = rank % tensor_parallel, rank // tensor_parallel
    data_parallel = 2 // tensor_parallel
    state = {}
    for key, tensor in whole().items():
        dim = TENSORS[key.removeprefix("optimizer.state.").split(".", 1)[1] if "state" in key else key][1]
        cut = dim is not None and tensor_parallel > 1
        local = tensor.chunk(tensor_parallel, dim)[tp_rank].contiguous() if cut else tensor
        offsets = [(dim, tp_rank, tensor_parallel)] if cut else []
        replica = (0, 0 if cut else tp_rank, dp_rank)
        of_optimizer = "state" in key
        name = f"chained_0.{key}" if chained and of_optimizer else key
        if flat and of_optimizer:
            # As the distributed optimizer of 0.12 does: each data-parallel rank has a range of the local
            # shard, and its bounds are anywhere.
            bounds = [0, *(local.numel() * (i + 1) // data_parallel - 1 for i in range(data_parallel - 1))]
            bounds.append(local.numel())
            start, stop = bounds[dp_rank], bounds[dp_rank + 1]
            state[name] = ShardedTensor.from_rank_offsets_flat(
                name, local.flatten()[start:stop].clone(), tuple(local.shape), *offsets,
                flattened_range=slice(start, stop), replica_id=(0, 0 if cut else tp_rank, 0),
            )  # fmt: skip
        else:
            state[name] = ShardedTensor.from_rank_offsets(name, local.clone(), *offsets, replica_id=replica)
    state["rng_state"] = ShardedObject("rng_state", [{"seed": rank}], (2,), (rank,))
    state |= {
        "iteration": 7,
        "checkpoint_version": 3.0,
        "args": argparse.Namespace(lr=1e-3, hidden_size=6, tensor_model_parallel_size=tensor_parallel),
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 7},
    }
    place.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(state, str(place))
    dist.barrier()


CASES = {
    "tp1": (1, False, False),
    "tp2": (2, False, True),
    "old-tp1-flat": (1, True, False),
    "old-tp2-flat": (2, True, True),
}


def pack(folder: Path, out: Path) -> None:
    with tarfile.open(out, "w:xz") as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            entry = archive.gettarinfo(file, arcname=str(file.relative_to(folder)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            with file.open("rb") as stream:
                archive.addfile(entry, stream)


def main(old: str) -> None:
    from safetensors.torch import save_file

    out = Path(__file__).with_name("megatron.tar.xz")
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, flat, chained) in CASES.items():
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=2",
                __file__,
                name,
                folder,
            ]
            path = {"PYTHONPATH": old} if flat else {}
            subprocess.run(command, check=True, env={**os.environ, **path, "OMP_NUM_THREADS": "1"})
            values = {
                f"chained_0.{key}" if chained and "state" in key else key: value
                for key, value in whole().items()
            }
            save_file(values, Path(folder, name, "expected.safetensors"))
        if len(sys.argv) > 2:
            subprocess.run(["cp", "-r", f"{folder}/.", sys.argv[2]], check=True)
        pack(Path(folder), out)


if __name__ == "__main__":
    if "RANK" in os.environ:
        case, target = sys.argv[1:]
        tensor_parallel, is_flat, is_chained = CASES[case]
        save(Path(target, case), tensor_parallel, flat=is_flat, chained=is_chained)
    else:
        main(sys.argv[1])
