"""Progress of a training: optimizer steps, and positions of the data loaders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, final
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator

from accelerate_ckpt.data import Loaders
from ckpt_core.state import unwrap_optimizer


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of one accelerator's training. Main thread only."""

    steps: StepCounter
    loaders: Loaders

    @classmethod
    def of(cls, accelerator: Accelerator) -> Self:
        """Track what is prepared already."""
        loaders = Loaders(accelerator)
        progress = cls(steps=StepCounter(loaders.note_step), loaders=loaders)
        for optimizer in accelerator._optimizers:
            progress.steps.count(optimizer)
        return progress

    def prepared_optimizer(self, optimizer: Any) -> Any:
        """Track an optimizer that `prepare` has just wrapped; return it."""
        self.steps.count(optimizer)
        return optimizer

    def release(self) -> None:
        """Stop tracking everything, and forget the progress."""
        self.loaders.release()
        self.steps.release()


@final
class StepCounter:
    """Counts steps of the optimizer that has made most of them. Main thread only.

    An optimizer that joins later begins where the others are. A new training with optimizers of its own
    counts from the first step.

    Args:
        note_step: called after every step of every optimizer.

    Attributes:
        step: optimizer steps done, those before the last resume included.
    """

    def __init__(self, note_step: Callable[[], None] = lambda: None) -> None:
        self.step = 0
        self._note_step = note_step
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, list[int]] = WeakKeyDictionary()
        self._handles: list[Any] = []

    def count(self, optimizer: Any) -> None:
        """Count the steps of an optimizer from now on; idempotent."""
        # The wrapper has no step hooks of its own, and its `step` is called for micro-batches too.
        inner = unwrap_optimizer(optimizer)
        if inner in self._steps:
            return
        made = self._steps[inner] = [self.step]

        def note(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            made[0] += 1
            self.step = max(self.step, made[0])
            self._note_step()

        self._handles.append(inner.register_step_post_hook(note))

    def restore(self, step: int) -> None:
        """Continue counting from `step`."""
        self.step = step
        for made in self._steps.values():
            made[0] = step

    def release(self) -> None:
        """Forget every optimizer, and all steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._steps.clear()
        self.step = 0


def steps_made(optimizers: Sequence[Any]) -> int:
    """Return the number of steps in the optimizers' own state; 0 if there is none."""
    steps = (
        state["step"] for optimizer in optimizers for state in optimizer.state.values() if "step" in state
    )
    return max(map(int, steps), default=0)
