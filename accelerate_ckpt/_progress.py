"""What is followed between saves: optimizer steps, and positions in the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self, final

from accelerate import Accelerator

from accelerate_ckpt._loaders import Loaders
from accelerate_ckpt._steps import StepCounter


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far the training of one accelerator has come. Main thread only."""

    steps: StepCounter
    loaders: Loaders

    @classmethod
    def of(cls, accelerator: Accelerator) -> Self:
        """Follow what is prepared already."""
        progress = cls(steps=StepCounter(), loaders=Loaders(accelerator))
        for optimizer in accelerator._optimizers:
            progress.steps.count(optimizer)
        return progress

    def prepared_optimizer(self, optimizer: Any) -> Any:
        """Follow an optimizer that `prepare` has just wrapped; returns it."""
        self.steps.count(optimizer)
        return optimizer

    def prepared_loader(self, loader: Any) -> Any:
        """Follow a loader that `prepare` has just made; returns it."""
        self.loaders.track_prepared(loader)
        return loader

    def release(self) -> None:
        """Let go of everything, and forget how far it had come."""
        self.loaders.release()
        self.steps.release()
