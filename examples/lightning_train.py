"""Train with Lightning: run it, stop it with Ctrl-C, run it again."""

from __future__ import annotations

import sys

import lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from ckpt_core import EverySeconds, EverySteps, KeepBest, KeepLatest, OnPreemption
from lightning_ckpt import ShardedCheckpoint


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch), batch[:, :4].argmax(1))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(root: str, max_steps: int) -> None:
    lightning.seed_everything(0)
    checkpoint = ShardedCheckpoint(
        root,
        save=EverySteps(20) | EverySeconds(300) | OnPreemption(),
        keep=KeepLatest(2) | KeepBest("loss"),
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        callbacks=[checkpoint],
        logger=False,
        enable_model_summary=False,
    )
    data = StatefulDataLoader(torch.randn(512, 16), batch_size=8, shuffle=True)  # saves its position
    trainer.fit(Classifier(), data, ckpt_path="last")
    print(f"last: {checkpoint.last_model_path}, best: {checkpoint.best_model_path}")


if __name__ == "__main__":
    main(
        sys.argv[1] if len(sys.argv) > 1 else "runs/lightning", int(sys.argv[2]) if len(sys.argv) > 2 else 100
    )
