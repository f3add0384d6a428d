"""A script that knows nothing of this package; the launcher gives it checkpoints.

    export CKPT_SUITE_SAVE='{every_steps: 20, on_preemption: true}' CKPT_SUITE_KEEP='{latest: 2}'
    accelerate launch -m accelerate_ckpt examples/unchanged_script.py

Run it, stop it with Ctrl-C, run it again. Without `-m accelerate_ckpt` it is stock Accelerate.
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed


def main(root: str = "runs/unchanged", epochs: str = "3") -> None:
    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True)
    accelerator = Accelerator(project_config=project)
    set_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    samples = torch.utils.data.TensorDataset(torch.randn(512, 16))
    data = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    position = Position()
    accelerator.register_for_checkpointing(position)
    accelerator.load_state()  # none yet: starts afresh, where stock Accelerate raises
    accelerator.print(f"at step {position.step}")
    for epoch in range(position.step // len(data), int(epochs)):
        done = position.step % len(data)
        data.set_epoch(epoch)
        for (batch,) in accelerator.skip_first_batches(data, done) if done else data:
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()
            position.step += 1
            accelerator.save_state()  # at every step: written when it is due
    accelerator.end_training()


class Position:
    """What the script itself has to remember."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


if __name__ == "__main__":
    main(*sys.argv[1:])
