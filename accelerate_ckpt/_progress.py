"""Progress of a training: optimizer steps, loaders, the accumulation window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final
from weakref import WeakKeyDictionary

import torch
from accelerate import Accelerator
from torch import nn

from accelerate_ckpt._loaders import Loaders
from ckpt_core.state import Gradients, owner, under, unwrap_optimizer
from ckpt_core.types import SavedState


@final
class Progress:
    """Loaders of one accelerator, and steps of its most used optimizer.

    Main thread only. An optimizer that joins later begins where the others are. A new training with
    optimizers of its own counts from the first step.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.step = 0
        self.loaders = Loaders(accelerator)
        self._steps: WeakKeyDictionary[torch.optim.Optimizer, list[int]] = WeakKeyDictionary()
        self._handles: list[Any] = []
        for optimizer in accelerator._optimizers:
            self.count(optimizer)

    def count(self, optimizer: Any) -> None:
        # The wrapper has no step hooks of its own, and its `step` is called for micro-batches too.
        inner = unwrap_optimizer(optimizer)
        if inner in self._steps:
            return
        made = self._steps[inner] = [self.step]

        def note(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
            made[0] += 1
            self.step = max(self.step, made[0])
            self.loaders.note_step()

        self._handles.append(inner.register_step_post_hook(note))

    def restore(self, step: int) -> None:
        self.step = step
        for made in self._steps.values():
            made[0] = step

    def release(self) -> None:
        self.loaders.release()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._steps.clear()
        self.step = 0


def steps_made(optimizers: Sequence[Any]) -> int:
    steps = (
        state["step"] for optimizer in optimizers for state in optimizer.state.values() if "step" in state
    )
    return max(map(int, steps), default=0)


_GRADIENTS: Final = "gradients"
_SYNCHRONISED: Final = "synchronised"


def gradient_part(index: int) -> str:
    return f"gradients_{index}"


def trained_by(optimizers: Sequence[Any], models: Sequence[nn.Module]) -> list[nn.Module]:
    trained = {
        id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]
    }
    return [model for model in models if any(id(each) in trained for each in model.parameters())]


def trainable(accelerator: Accelerator) -> list[nn.Module]:
    """Return the models, and what is registered and trained, such as a loss."""
    registered = [each for each in accelerator._custom_objects if isinstance(each, nn.Module)]
    return [*accelerator._models, *trained_by(accelerator._optimizers, registered)]


@final
class Window:
    """The window that is open, if gradients are accumulated. Main thread only."""

    def __init__(self, accelerator: Accelerator, *, gradients: bool) -> None:
        self._accelerator = accelerator
        self._with_gradients = gradients

    @property
    def is_open(self) -> bool:
        """Whether gradients have been accumulated that no step has used."""
        return not self._accelerator.sync_gradients and self._accelerator.gradient_accumulation_steps > 1

    def capture(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Return the gradients by part, and what a load must know. Collective."""
        if not self._with_gradients:
            return {}, {}
        captured = [each.capture() for each in self._models]
        parts = {gradient_part(i): {_GRADIENTS: tree} for i, (tree, _) in enumerate(captured) if tree}
        facts = [facts for _, facts in captured]
        return parts, {_GRADIENTS: facts, _SYNCHRONISED: self._accelerator.sync_gradients}

    def targets(self, saved: SavedState, shared: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        if not self._loads(shared):
            return {}
        of_models: Sequence[Mapping[str, Any]] = shared[_GRADIENTS]
        return {
            gradient_part(index): {_GRADIENTS: tree}
            for index, (each, facts) in enumerate(zip(self._models, of_models, strict=False))
            if (tree := each.target(under(saved.sharded.get(gradient_part(index), {}), _GRADIENTS), facts))
        }

    def put_back(self, loaded: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]) -> None:
        """Replace the gradients, and continue at the saved place of the window."""
        if not self._loads(shared):
            return
        for index, each in enumerate(self._models):
            each.put_back(loaded.get(gradient_part(index), {}).get(_GRADIENTS, {}))
        self._accelerator.sync_gradients = shared[_SYNCHRONISED]

    def notes(self, name: str, shared: Mapping[str, Any]) -> list[str]:
        """Return a note if a window was open whose gradients are not loaded."""
        if not shared.get("within_window") or self._loads(shared):
            return []
        return [
            f"checkpoint {name} was saved within an accumulation window, and the gradients accumulated until "
            "then are not loaded, which needs gradients=True at the save and here: the first optimizer step "
            "is made of fewer batches than others"
        ]

    def _loads(self, shared: Mapping[str, Any]) -> bool:
        return self._with_gradients and _GRADIENTS in shared

    @property
    def _models(self) -> list[Gradients]:
        """The gradients of each model; FSDP1 knows them by its optimizers."""
        models, optimizers = trainable(self._accelerator), self._accelerator._optimizers
        owners = [(owner(models, each), unwrap_optimizer(each)) for each in optimizers]
        return [
            Gradients(model=model, optimizers=[each for of, each in owners if of is model])
            for model in models
        ]
