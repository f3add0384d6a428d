"""Make the checkpoints of DeepSpeed that the tests read: `deepspeed.tar.xz`.

DeepSpeed is too heavy for a development environment. Once, in one of its own:

    pip install torch==2.13.0 deepspeed==0.19.8 safetensors    # DS_BUILD_OPS=0
    python tests/unit/sources/make_deepspeed.py

Each directory holds what two ranks on gloo saved after three steps, and `expected.safetensors`, what
DeepSpeed's own tools make of it: `model.NAME` (of the live module), `master.NAME` (by `zero_to_fp32`, or by
`ds_to_universal` where that refuses), `exp_avg.NAME` and `exp_avg_sq.NAME` (by `ds_to_universal`, whose
directory is beside it). With round-robin gradients the latter exchanges parameters of one size: it names
them in another order than they lie.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CASES = {
    "stage0-fp32": {"zero_optimization": {"stage": 0}},
    "stage1-bf16": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}},
    "stage1-bf16-fp32-accumulation": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    },
    "stage2-fp32": {"zero_optimization": {"stage": 2}},
    "stage2-fp32-round-robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}},
    "stage2-fp32-elastic": {"zero_optimization": {"stage": 2, "elastic_checkpoint": True}},
    "stage3-bf16": {
        "zero_optimization": {"stage": 3, "sub_group_size": 40, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": True},
    },
}
STEPS = 3


def net():
    import torch
    from torch import nn

    class Net(nn.Module):
        """An embedding tied to the head, a buffer, and a frozen parameter."""

        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 5)
            self.inner = nn.Linear(5, 5)
            self.norm = nn.LayerNorm(5)
            self.head = nn.Linear(5, 7, bias=False)
            self.head.weight = self.embedding.weight
            self.frozen = nn.Parameter(torch.arange(5.0) / 3, requires_grad=False)
            self.register_buffer("counts", torch.arange(3))

        def forward(self, tokens):
            self.counts += 1
            hidden = self.norm(self.inner(self.embedding(tokens) + self.frozen))
            return self.head(hidden).float().logsumexp(-1).mean()

    torch.manual_seed(1)
    return Net()


def train(name: str, place: str) -> None:
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    random.seed(0)
    model = net()
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[
            {"params": decayed, "weight_decay": 0.1},
            {"params": others, "weight_decay": 0.0, "lr": 3e-3},
        ],
        config={
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            **CASES[name],
        },
    )
    generator = torch.Generator().manual_seed(engine.global_rank)
    for _ in range(STEPS):
        loss = engine(torch.randint(7, (2,), generator=generator))
        engine.backward(loss)
        engine.step()
    engine.save_checkpoint(place, client_state={"seen": 12, "note": "hello"})
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled="stage3" in name):
        if engine.global_rank == 0:
            state = {k: v.detach().clone() for k, v in model.state_dict().items()}
            torch.save(state, f"{place}/live.pt")
    torch.distributed.barrier()


def expected(place: Path) -> dict:
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = {f"model.{name}": value.clone() for name, value in torch.load(place / "live.pt").items()}
    trained = {name for name in net().state_dict() if name not in {"counts", "frozen", "head.weight"}}
    if "stage0" in place.name:
        return found
    if "round-robin" not in place.name and "elastic" not in place.name:
        universal = place.with_name(f"{place.name}-universal")
        tag = (place / "latest").read_text()
        subprocess.run(
            [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", place / tag,
             "--output_folder", universal / f"{tag}_universal", "--inject_missing_state",
             "--num_extract_workers", "1", "--num_merge_workers", "1"],
            check=True,
        )  # fmt: skip
        for file in sorted((universal / f"{tag}_universal" / "zero").rglob("*.pt")):
            content = torch.load(file, weights_only=False)
            if file.parent.name in trained and file.stem != "step":
                value = content["param"] if isinstance(content, dict) else content
                kind = file.stem.replace("fp32", "master")
                found[f"{kind}.{file.parent.name}"] = value.reshape(
                    found[f"model.{file.parent.name}"].shape
                ).clone()
    if "accumulation" not in place.name:
        masters = get_fp32_state_dict_from_zero_checkpoint(str(place))
        found |= {f"master.{name}": masters[name].clone() for name in trained}
    return found


def pack(folder: Path, out: Path) -> None:
    with tarfile.open(out, "w:xz") as archive:
        for file in sorted(each for each in folder.rglob("*") if each.is_file()):
            entry = archive.gettarinfo(file, arcname=str(file.relative_to(folder)))
            entry.uid = entry.gid = entry.mtime = 0
            entry.uname = entry.gname = ""
            with file.open("rb") as stream:
                archive.addfile(entry, stream)


def main() -> None:
    from safetensors.torch import save_file

    out = Path(__file__).with_name("deepspeed.tar.xz")
    with tempfile.TemporaryDirectory() as folder:
        for name in CASES:
            place = Path(folder, name)
            place.mkdir()
            command = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=2",
                __file__,
                name,
                place,
            ]
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            values = expected(place)
            (place / "live.pt").unlink()
            for script in place.glob("zero_to*.py"):
                script.unlink()
            save_file(values, place / "expected.safetensors")
        if len(sys.argv) > 1:
            shutil.copytree(folder, sys.argv[1], dirs_exist_ok=True)
        pack(Path(folder), out)
    print(json.dumps({"bytes": out.stat().st_size}))


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(sys.argv[1], sys.argv[2])
    else:
        main()
