"""The training of these benchmarks: a small MLP with AdamW on random data."""

from __future__ import annotations

from typing import final

import torch
from torch import nn

from ckpt_core import TrainState


@final
class Training:
    """One step after another; each takes a few milliseconds."""

    def __init__(self, width: int, layers: int = 4, batch: int = 64) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = TrainState(model=self.model, optimizer=self.optimizer)
        self._rows = torch.randn(batch, width)

    def step(self) -> None:
        """Take one step."""
        self.optimizer.zero_grad(set_to_none=True)
        self.model(self._rows).pow(2).mean().backward()
        self.optimizer.step()
