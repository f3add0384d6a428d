"""nanoGPT's `train.py`, edited as its user would: a plain loop; a rank's batch fetched ahead is an item.

It is `nanogpt_ddp`, too: its own DDP, on processors.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import numpy as np

from tests.outside.probe import OURS, RESUME

SOURCE = Path(os.environ["OUTSIDE_SOURCES"]) / "nanoGPT"

STOCK = {
    "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n": "    device = 'cpu'\n",
    "DDP(model, device_ids=[ddp_local_rank])": "DDP(model)",
}
EDITS = {
    "X, Y = get_batch('train') # fetch the very first batch\n": (
        "X, Y = get_batch('train')\n"
        "from ckpt_core import CheckpointManager, EverySteps, TrainState\n"
        "class Ahead:\n"
        "    def state_dict(self):\n"
        "        return {'X': X, 'Y': Y}\n"
        "    def load_state_dict(self, saved):\n"
        "        global X, Y\n"
        "        X, Y = saved['X'], saved['Y']\n"
        "state = TrainState(model=model, optimizer=optimizer, **{f'ahead_{seed_offset}': Ahead()})\n"
        "checkpoints = CheckpointManager('runs', save=EverySteps(3))\n"
        "iter_num = checkpoints.resume(state) or 0\n"
    ),
    "    local_iter_num += 1\n": ("    local_iter_num += 1\n    checkpoints.maybe_save(iter_num, state)\n"),
    "if ddp:\n    destroy_process_group()": "checkpoints.close()\nif ddp:\n    destroy_process_group()",
}

rank = os.environ.get("RANK", "0")
data = Path("data")
data.mkdir(exist_ok=True)
tokens = np.random.default_rng(5).integers(0, 50, 4000).astype(np.uint16)
for split in ("train", "val"):
    tokens.tofile(data / f"{split}.{rank}")
    (data / f"{split}.{rank}").replace(data / f"{split}.bin")

text = (SOURCE / "train.py").read_text(encoding="utf-8")
for place, line in (STOCK | EDITS if OURS else STOCK).items():
    assert place in text, place
    text = text.replace(place, line)
if RESUME:
    text = text.replace("torch.manual_seed(1337", "torch.manual_seed(7331")
text = text.replace("os.path.join('data', dataset)", "'data'").replace(
    "configurator.py", str(SOURCE / "configurator.py")
)
script = Path(f"train_edited_{rank}.py")
script.write_text(text, encoding="utf-8")
sys.path.insert(0, str(SOURCE))
small = {"batch_size": 2, "block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16, "dropout": 0.1}
rates = {"warmup_iters": 2, "lr_decay_iters": 12, "max_iters": 11, "eval_interval": 1000}
options = small | rates | {"device": "cpu", "dtype": "float32", "compile": False, "backend": "gloo"}
options |= {"gradient_accumulation_steps": 2}
sys.argv = [str(script), *(f"--{name}={value}" for name, value in options.items())]
runpy.run_path(str(script), run_name="__main__")
