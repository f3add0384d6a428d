"""Counts real optimizer steps: neither micro-batches of a window nor steps that a scaler skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from ckpt_core.state import unwrap_optimizer


@final
class StepCounter:
    """Steps of the optimizer that has made the most of them. Main thread only.

    An optimizer that joins later begins where the others are: where a training begins anew with optimizers of
    its own, every step counts from the first on.

    Attributes:
        step: optimizer steps done, those before the last resume included.
    """

    def __init__(self) -> None:
        self.step = 0
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
        self._handles: list[Any] = []

    def count(self, optimizer: Any) -> None:
        """Count the steps of an optimizer from now on; harmless when repeated."""
        # The wrapper has no step hooks of its own, and its `step` is called for micro-batches too.
        inner = unwrap_optimizer(optimizer)
        if inner in self._steps:
            return
        self._steps[inner] = self.step
        self._handles.append(inner.register_step_post_hook(self._note))

    def restore(self, step: int) -> None:
        """Go on counting from `step`."""
        self.step = step
        for optimizer in self._steps:
            self._steps[optimizer] = step

    def release(self) -> None:
        """Forget every optimizer, and all steps."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._steps.clear()
        self.step = 0

    def _note(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if optimizer in self._steps:
            self._steps[optimizer] += 1
            self.step = max(self.step, self._steps[optimizer])


def steps_made(optimizers: Sequence[Any]) -> int:
    """How many steps the optimizers' own state tells of; 0 if it does not tell."""
    steps = (
        state["step"] for optimizer in optimizers for state in optimizer.state.values() if "step" in state
    )
    return max(map(int, steps), default=0)
