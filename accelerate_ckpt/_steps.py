"""Counts real optimizer steps: neither micro-batches of a window nor steps that a scaler skipped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch

from ckpt_core.state import unwrap_optimizer


@final
class StepCounter:
    """Steps of the optimizer that has made the most of them, over all runs. Main thread only."""

    def __init__(self) -> None:
        self._before = 0
        self._steps: dict[int, int] = {}
        self._handles: list[Any] = []

    @property
    def step(self) -> int:
        """Optimizer steps done, those before the last resume included."""
        return self._before + max(self._steps.values(), default=0)

    def count(self, optimizer: Any) -> None:
        """Count the steps of an optimizer from now on; harmless when repeated."""
        # The wrapper has no step hooks of its own, and its `step` is called for micro-batches too.
        inner = unwrap_optimizer(optimizer)
        if id(inner) in self._steps:
            return
        self._steps[id(inner)] = 0
        self._handles.append(inner.register_step_post_hook(self._note))

    def restore(self, step: int) -> None:
        """Go on counting from `step`."""
        self._before = step
        self._steps = dict.fromkeys(self._steps, 0)

    def release(self) -> None:
        """Stop counting."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _note(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if id(optimizer) in self._steps:
            self._steps[id(optimizer)] += 1


def steps_made(optimizers: Sequence[Any]) -> int:
    """How many steps the optimizers' own state tells of; 0 if it does not tell."""
    steps = (
        state["step"] for optimizer in optimizers for state in optimizer.state.values() if "step" in state
    )
    return max(map(int, steps), default=0)
