"""PyTorch's own FSDP2 example on two ranks, edited by a user: a manager in place of its checkpointer."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from tests.outside.probe import OURS, RESUME

SOURCE = Path(os.environ["OUTSIDE_SOURCES"]) / "pytorch-examples" / "distributed" / "FSDP2"

# Its own `reset_parameters` leaves the layers as `to_empty` made them: whatever lay in memory.
STOCK = {
    "        model.reset_parameters()\n": (
        "        [each.reset_parameters() for each in model.modules() if hasattr(each, 'reset_parameters')]\n"
    ),
    "    if not verify_min_gpu_count(min_gpus=_min_gpu_count):": "    if False:",
    "n_layers=10": "n_layers=2",
    "init_process_group(backend=backend, device_id=device)": "init_process_group(backend='gloo')",
}
OURS_EDITS = {
    "    for _ in range(10):\n": (
        "    from ckpt_core import CheckpointManager, EverySteps, TrainState\n"
        "    state = TrainState(model=model, optimizer=optim)\n"
        "    checkpoints = CheckpointManager('runs', save=EverySteps(3))\n"
        "    start = checkpoints.resume(state) or 0\n"
        "    for step in range(start + 1, 11):\n"
    ),
    "        optim.zero_grad()\n": "        optim.zero_grad()\n        checkpoints.maybe_save(step, state)\n",
    "    checkpointer.save(model, optim)\n": "    checkpoints.close()\n",
}

text = (SOURCE / "example.py").read_text(encoding="utf-8")
edits = STOCK | (OURS_EDITS if OURS else {"    checkpointer.save(model, optim)\n": ""})
for place, line in edits.items():
    assert place in text, place
    text = text.replace(place, line)
if RESUME:
    text = text.replace("torch.manual_seed(0)", "torch.manual_seed(9)")
script = Path(f"example_edited_{os.environ['RANK']}.py")
script.write_text(text, encoding="utf-8")
sys.path.insert(0, str(SOURCE))
sys.argv = [str(script)]
runpy.run_path(str(script), run_name="__main__")
