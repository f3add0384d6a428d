"""Nothing but configuration: `python -m examples.lightning_cli fit --config examples/lightning_cli.yaml`."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.cli import ArgsType, LightningCLI
from torchdata.stateful_dataloader import StatefulDataLoader

from examples.lightning_train import Classifier


class Noise(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> StatefulDataLoader[torch.Tensor]:
        return StatefulDataLoader(torch.randn(512, 16), batch_size=self.batch_size, shuffle=True)


def main(args: ArgsType = None) -> LightningCLI:
    # A resume runs the same configuration again.
    return LightningCLI(Classifier, Noise, args=args, save_config_kwargs={"overwrite": True})


if __name__ == "__main__":
    main()
