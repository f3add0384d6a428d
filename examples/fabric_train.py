"""Train with Fabric: run it, stop it with Ctrl-C, run it again."""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric

from ckpt_core import EverySteps, KeepLatest, OnPreemption
from lightning_ckpt import setup_fabric


def main(root: str = "runs/fabric", epochs: str = "3") -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    fabric.seed_everything(0)
    save = EverySteps(20) | OnPreemption()
    checkpoints = setup_fabric(fabric, root, save=save, keep=KeepLatest(2))
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = torch.utils.data.DataLoader(torch.randn(256, 16), batch_size=8, shuffle=True)
    loader = fabric.setup_dataloaders(data)
    # The loader goes on in the middle of its epoch.
    state = {"model": model, "optimizer": optimizer, "loader": loader, "epoch": 0, "step": 0}
    fabric.load("last", state)  # the newest that verifies; none yet: starts afresh
    fabric.print(f"at step {state['step']}")

    while state["epoch"] < int(epochs) and not checkpoints.preempted:
        for batch in loader:
            loss = model(batch).pow(2).mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            checkpoints.maybe_save(state["step"], state)
            if checkpoints.preempted:
                break
        else:
            state["epoch"] += 1
            fabric.print(f"epoch {state['epoch']} ends at step {state['step']}, loss {loss.item():.4f}")
    checkpoints.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
