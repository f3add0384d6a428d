"""The accumulation window of an accelerator: its gradients, and the place in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from accelerate import Accelerator
from torch import nn

from ckpt_core.state import Gradients, owner, under, unwrap_optimizer
from ckpt_core.types import SavedState

_GRADIENTS: Final = "gradients"
_SYNCHRONISED: Final = "synchronised"


def gradient_part(index: int) -> str:
    """Return the directory of a model's gradients."""
    return f"gradients_{index}"


def trained_by(optimizers: Sequence[Any], models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the models that optimizers train; others may change at any time."""
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

    @property
    def is_lost(self) -> bool:
        """Whether a save now would leave out gradients that have been accumulated."""
        return self.is_open and not self._with_gradients

    def capture(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Return the gradients by part, and what a load must know. Collective.

        Raises:
            ConfigError: gradients are where no checkpoint can reach them.
        """
        if not self._with_gradients:
            return {}, {}
        captured = [each.capture() for each in self._models]
        parts = {gradient_part(i): {_GRADIENTS: tree} for i, (tree, _) in enumerate(captured) if tree}
        facts = [facts for _, facts in captured]
        return parts, {_GRADIENTS: facts, _SYNCHRONISED: self._accelerator.sync_gradients}

    def targets(self, saved: SavedState, shared: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Return what to load into, by part.

        Raises:
            IncompatibleCheckpointError: gradients were accumulated on another number of ranks.
        """
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
