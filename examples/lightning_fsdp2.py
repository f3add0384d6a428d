"""Train with Lightning and FSDP2: run it, stop it with Ctrl-C, run it again, on another number of ranks, too.

python examples/lightning_fsdp2.py runs/lightning 100 2      # 100 steps on 2 ranks
"""

from __future__ import annotations

import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

from ckpt_core import EverySeconds, EverySteps, KeepBest, KeepLatest, OnPreemption
from lightning_ckpt import ShardedCheckpoint


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        layers = [torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 4)]
        self.net = torch.nn.Sequential(*layers)

    def configure_model(self) -> None:
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = torch.nn.functional.cross_entropy(self.net(batch), batch[:, :4].argmax(1))
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(root: str = "runs/lightning", max_steps: str = "100", ranks: str = "2") -> None:
    lightning.seed_everything(0)
    checkpoint = ShardedCheckpoint(
        root,
        save=EverySteps(20) | EverySeconds(300) | OnPreemption(),
        keep=KeepLatest(2) | KeepBest("loss"),
    )
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(ranks),
        strategy=ModelParallelStrategy(data_parallel_size=int(ranks), tensor_parallel_size=1),
        max_steps=int(max_steps),
        callbacks=[checkpoint],
        logger=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.randn(512, 16), batch_size=8, shuffle=True)
    trainer.fit(Classifier(), data, ckpt_path="last")
    trainer.print(f"last: {checkpoint.last_model_path}, best: {checkpoint.best_model_path}")


if __name__ == "__main__":
    main(*sys.argv[1:])
