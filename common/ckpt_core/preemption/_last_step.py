"""The last whole step of a training, for a save after an exception has ended it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from ckpt_core._torch_internals import changes_of
from ckpt_core.state import leaves
from ckpt_core.types import CapturedState


@final
class LastStep:
    """The small values of the last step, and whether its tensors are as they were.

    Data position, generators, schedules and other small values are copied at every step. Tensors are not: an
    optimizer step that has begun since, or any change in place, such as of batch statistics in the forward of
    the next step, makes the step one that cannot be saved any more.

    Attributes:
        step: the number of the step; -1 before there is one.
        state: of that step.
        arguments: of its save.
    """

    def __init__(self) -> None:
        self.step, self.state = -1, CapturedState()
        self.arguments: Mapping[str, Any] = {}
        self._problem, self._changes = "no step was finished", list[int]()
        self._hooks: list[Any] = []

    def note(self, step: int, take: Callable[[], CapturedState], *, again: bool = False, **save: Any) -> None:
        """Keep the first state of a step, or the last of those that are noted `again`."""
        if step == self.step and not again:
            return  # perhaps within an accumulation window
        state = take()
        if [*state.optimizers] != [*self.state.optimizers]:
            self.close()
            self._hooks = [each.register_step_pre_hook(self._before_step) for each in state.optimizers]
        per_rank, shared = copy.deepcopy((state.per_rank, state.shared))
        self.step, self.arguments = step, save
        self.state = replace(state, per_rank=per_rank, shared=shared)
        self._problem, self._changes = "", _changes(state)

    def problem(self) -> str:
        """Return why the state is not that of the step any more; "" if it is."""
        if not self._problem and self._changes != _changes(self.state):
            self._problem = f"buffers or other tensors have changed after step {self.step}"
        return self._problem

    def close(self) -> None:
        """Let optimizers go."""
        while self._hooks:
            self._hooks.pop().remove()

    def _before_step(self, _: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._note_begun()
            return None

        def noted() -> Any:
            loss = closure()  # forward and backward, before which an optimizer changes nothing
            self._note_begun()
            return loss

        return args[:1], {**kwargs, "closure": noted}

    def _note_begun(self) -> None:
        self._problem = f"an optimizer step has begun after step {self.step}"


def _changes(state: CapturedState) -> list[int]:
    tensors = (value for tree in state.sharded.values() for _, value in leaves(tree))
    return [changes_of(each) for each in tensors if isinstance(each, torch.Tensor)]
