"""neuralforecast's NHITS, which puts its trainer's arguments, callbacks among them, into its `hparams`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS

from tests.outside.probe import OURS, RESUME

callbacks: dict[str, Any] = {}
if OURS:
    import pytorch_lightning

    from ckpt_core import EverySteps
    from lightning_ckpt.pytorch_lightning import ShardedCheckpoint

    callbacks = {"callbacks": [ShardedCheckpoint("runs", save=EverySteps(3), allow_pickle=True)]}
    stock_fit = pytorch_lightning.Trainer.fit

    def fit(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return stock_fit(trainer, *args, **kwargs, ckpt_path="last")

    pytorch_lightning.Trainer.fit = fit
series = pd.DataFrame(
    {
        "unique_id": np.repeat(["a", "b"], 60),
        "ds": np.tile(pd.date_range("2024-01-01", periods=60, freq="D"), 2),
        "y": np.sin(np.arange(120) / 4.0),
    }
)
model = NHITS(
    h=4,
    input_size=8,
    max_steps=14,
    mlp_units=[[8, 8]] * 3,
    random_seed=23 if RESUME else 1,
    logger=False,
    enable_progress_bar=False,
    accelerator="cpu",
    devices=1,
    enable_checkpointing=OURS,
    **callbacks,
)
NeuralForecast(models=[model], freq="D").fit(series)
