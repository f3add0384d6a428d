"""litgpt's pretraining of a tiny model: Fabric, checkpoints under litgpt's own names. Two lines of ours."""

from __future__ import annotations

from pathlib import Path

import litgpt.pretrain as pretraining
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data.base import DataModule
from torch.utils.data import DataLoader

from tests.outside.probe import OURS, RESUME


class Tokens(DataModule):
    """Random tokens, always the same ones."""

    def connect(
        self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None
    ) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = torch.randint(0, 64, (16, (max_seq_length or 16) + 1), generator=generator)
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self.rows, batch_size=self.batch_size, shuffle=True)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(self.rows[:4], batch_size=self.batch_size)  # type: ignore[arg-type]


stock_main = pretraining.main


def main(fabric: object, **arguments: object) -> None:
    if OURS:
        from lightning_ckpt import setup_fabric

        setup_fabric(fabric, arguments["out_dir"])  # type: ignore[arg-type]
    stock_main(fabric=fabric, **arguments)  # type: ignore[arg-type]


pretraining.main = main
# It parses the command line of litgpt's own program again, which this is not.
pretraining.save_hyperparameters = lambda *_, **__: None
pretraining.setup(
    "tiny",
    model_config=Config(n_layer=1, n_embd=16, n_head=2, block_size=16, vocab_size=64, padded_vocab_size=64),
    out_dir=Path("out"),
    precision="32-true",
    resume="auto" if RESUME else False,
    data=Tokens(),
    train=TrainArgs(
        save_interval=3,
        global_batch_size=4,
        micro_batch_size=2,
        max_tokens=2 * 16 * 2 * 12,
        max_norm=1.0,
        min_lr=1e-4,
        lr_warmup_steps=2,
        log_interval=1,
    ),
    eval=EvalArgs(interval=5, max_iters=2, initial_validation=False, final_validation=False),
    logger_name="csv",
    devices=1,
    seed=17 if RESUME else 42,
)
