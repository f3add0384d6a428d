"""Where the script makes the optimizer steps, gradients that wait for one are part of a checkpoint."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import lightning as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt_core import CheckpointManager, EverySteps
from lightning_ckpt import ShardedCheckpoint
from tests.kit.ranks import run_ranks

# Lightning warns of small data sets and few workers.
pytestmark = pytest.mark.filterwarnings("ignore")

STEPS = 6


class ByHand(pl.LightningModule):
    """Two networks, of which the second steps with every second or third batch."""

    def __init__(self, script: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        self.automatic_optimization = False
        self.script = getattr(self, script)
        self.waiting: dict[int, bool] = {}

    def training_step(self, batch: Any, index: int) -> None:
        self.script(batch[0], index)
        self.waiting[self.trainer.global_step] = any(
            each.grad is not None and bool(each.grad.any()) for each in self.second.parameters()
        )

    def gan(self, x: torch.Tensor, index: int, *, every: int = 2, to_none: bool = True) -> None:
        one, other = self.optimizers()
        one.zero_grad()
        self.manual_backward(self.second(self.first(x)).mean())
        one.step()
        self.manual_backward(self.second(torch.dropout(self.first(x).detach(), 0.5, True)).pow(2).mean())
        if index % every == every - 1:
            other.step()
            other.zero_grad(set_to_none=to_none)

    def zeros(self, x: torch.Tensor, index: int) -> None:
        self.gan(x, index, to_none=False)

    def thirds(self, x: torch.Tensor, index: int) -> None:
        self.gan(x, index, every=3)

    def garbage(self, x: torch.Tensor, index: int) -> None:
        """Steps, zeroes, and then goes through the stepped network once more for the other."""
        one, other = self.optimizers()
        self.manual_backward(self.second(self.first(x).detach()).pow(2).mean())
        other.step()
        other.zero_grad()
        one.zero_grad()
        self.manual_backward(self.second(self.first(x)).mean())
        one.step()

    def plain(self, x: torch.Tensor, index: int) -> None:
        """Zeroes right before use, as most scripts do: what is left over has been used."""
        for optimizer, network in zip(
            self.optimizers(), (self.first, nn.Sequential(self.second)), strict=True
        ):
            optimizer.zero_grad()
            self.manual_backward(network(x).pow(2).mean())
            optimizer.step()

    def unsynchronised(self, x: torch.Tensor, index: int) -> None:
        """Holds gradients that each rank has by itself until the last batch of a window."""
        one, other = self.optimizers()
        one.zero_grad()
        self.manual_backward(self.first(x).pow(2).mean())
        one.step()
        waits = index % 2 == 0
        # One process has nothing to block.
        block = getattr(self.trainer.strategy, "block_backward_sync", contextlib.nullcontext)
        with block() if waits else contextlib.nullcontext():
            self.manual_backward(self.second(x).pow(2).mean())
        if not waits:
            other.step()
            other.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(self.first.parameters(), lr=0.1),
            torch.optim.Adam(self.second.parameters(), lr=0.1),
        ]


def train(
    root: Path, script: str, *, devices: int = 1, ckpt_path: Any = None, seed: int = 1, **options: Any
) -> Any:
    torch.manual_seed(seed)
    module = ByHand(script)
    data = DataLoader(
        TensorDataset(torch.randn(24, 2, generator=torch.Generator().manual_seed(3))), batch_size=2
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp_find_unused_parameters_true" if devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
        max_epochs=1,
        limit_train_batches=STEPS,
        callbacks=[ShardedCheckpoint(root / "run", **{"save_last": False, **options})],
    )
    trainer.fit(module, data, ckpt_path=ckpt_path)
    return module


def entries(root: Path, name: str) -> set[str]:
    """The parameters whose gradients a checkpoint has."""
    saved = CheckpointManager(root).load({}, name=name, strict=False)
    return {".".join(map(str, path[2:])) for path in saved.sharded.get("", {}) if path[0] == "gradients"}


def assert_exact(root: Path, script: str, **options: Any) -> Any:
    full = train(root, script, save=EverySteps(1), **options)
    for path in sorted((root / "run").glob("step-*"))[:-1]:
        resumed = train(root / f"from-{path.name}", script, ckpt_path=path, seed=2, **options)
        for name, value in full.state_dict().items():
            # A reducer of DDP that begins anew may add up a rank's own gradients in another order.
            exact = {"rtol": 0.0, "atol": 1e-7 if script == "unsynchronised" else 0.0}
            assert torch.allclose(value, resumed.state_dict()[name], **exact), (path.name, name)
    return full


@pytest.mark.parametrize("script", ["gan", "zeros", "thirds", "garbage", "plain"])
def test_gradients_that_wait_for_a_step_of_the_script_are_resumed(tmp_path, caplog, script):
    full = assert_exact(tmp_path, script)

    assert not [each for each in caplog.records if each.levelno >= logging.WARNING]
    for path in (tmp_path / "run").glob("step-*"):
        held = entries(tmp_path / "run", path.name)
        waits = full.waiting[int(path.name[5:])] and script != "plain"
        assert held == ({"second.weight", "second.bias"} if waits else set()), path.name


def exact_on_a_rank(root: Path, *scripts: str) -> None:
    for script in scripts:
        assert_exact(root / script, script, devices=2)


@pytest.mark.distributed
def test_gradients_that_ranks_share_or_have_by_themselves_are_resumed(tmp_path):
    run_ranks(
        exact_on_a_rank,
        2,
        tmp_path,
        "gan",
        "zeros",
        "unsynchronised",
        process_group=False,
        timeout_seconds=240,
    )

    kept = CheckpointManager(tmp_path / "unsynchronised" / "run")
    assert kept.load({}, step=1, strict=False).shared["gradients"] == {"ranks": 2}
    shared = CheckpointManager(tmp_path / "gan" / "run").load({}, step=1, strict=False).shared
    assert shared["gradients"] == {"ranks": 0}
    train(tmp_path, "unsynchronised", ckpt_path=tmp_path / "unsynchronised" / "run" / "step-000000001")
