"""Lose the machine, and go on on the next one.

    until python examples/spot_instance.py s3://bucket/run; do [ $? = 75 ] || break; done

The cloud sends SIGTERM. The step under way is saved, and the script ends with 75: not finished, start it
again. Here it plays the cloud itself, once in 60 steps. See also examples/clusters.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, OnPreemption, TrainState

LIFE = 60


def main(root: str = "runs/spot", steps: str = "100") -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    save = EverySteps(500) | OnPreemption()
    with CheckpointManager(root, save=save, keep=KeepLatest(2)) as checkpoints:
        done = checkpoints.resume(state) or 0
        print(f"at step {done}")
        for step in range(done + 1, int(steps) + 1):
            model(torch.randn(8, 16)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == done + LIFE:
                os.kill(os.getpid(), signal.SIGTERM)
            checkpoints.maybe_save(step, state, total_steps=int(steps))
            if checkpoints.preempted:
                print(f"preempted at step {step}")
                break
    sys.exit(75 if checkpoints.preempted else 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
