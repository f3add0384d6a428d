"""The metrics of a Trainer, as plain numbers."""

from __future__ import annotations

from typing import Any

import torch


def metrics_of(trainer: Any) -> dict[str, float]:
    """The newest value known of every scalar metric."""
    values = sorted(trainer.callback_metrics.items())
    return {name: float(value) for name, value in values if torch.as_tensor(value).numel() == 1}
