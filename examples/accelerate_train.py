"""Train with Accelerate: run it, stop it with Ctrl-C, run it again.

python examples/accelerate_train.py runs/accelerate                      # one process
accelerate launch examples/accelerate_train.py runs/accelerate           # as `accelerate config` says
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

import accelerate_ckpt
from ckpt_core import EverySeconds, EverySteps, OnPreemption


def main(root: str = "runs/accelerate", epochs: str = "3") -> None:
    # Stock settings: names `checkpoint_{n}` below `<root>/checkpoints`, and how many stay.
    project = ProjectConfiguration(project_dir=root, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=project)
    # The one new line: `save_state` may be called at every step, and saves when it is due.
    accelerate_ckpt.enable(accelerator, save=EverySteps(20) | EverySeconds(300) | OnPreemption())
    set_seed(0)

    layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    samples = torch.utils.data.TensorDataset(torch.randn(512, 16))
    data = torch.utils.data.DataLoader(samples, batch_size=8, shuffle=True)
    model, optimizer, scheduler, data = accelerator.prepare(model, optimizer, scheduler, data)

    accelerator.load_state()  # the newest that verifies; none yet: starts afresh
    done = accelerate_ckpt.checkpoints(accelerator).step
    accelerator.print(f"at step {done}")

    for epoch in range(done // len(data), int(epochs)):
        rest = accelerator.skip_first_batches(data, done % len(data)) if done % len(data) else data
        data.set_epoch(epoch)
        for (batch,) in rest:
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            done += 1
            accelerator.save_state()
        accelerator.print(f"epoch {epoch} ends at step {done}")
    accelerate_ckpt.checkpoints(accelerator).wait()
    newest = accelerate_ckpt.checkpoints(accelerator).latest()
    accelerator.print(f"newest: {newest.name if newest else 'none'}")
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
