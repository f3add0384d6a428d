"""Let the run find how often to save, and report what its checkpoints cost.

python examples/optimal_report.py runs/optimal
ckpt report runs/optimal --html report.html      # the same with a picture
"""

from __future__ import annotations

import sys

import torch

from ckpt_core import AtSteps, CheckpointManager, KeepLatest, OnPreemption, Optimal, TrainState
from ckpt_core.cli import main as report


def main(root: str = "runs/optimal", steps: str = "400") -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    # As if it failed every ten seconds, so that something happens here; without a number it is learned.
    save = Optimal(mtbf="10s") | AtSteps([int(steps)]) | OnPreemption()
    with CheckpointManager(root, save=save, keep=KeepLatest(2)) as checkpoints:
        done = checkpoints.resume(state) or 0
        print(f"at step {done}", flush=True)
        for step in range(done + 1, int(steps) + 1):
            model(torch.randn(32, 256)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.maybe_save(step, state, total_steps=int(steps))
            if checkpoints.preempted:
                break
    report(["report", root])  # as on the command line


if __name__ == "__main__":
    main(*sys.argv[1:])
