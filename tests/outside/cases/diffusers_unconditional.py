"""diffusers' own `train_unconditional.py`, unchanged, by the launcher, with its EMA model and hooks."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from tests.outside.probe import OURS, RESUME

SCRIPT = (
    Path(os.environ["OUTSIDE_SOURCES"])
    / "diffusers/examples/unconditional_image_generation/train_unconditional.py"
)

images = Path("images")
images.mkdir(exist_ok=True)
pixels = np.random.default_rng(2)
for number in range(16):
    image = Path(f"{os.environ.get('RANK', '0')}.png")
    Image.fromarray(pixels.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(image)
    image.replace(images / f"{number}.png")
config = Path(f"config_{os.environ.get('RANK', '0')}.json")
sizes = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": [8, 16], "norm_num_groups": 4}
blocks = {
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
}
config.write_text(
    json.dumps({"_class_name": "UNet2DModel", "in_channels": 3, "out_channels": 3, **sizes, **blocks}),
    encoding="utf-8",
)
arguments = [
    *("--train_data_dir", str(images), "--model_config_name_or_path", str(config), "--resolution", "16"),
    *("--center_crop", "--train_batch_size", "2", "--num_epochs", "2", "--checkpointing_steps", "3"),
    *("--lr_warmup_steps", "2", "--use_ema", "--output_dir", "out", "--dataloader_num_workers", "0"),
    *("--save_images_epochs", "100", "--save_model_epochs", "100", "--logger", "tensorboard"),
    *(["--resume_from_checkpoint", "latest"] if RESUME else []),
]
if OURS:
    from accelerate_ckpt._runner import main

    main([str(SCRIPT), *arguments])
else:
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")
