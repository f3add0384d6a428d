"""Ranks of a host that are given different options: one error, in the words of that host, on every rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from ckpt_core.errors import ConfigError
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed

LIGHTNING: list[list[dict[str, Any]]] = [
    [{"save": {"every_steps": 2}}, {"save": {"every_seconds": 60}}],
    [{"contents": "all"}, {}],
    [{}, {"save_last": False}],
]
ACCELERATE: list[list[dict[str, Any]]] = [
    [{"keep": {"latest": 1}}, {"keep": {"latest": 2}}],
    [{"gradients": True}, {}],
    [{"stock_files": True}, {"stock_files": False}],
]


def fitted(root: str, **options: Any) -> None:
    import lightning
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_ckpt.lightning import ShardedCheckpoint

    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", devices=2, strategy="ddp", logger=False, limit_val_batches=0,
        enable_progress_bar=False, enable_model_summary=False, plugins=[TorchElasticEnvironment()],
        callbacks=[ShardedCheckpoint(root, deadline_seconds=30, **options)],
    )  # fmt: skip
    trainer.fit(BoringModel())


def saved(root: str, **options: Any) -> None:
    from accelerate import Accelerator

    from accelerate_ckpt import enable

    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    enable(accelerator, root=root, deadline_seconds=30, **options)
    accelerator.save_state()


def refused(path: str) -> list[str]:
    warnings.simplefilter("ignore")
    rank, found = distributed.get_rank(), []
    for train, cases in ((fitted, LIGHTNING), (saved, ACCELERATE)):
        for given in cases:
            with pytest.raises(ConfigError) as caught:
                train(f"{path}/run", **given[rank])
            assert caught.value.__context__ is None
            found.append(str(caught.value))
    return found


def test_the_error_comes_once_and_names_the_argument_of_the_host(tmp_path: Path) -> None:
    first, second = run_ranks(refused, 2, str(tmp_path), timeout_seconds=150)
    assert first == second
    expected = [
        "save is EverySteps(n=2, offset=0) on rank 0, EverySeconds(seconds=60) on rank 1",
        "contents is 'all' on rank 0, None on rank 1",
        "save_last is True on rank 0, False on rank 1",
        "keep is KeepLatest(n=1) on rank 0, KeepLatest(n=2) on rank 1",
        "gradients is True on rank 0, False on rank 1",
        "stock_files is True on rank 0, False on rank 1",
    ]
    for message, difference in zip(first, expected, strict=True):
        assert f": {difference}. " in message
    assert not (tmp_path / "run").exists()
