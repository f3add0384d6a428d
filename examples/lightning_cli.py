"""Train with LightningCLI; `lightning_cli.yaml` alone configures checkpoints."""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.cli import ArgsType, LightningCLI
from torchdata.stateful_dataloader import StatefulDataLoader

EXAMPLE = ["fit", "--config", str(Path(__file__).with_suffix(".yaml"))]


class Regression(lightning.LightningModule):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = torch.nn.Linear(width, 1)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = (self.net(batch).squeeze() - batch.sum(1)).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Noise(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> StatefulDataLoader[torch.Tensor]:
        return StatefulDataLoader(torch.randn(512, 16), batch_size=self.batch_size, shuffle=True)


def main(args: ArgsType = None) -> LightningCLI:
    # A resume runs the same configuration again.
    return LightningCLI(Regression, Noise, args=args, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main(sys.argv[1:] or EXAMPLE)
