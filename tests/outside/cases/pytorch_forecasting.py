"""pytorch-forecasting's temporal fusion transformer with clipping and a plateau schedule, by the callback."""

from __future__ import annotations

import lightning.pytorch as pl
import numpy as np
import pandas as pd
from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.metrics import QuantileLoss

from tests.outside.probe import OURS, RESUME

series = pd.DataFrame(
    {
        "time": np.tile(np.arange(40), 2),
        "value": np.sin(np.arange(80) / 3.0) + 0.1 * np.random.default_rng(1).normal(size=80),
        "group": np.repeat(["a", "b"], 40),
    }
)
known = {"time_idx": "time", "target": "value", "group_ids": ["group"]}
training = TimeSeriesDataSet(
    series[series.time < 34],
    **known,
    max_encoder_length=8,
    max_prediction_length=2,
    time_varying_known_reals=["time"],
    time_varying_unknown_reals=["value"],
)
validation = TimeSeriesDataSet.from_dataset(training, series, predict=True, stop_randomization=True)
pl.seed_everything(23 if RESUME else 42)
model = TemporalFusionTransformer.from_dataset(
    training,
    learning_rate=0.01,
    hidden_size=8,
    attention_head_size=1,
    dropout=0.1,
    loss=QuantileLoss(),
    optimizer="adam",
    reduce_on_plateau_patience=1,
)
callbacks = []
if OURS:
    from ckpt_core import EverySteps
    from lightning_ckpt import ShardedCheckpoint

    callbacks = [ShardedCheckpoint("runs", save=EverySteps(3), allow_pickle=True)]
trainer = pl.Trainer(
    accelerator="cpu",
    devices=1,
    max_epochs=2,
    limit_train_batches=7,
    gradient_clip_val=0.1,
    logger=False,
    enable_progress_bar=False,
    enable_checkpointing=False if not OURS else None,
    callbacks=callbacks,
)
trainer.fit(
    model,
    training.to_dataloader(train=True, batch_size=8, num_workers=0),
    validation.to_dataloader(train=False, batch_size=8, num_workers=0),
    ckpt_path="last" if OURS else None,
)
