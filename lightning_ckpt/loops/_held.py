"""Gradients that wait for an optimizer step when a save is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final
from weakref import ref

from torch import Tensor
from torch.optim import Optimizer

from ckpt_core.state import unwrap_optimizer
from lightning_ckpt.loops._steps import TrainingLoops


@final
class HeldGradients:
    """Tells gradients that a later step will use from those that one has used.

    The window of automatic optimization is Lightning's. Where the script makes the steps, each optimizer has
    its own, which may last over several batches; what a step has used stays in memory until it is zeroed.

    Concurrency: the thread that trains; `holders` is collective where the script makes the steps.
    """

    def __init__(self, loops: TrainingLoops) -> None:
        self._loops = loops
        self._trainer = loops.trainer
        self._used: dict[Optimizer, list[tuple[ref[Tensor], int]]] = {}
        self._hooks: list[Any] = []

    @property
    def _optimizers(self) -> list[Any]:
        return [unwrap_optimizer(each) for each in self._trainer.strategy.optimizers]

    def begin(self) -> None:
        """Watch the steps that the script makes."""
        if not self._trainer.lightning_module.automatic_optimization:
            watched = [each for each in self._optimizers if isinstance(each, Optimizer)]
            self._hooks = [each.register_step_post_hook(self._note) for each in watched]

    def release(self) -> None:
        """Watch no more; idempotent."""
        while self._hooks:
            self._hooks.pop().remove()

    def holders(self) -> list[Any]:
        """Return the optimizers whose gradients are to be saved, the same on every rank."""
        loops = self._loops
        if loops.holds_batch and not loops.at_batch_start:
            return []  # those of the batch in hand may be among them
        if self._trainer.lightning_module.automatic_optimization:
            return self._optimizers if loops.in_window else []
        on_any_rank = self._trainer.strategy.reduce_boolean_decision
        return [each for each in self._optimizers if on_any_rank(self._holds(each), all=False)]

    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        self._used[optimizer] = [(ref(grad), grad._version) for grad in _gradients(optimizer)]

    def _holds(self, optimizer: Optimizer) -> bool:
        noted = self._used.get(optimizer, ())
        used = {id(grad): version for each, version in noted if (grad := each()) is not None}
        new = (grad for grad in _gradients(optimizer) if used.get(id(grad)) != grad._version)
        return any(bool(grad.any()) for grad in new)


def _gradients(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from (each.grad for each in group["params"] if each.grad is not None)
