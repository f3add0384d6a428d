"""Hosts are the same with and without the package, for those who were given nothing of ours."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import importlib, sys
from importlib.metadata import distribution
import torch
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
from transformers import PretrainedConfig, Trainer, TrainingArguments
import accelerate, accelerate.checkpointing, lightning.fabric, torch.distributed.fsdp, torch.utils.data
import torch.distributed.checkpoint

ROOTS = (
    "lightning", "accelerate", "transformers", "torch.utils", "torch.distributed", "torch.optim", "torch.nn",
)
OURS = {"ckpt_core", "lightning_ckpt", "accelerate_ckpt"}

def state():
    # Every class and function of the hosts, and all that a class holds, by where it is.
    found = {}
    for name, module in list(sys.modules.items()):
        if module is None or not any(f"{name}.".startswith(f"{root}.") for root in ROOTS):
            continue
        for key, value in list(vars(module).items()):
            if not callable(value):
                continue  # a submodule that was imported since, or what a host keeps for itself
            found[f"{name}:{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}:{key}.{inner}": id(each) for inner, each in list(vars(value).items())}
    return found

def changed(before):
    after = state()
    return sorted(key for key in before if after.get(key) != before[key] and "_abc" not in key)

def train():
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", max_steps=1, enable_checkpointing=False, **quiet).fit(BoringModel())
    accelerate.Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
    Trainer(torch.nn.Linear(2, 2), TrainingArguments("out", use_cpu=True, report_to=[]))

distribution("ckpt-suite")
train()
print("imported by hosts:", sorted(OURS & {name.partition(".")[0] for name in sys.modules}))
before = state()
assert len(before) > 10000, len(before)
for name in (
    "ckpt_core", "ckpt_core.manager", "ckpt_core.cli", "lightning_ckpt", "lightning_ckpt.lightning",
    "accelerate_ckpt",
):
    importlib.import_module(name)
print("changed by an import:", changed(before))
train()
print("changed by a training:", changed(before))
for owner, name in ((pl, "Trainer"), (pl.Trainer, "fit"), (torch.utils.data.DataLoader, "__iter__")):
    kept = vars(owner)[name]
    setattr(owner, name, lambda: None)
    assert changed(before), "a canary: this looks at nothing"
    setattr(owner, name, kept)
"""


@pytest.mark.slow
def test_hosts_are_as_they_were_whatever_of_ours_is_imported(tmp_path):
    """Those of `pytorch_lightning` are in `test_lightning_unasked.py`."""
    for host in ("lightning", "accelerate", "transformers"):
        pytest.importorskip(host)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        check=False, capture_output=True, text=True, timeout=200, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if ": [" in line]
    assert told == ["imported by hosts: []", "changed by an import: []", "changed by a training: []"]
