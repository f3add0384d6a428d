"""PyTorch's own ImageNet `main.py`, with its augmentations in two workers: a plain loop by epochs."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from tests.outside.probe import OURS, RESUME

SOURCE = Path(os.environ["OUTSIDE_SOURCES"]) / "pytorch-examples" / "imagenet" / "main.py"

EDITS = {
    "    for epoch in range(args.start_epoch, args.epochs):\n": (
        "    global checkpoints, state, step\n"
        "    from ckpt_core import CheckpointManager, EverySteps, TrainState\n"
        "    state = TrainState(\n"
        "        model=model, optimizer=optimizer, scheduler=scheduler, dataloader=train_loader\n"
        "    )\n"
        "    checkpoints = CheckpointManager('runs', save=EverySteps(4))\n"
        "    step = checkpoints.resume(state) or 0\n"
        "    args.start_epoch = step // len(train_loader)\n"
        "    for epoch in range(args.start_epoch, args.epochs):\n"
    ),
    "        optimizer.step()\n": (
        "        optimizer.step()\n"
        "        global step\n"
        "        step += 1\n"
        "        checkpoints.maybe_save(step, state)\n"
    ),
    "\ndef train(": "    checkpoints.close()\n\ndef train(",
}

pixels = np.random.default_rng(2)
for split, kind, number in ((s, k, n) for s in ("train", "val") for k in ("cat", "dog") for n in range(6)):
    folder = Path("images", split, kind)
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")

text = SOURCE.read_text(encoding="utf-8")
if OURS:
    for place, line in EDITS.items():
        assert place in text, place
        text = text.replace(place, line)
script = Path("main_edited.py")
script.write_text(text, encoding="utf-8")
sys.argv = [str(script), "images", "--arch", "resnet18", "--batch-size", "2", "--epochs", "2", "--lr", "0.01"]
sys.argv += ["--workers", "2", "--no-accel", "--seed", "9" if RESUME else "1"]
runpy.run_path(str(script), run_name="__main__")
