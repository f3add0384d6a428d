"""Let DeepSpeed load what our sink wrote, and keep what it then has: `universal_read.json`.

In an environment with torch 2.13.0, deepspeed 0.19.8 and safetensors, from a checkout whose own environment
has written PLACE by `write_sample` of `tests/unit/convert/test_trainers.py`:

    python tests/unit/convert/read_universal.py PLACE

Two ranks of ZeRO 2 load it, so that masters and moments are divided anew.
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
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    from tests.unit.sources.make_deepspeed import net

    deepspeed.init_distributed("gloo")
    model = net()
    groups = [
        [p for p in model.parameters() if p.requires_grad and (p.ndim > 1) is wide] for wide in (True, False)
    ]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[{"params": each, "lr": 0.5, "weight_decay": 0.5} for each in groups],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_optimization": {"stage": 2},
            "bf16": {"enabled": True},
            "checkpoint": {"load_universal": True},
        },
    )
    path, _ = engine.load_checkpoint(place)
    assert path is not None
    found = {"global_steps": engine.global_steps, "scheduler": engine.lr_scheduler.state_dict()}
    found["groups"] = [[each["lr"], each["weight_decay"]] for each in engine.optimizer.optimizer.param_groups]
    found["step"] = [float(s["step"]) for s in engine.optimizer.optimizer.state.values()]
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            full = {"master": safe_get_full_fp32_param(parameter)}
            full |= {
                kind: safe_get_full_optimizer_state(parameter, kind) for kind in ("exp_avg", "exp_avg_sq")
            }
            for kind, tensor in full.items():
                found[f"{kind}.{name}"] = hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
            found[f"model.{name}"] = hashlib.sha256(
                parameter.detach().contiguous().view(torch.uint8).numpy().tobytes()
            ).hexdigest()
    if engine.global_rank == 0:
        print("FOUND" + json.dumps(found))


def main() -> None:
    place = sys.argv[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", __file__, place]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = json.loads(output[output.index("FOUND") + 5 :].splitlines()[0])
    files = sorted(each for each in Path(place).rglob("*") if each.is_file())
    found["files"] = {
        str(each.relative_to(place)): hashlib.sha256(each.read_bytes()).hexdigest() for each in files
    }
    Path(__file__).with_name("universal_read.json").write_text(
        json.dumps(found, indent=1, sort_keys=True) + "\n"
    )


if __name__ == "__main__":
    load(sys.argv[1]) if "RANK" in os.environ else main()
