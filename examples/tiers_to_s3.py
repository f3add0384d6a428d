"""Save to a disk, upload to a bucket in the background, resume from whatever is left.

    python examples/tiers_to_s3.py /nvme/run s3://bucket/run
    rm -r /nvme/run                                             # the machine is gone
    python examples/tiers_to_s3.py /nvme/run s3://bucket/run    # goes on from the bucket

Keys come from where AWS's own tools find them. Another service: `export AWS_ENDPOINT_URL=https://...`.
"""

from __future__ import annotations

import os
import sys

import torch

from ckpt_core import CheckpointManager, EverySteps, KeepEvery, KeepLatest, OnPreemption, TrainState, Upload


def main(root: str, bucket: str, steps: str = "100") -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrainState(model=model, optimizer=optimizer)
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    upload = Upload(
        bucket,
        every=2,  # of the saves
        keep=KeepLatest(3) | KeepEvery(1000),  # the disk has rules of its own
        storage_options={"endpoint_url": endpoint} if endpoint else {},
    )
    with CheckpointManager(
        root, save=EverySteps(10) | OnPreemption(), keep=KeepLatest(2), upload=upload
    ) as checkpoints:
        done = checkpoints.resume(state) or 0
        print(f"at step {done}")
        for step in range(done + 1, int(steps) + 1):
            model(torch.randn(8, 16)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpoints.maybe_save(step, state, total_steps=int(steps))
            if checkpoints.preempted:
                break
    # The end of `with` has waited for the uploads.


if __name__ == "__main__":
    main(*sys.argv[1:])
