"""Models and the optimizers that train them, at the places that a host gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, final

import torch
from torch import nn

from ckpt_core.state._contents import Contents, saved_part, supplied
from ckpt_core.state._model import Names, load_model_state, local_buffers, model_state, model_target
from ckpt_core.state._nested import get, leaves, put, under
from ckpt_core.state._optimizer import (
    Fit,
    check_groups,
    fit_of,
    load_optimizer_state,
    optimizer_state,
    optimizer_target,
    stable_tensors,
    unwrap_optimizer,
)
from ckpt_core.types import CapturedState, SavedState

Place: TypeAlias = tuple[str, ...]
"""Of a model or an optimizer: the part directory, "" for the checkpoint's own, then the path in it."""


@final
class Trained:
    """Does for models and optimizers what a `StateSource` does for the whole state.

    Attributes:
        bases: by the places of models: names of what the live base supplies, once there is a target.

    Args:
        models: by their places.
        optimizers: by their places, each with the model that it trains.
        contents: what of the models is saved.
        check: called with the places that a checkpoint lacks, before anything else is done.
        apart: whether ranks may train other parameters than these, as the stages of a pipeline do.
    """

    def __init__(
        self,
        models: Mapping[Place, nn.Module],
        optimizers: Mapping[Place, tuple[nn.Module, Any]],
        *,
        contents: Contents | None,
        check: Callable[[SavedState, Sequence[Place]], object] = lambda *_: None,
        apart: bool = False,
    ) -> None:
        self._models = models
        self._optimizers = optimizers
        self._contents: Contents | None = contents
        self._check = check
        self._apart = apart
        self.bases: Mapping[Place, frozenset[str]] = {}

    def capture(self, given: Mapping[Place, Any] = MappingProxyType({})) -> CapturedState:
        """Return the present states, but for those that a host has `given`, by place."""
        inner: dict[nn.Module, list[torch.optim.Optimizer]] = {model: [] for model in self._models.values()}
        for home, optimizer in self._optimizers.values():
            inner.setdefault(home, []).append(unwrap_optimizer(optimizer))
        names = {model: Names(model) for model in inner}
        sharded, shared, local = dict[str, Any](), dict[str, Any](), dict[tuple[str, str], Any]()
        for place, model in self._models.items():
            (part, *path), own = place, names[model]
            whole = given[place] if place in given else model_state(model, names=own)
            state, base = saved_part(model, whole, self._contents, place=part or path[0])
            put(sharded, place, state)
            shared |= base
            local |= local_buffers(model, state, part=part, prefix=".".join([*path, ""]), names=own)
        for place, (home, optimizer) in self._optimizers.items():
            found = given[place] if place in given else optimizer_state(home, optimizer, names=names[home])
            put(sharded, place, found)
        groups = [(part, (*path, "param_groups")) for part, *path in self._optimizers if self._apart]
        return CapturedState(
            sharded=sharded,
            shared=shared,
            alike=list(shared),
            groups=groups,
            local=local,
            stable=[each for home, own in inner.items() for each in stable_tensors(home, own)],
            optimizers=[each for own in inner.values() for each in own],
        )

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        entries = {
            place: under(saved.sharded.get(place[0], {}), *place[1:])
            for place in (*self._models, *self._optimizers)
        }
        self.bases = {
            place: supplied(model, saved, self._contents, place=place[0] or place[1])
            for place, model in self._models.items()
        }
        lacking = [place for place, found in entries.items() if not found and not self.bases.get(place)]
        # Of a model without tensors a checkpoint records nothing.
        models = self._models
        lacking = [each for each in lacking if each not in models or any(leaves(model_state(models[each])))]
        self._check(saved, lacking)
        tree: dict[str, dict[str, Any]] = {}
        for place, model in models.items():
            put(tree, place, model_target(model, entries[place], saved, base=self.bases[place]))
        for place, (home, optimizer) in self._optimizers.items():
            put(tree, place, optimizer_target(home, optimizer, entries[place]))
        return tree

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> None:
        for place, (home, optimizer) in self._optimizers.items():
            check_groups(home, optimizer, get(loaded, place), fit=self._fit(saved))

    def apply(
        self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState, *, strict: bool = True
    ) -> None:
        for place, (home, optimizer) in self._optimizers.items():
            if state := get(loaded, place):
                load_optimizer_state(home, optimizer, state, fit=self._fit(saved))
        for place, model in self._models.items():
            load_model_state(model, get(loaded, place), strict=strict, base=self.bases[place])

    def _fit(self, saved: SavedState) -> Fit:
        return fit_of(saved) if self._apart else "same"
