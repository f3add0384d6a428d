"""Let Megatron-Core load what our sink wrote, and keep what it then has: `torch_dist_read.json`.

In an environment with torch 2.13.0, megatron-core 0.16.1 and safetensors, from a checkout whose own
environment has written PLACE by `write_sample` of `tests/unit/convert/test_trainers.py`:

    python tests/unit/convert/read_torch_dist.py PLACE

Two ranks load it, tensor-parallel, although one process wrote it whole. The digest of `.metadata` is then
that of its content, by `digest_of` of the same tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))


def load(place: str) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

    from tests.unit.sources.make_megatron import TENSORS, whole

    torch.cuda.current_device = lambda: "cpu"
    dist.init_process_group("gloo")
    rank, state = dist.get_rank(), {}
    for key, tensor in whole().items():
        dim = TENSORS[key.removeprefix("optimizer.state.").split(".", 1)[1] if "state" in key else key][1]
        local = torch.zeros_like(tensor if dim is None else tensor.chunk(2, dim)[rank]).contiguous()
        name = f"chained_0.{key}" if "state" in key else key
        offsets = [] if dim is None else [(dim, rank, 2)]
        replica = rank if dim is None else 0
        state[name] = ShardedTensor.from_rank_offsets(name, local, *offsets, replica_id=replica)
    state["rng_state"] = ShardedObject("rng_state", None, (2,), (rank,))
    loaded = dist_checkpointing.load(state, place)
    found = {"iteration": loaded["iteration"], "rng_state": [loaded["rng_state"]]}
    for name, tensor in whole().items():
        dim = TENSORS[name.removeprefix("optimizer.state.").split(".", 1)[1] if "state" in name else name][1]
        key = f"chained_0.{name}" if "state" in name else name
        parts = [torch.empty_like(loaded[key]) for _ in range(2)]
        dist.all_gather(parts, loaded[key].contiguous())
        joined = parts[0] if dim is None else torch.cat(parts, dim)
        assert joined.shape == tensor.shape
        found[key] = hashlib.sha256(joined.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    if rank == 0:
        print("FOUND" + json.dumps(found))


def main() -> None:
    place = sys.argv[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__, place]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output[output.index("FOUND") + 5 :].splitlines()[0])
    files = sorted(each for each in Path(place).rglob("*") if each.is_file())
    found["files"] = {
        str(each.relative_to(place)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files
    }
    Path(__file__).with_name("torch_dist_read.json").write_text(
        json.dumps(found, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    load(sys.argv[1]) if "RANK" in os.environ else main()
