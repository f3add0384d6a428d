"""Evaluate checkpoints in another process while a training saves them; export the best in the end.

    python examples/evaluate.py                                     # both, on this machine
    python examples/evaluate.py evaluate s3://bucket/run 0 40       # the evaluator alone, anywhere

The training keeps the best by a number that it never computes.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

from ckpt_core import CheckpointManager, EverySteps, KeepBest, KeepLatest, TrainState, annotate, export, watch


def evaluate(root: str, done: int, steps: int) -> None:
    model, inputs = make_model(), torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    for checkpoint in watch(root, after=done, each=True, poll=0.5, timeout=60):
        with CheckpointManager(root) as checkpoints:
            checkpoints.load(TrainState(model=model), step=checkpoint.step, items=["model"])
        with torch.no_grad():
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
        annotate(checkpoint.path, {"val_loss": loss.item()})
        print(f"evaluated step {checkpoint.step}: val_loss {loss.item():.4f}", flush=True)
        if checkpoint.step == steps:
            break


def train(root: str = "runs/evaluated", steps: str = "40") -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    state, best = TrainState(model=model, optimizer=optimizer), KeepBest("val_loss")
    # What is to be evaluated must stay until then.
    with CheckpointManager(root, save=EverySteps(10), keep=best | KeepLatest(4)) as checkpoints:
        done = checkpoints.resume(state) or 0
        print(f"at step {done}", flush=True)
        words = [sys.executable, __file__, "evaluate", root, str(done), steps]
        evaluator = subprocess.Popen(words) if done < int(steps) else None
        for step in range(done + 1, int(steps) + 1):
            inputs = torch.randn(32, 8)
            loss = nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            checkpoints.maybe_save(step, state, total_steps=int(steps))
        if evaluator is not None:
            evaluator.wait()
        checkpoints.prune()
        history = checkpoints.checkpoints()
        for each in history:
            print(f"kept step {each.step}: {dict(each.metrics)}")
        (step,) = best.keep(history, 0)
    place = f"{root}-exported/step-{step}"
    if not Path(place).exists():
        print(f"exported to {export(root, place, step=step).url}")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["evaluate"]:
        evaluate(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        train(*sys.argv[1:])
