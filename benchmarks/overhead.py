"""`python -m benchmarks.overhead`: what a step costs while no save is due, in each host, beside stock.

A tiny model, one process, stock and ours in turns within every round. Of each training the median of its
steps counts, in CPU seconds, so that other programs of the machine count less. Both ask at every step
whether to save, and never do: stock by its own checkpointing (`ModelCheckpoint`, `save_steps`), if any.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from lightning.pytorch import LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset
from transformers import PrinterCallback, Trainer, TrainingArguments

import accelerate_ckpt
from benchmarks.cadence import journal
from benchmarks.timing import Spread
from ckpt_core import EverySteps
from lightning_ckpt import ShardedCheckpoint

NEVER = EverySteps(10**9)
_BATCH = 4

Training = Callable[[Path, int], Sequence[float]]
"""Trains some steps with a directory of its own; returns the CPU seconds at which each began."""


def main(arguments: Sequence[str]) -> int:
    """Measure, print a line for each host, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument(
        "--journal", action="store_true", help="instead: what measuring, events and history cost"
    )
    given = parser.parse_args(arguments)
    if given.journal:
        return 0 if journal.measure(Path(tempfile.gettempdir()))["passed"] else 1
    _keep_hosts_quiet()
    found: dict[str, dict[str, Any]] = {}
    for host, (stock, ours) in TRAININGS.items():
        costs = measure(stock, ours, steps=given.steps, rounds=given.rounds)
        more = Spread.of(b - a for a, b in zip(costs["stock"], costs["ours"], strict=True))
        spreads = {name: Spread.of(values) for name, values in costs.items()} | {"more": more}
        found[host] = {name: each.as_json() for name, each in spreads.items() if each is not None}
        told = ", ".join(f"{name} {_microseconds(each)}" for name, each in spreads.items())
        print(f"{host:12} {told} us per step (median [min, max])")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))
    return 0


def measure(stock: Training, ours: Training, *, steps: int, rounds: int) -> Mapping[str, list[float]]:
    """Return the CPU seconds of the median step of every training; the first round is not counted."""
    costs: dict[str, list[float]] = {"stock": [], "ours": []}
    for number in range(rounds + 1):
        for name, train in (("stock", stock), ("ours", ours)):
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                torch.manual_seed(0)
                began = train(Path(folder), steps)
            if number:
                costs[name].append(statistics.median(b - a for a, b in pairwise(began)))
    return costs


def _microseconds(spread: Spread | None) -> str:
    if spread is None:
        return "unknown"
    return f"{spread.median * 1e6:.0f} [{spread.low * 1e6:.0f}, {spread.high * 1e6:.0f}]"


def _keep_hosts_quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


class Rows(Dataset[Any]):
    """Rows of eight numbers, one batch for every step of a training."""

    def __init__(self, steps: int) -> None:
        self.rows = torch.randn(steps * _BATCH, 8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return {"rows": self.rows[index]}


class Module(LightningModule):
    """A linear layer."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.steps = steps
        self.began: list[float] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        """Return the loss."""
        self.began.append(time.process_time())
        return self.layer(batch["rows"]).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader[Any]:
        """Make the loader of one epoch."""
        return DataLoader(Rows(self.steps), batch_size=_BATCH)


def _lightning(folder: Path, steps: int, *, ours: bool) -> Sequence[float]:
    stock = ModelCheckpoint(folder / "run", every_n_train_steps=10**9, save_on_train_epoch_end=False)
    callback = ShardedCheckpoint(folder / "run", save=NEVER, save_last=False) if ours else stock
    trainer = LightningTrainer(
        accelerator="cpu", devices=1, max_steps=steps, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback], default_root_dir=folder,
    )  # fmt: skip
    module = Module(steps)
    trainer.fit(module)
    return module.began


def _accelerate(folder: Path, steps: int, *, ours: bool) -> Sequence[float]:
    accelerator = Accelerator(cpu=True)
    if ours:
        accelerate_ckpt.enable(accelerator, folder / "run", save=NEVER)
    model = nn.Linear(8, 1)
    loader = DataLoader(Rows(steps), batch_size=_BATCH)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    began = []
    for batch in loader:
        began.append(time.process_time())
        accelerator.backward(model(batch["rows"]).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if ours:
            accelerator.save_state()
    accelerator.end_training()
    return began


class Regression(nn.Module):
    """A linear layer with a loss, as a Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)
        self.began: list[float] = []

    def forward(self, rows: torch.Tensor) -> Any:
        """Return the loss."""
        self.began.append(time.process_time())
        return {"loss": self.layer(rows).pow(2).mean()}


def _trainer(folder: Path, steps: int, *, ours: bool) -> Sequence[float]:
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=_BATCH, use_cpu=True,
        save_strategy="steps", save_steps=10**9, logging_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    model = Regression()
    trainer = Trainer(model, arguments, train_dataset=Rows(steps))
    trainer.remove_callback(PrinterCallback)
    if ours:
        accelerate_ckpt.enable_trainer(trainer, save=NEVER)
    trainer.train()
    return model.began


def _pair(train: Callable[..., float]) -> tuple[Training, Training]:
    return (
        lambda folder, steps: train(folder, steps, ours=False),
        lambda folder, steps: train(folder, steps, ours=True),
    )


TRAININGS: Mapping[str, tuple[Training, Training]] = {
    "Lightning": _pair(_lightning),
    "Accelerate": _pair(_accelerate),
    "Trainer": _pair(_trainer),
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
