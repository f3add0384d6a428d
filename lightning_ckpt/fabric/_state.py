"""The state of a Fabric training, as its users write it, as a `StateSource`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import (
    Contents,
    StateSource,
    TrainState,
    check_groups,
    fit_of,
    is_of_base,
    leaves,
    load_model_state,
    load_optimizer_state,
    local_buffers,
    model_state,
    model_target,
    optimizer_state,
    optimizer_target,
    owner,
    saved_part,
    stable_tensors,
    supplied,
    under,
)
from ckpt_core.types import CapturedState, SavedState
from lightning_ckpt._state import NewMemory

Filters: TypeAlias = Mapping[str, Callable[[str, Any], bool]]

_PART: Final = ""
_ITEMS: Final = "items"
_LOADERS: Final = "dataloader"
_EPOCHS: Final = "fabric.epochs"
"""Shared item: key of a loader -> the epoch that its next iteration is in."""
_PREFIX: Final = "fabric."
_TAKEN: Final = frozenset(
    {"self", "model", "optimizer", _LOADERS, "gradients", "rng", "rng_seed", "dataloader.positions"}
)
"""Names that `TrainState` and its checkpoints use by themselves; items of these keys get the prefix."""
_OWN: Final = frozenset({_EPOCHS, "rng_seed", "dataloader.positions"})


@final
class PlainValue:
    """A plain value of the state: of a number, a list, a tensor, settings."""

    _KEY: Final = "$value"

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {self._KEY: self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = self.unmarked(state)

    @classmethod
    def unmarked(cls, state: Any) -> Any:
        """Return the plain value, or the state of an object unchanged."""
        is_plain = isinstance(state, Mapping) and state.keys() == {cls._KEY}
        return state[cls._KEY] if is_plain else state


@final
class FabricState(StateSource):
    """A state as `fabric.save` takes it, without Fabric's wrappers.

    Tensors are under the user's keys, as in `dcp.save({"model": model.state_dict()})`; everything else is as
    in a `TrainState`, which does it.

    Attributes:
        optimizers: of the state, by the user's keys; likewise `loaders` and `plain`.
        iterations: key of a loader -> how often it was iterated, where Fabric counts that.
        saved: the checkpoint that was loaded; None before.

    Args:
        filters: key -> function that is given name and value, and returns whether to save it.
        rng: whether the random number generators are part of it; None where there is an optimizer.
    """

    def __init__(
        self,
        state: Mapping[Any, Any],
        *,
        filters: Filters | None = None,
        rng: bool | None = True,
        contents: Contents | None = None,
    ) -> None:
        wrong = [key for key in state if not isinstance(key, str) or not key]
        if wrong:
            raise ConfigError(f"the keys of a state must be names, not {wrong!r:.200}")
        self.saved: SavedState | None = None
        self.iterations: dict[str, int] = {}
        self._models: dict[str, nn.Module] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.loaders: dict[str, Any] = {}
        self.plain: dict[str, PlainValue] = {}
        items: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, nn.Module):
                self._models[key] = value
            elif isinstance(value, torch.optim.Optimizer):
                self.optimizers[key] = value
            elif isinstance(value, DataLoader | Sampler):
                self.loaders[key] = value
            elif callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
                items[_item(key)] = value
            else:
                items[_item(key)] = self.plain[key] = PlainValue(value)
        self._tensors = self._models.keys() | self.optimizers.keys()
        if reserved := {_ITEMS, "pickled"} & self._tensors:
            raise ConfigError(f"give {', '.join(sorted(reserved))} another key: checkpoints use that name")
        self._taken = items.keys() | _OWN
        self._filters = self._checked(filters or {})
        self._contents: Contents | None = contents
        self._bases: dict[str, frozenset[str]] = {}
        rng = bool(self.optimizers) if rng is None else rng
        rest = TrainState(
            model=nn.Module(),
            dataloader=dict(self.loaders),
            rng=rng and not {"rng", "rng_seed"} & self.plain.keys(),
            **items,
        )
        self._rest = rest.select(rest.names - {"model"})

    def weights(self) -> StateSource | None:
        models = [*self._models.values()]
        model = models[0] if len(models) == 1 else self._models
        return TrainState(model=model, contents=self._contents).select({"model"}) if models else None

    def _checked(self, filters: Filters) -> Filters:
        """Check the `filter` of a save."""
        given: Any = filters
        if not isinstance(given, Mapping) or not all(map(callable, filters.values())):
            raise ConfigError(
                f"filter must map keys of the state to functions of name and value, not {given!r}"
            )
        dictionaries = {key for key, each in self.plain.items() if isinstance(each.value, Mapping)}
        wrong = sorted(map(str, filters.keys() - self._models.keys() - dictionaries))
        if wrong:
            raise ConfigError(
                f"filter has {', '.join(wrong)}, which is no model or dictionary of the state; leave an "
                "optimizer out of the state instead"
            )
        return filters

    def _home(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the model that an optimizer trains; a container if it trains several."""
        if not self._models:
            raise ConfigError(
                "an optimizer is saved and loaded with its model: add the model to the state, as in "
                "fabric.load(path, {'model': …, 'optimizer': …})"
            )
        return owner(self._models, optimizer)

    def capture(self) -> CapturedState:
        rest = self._rest.capture()
        tree, local = dict(rest.sharded[_PART]), dict(rest.local)
        groups, stable = list(rest.groups), list(rest.stable)
        bases: dict[str, Any] = {}
        for key, model in self._models.items():
            kept, items = saved_part(model, model_state(model), self._contents, place=key)
            tree[key] = self._filtered(key, kept)
            bases |= items
            local |= local_buffers(model, tree[key], prefix=f"{key}.")
        for key, optimizer in self.optimizers.items():
            home = self._home(optimizer)
            tree[key] = optimizer_state(home, optimizer)
            groups.append((_PART, (key, "param_groups")))
            stable += stable_tensors(home, [optimizer])
        shared = {**rest.shared, **bases}
        if self.iterations:
            shared[_EPOCHS] = {
                key: max(0, count - (not rest.per_rank[f"{_LOADERS}.{key}"].get("ended", False)))
                for key, count in self.iterations.items()
            }
        for key in self._filters.keys() & self.plain.keys():
            shared[_item(key)] = PlainValue(self._filtered(key, self.plain[key].value)).state_dict()
        return replace(
            rest,
            sharded={_PART: tree},
            shared=shared,
            alike=[*rest.alike, *bases],
            local=local,
            groups=groups,
            stable=stable,
            optimizers=tuple(self.optimizers.values()),
        )

    def _filtered(self, key: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        keep = self._filters.get(key)
        if keep is None:
            return values
        return {name: value for name, value in values.items() if keep(name, value)}

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        entries = saved.sharded.get(_PART, {})
        tops = {path[0] for path in entries}
        self._bases = {
            key: supplied(model, saved, self._contents, place=key) for key, model in self._models.items()
        }
        supplying = {key for key, names in self._bases.items() if names}
        # Of a model without tensors a checkpoint records nothing.
        empty = {key for key, model in self._models.items() if not any(leaves(model_state(model)))}
        missing = sorted(self._tensors - tops - empty - supplying)
        if missing and saved.strict:
            there = ", ".join(sorted(map(str, tops - {_ITEMS}))) or "none"
            raise IncompatibleCheckpointError(
                f"the checkpoint has no {', '.join(missing)}; of models and optimizers it has {there}: use "
                "the keys that were saved, or strict=False",
                missing=missing,
            )
        tree = dict(self._rest.target(saved)[_PART])
        for key, model in self._models.items():
            if key not in missing:
                tree[key] = model_target(model, under(entries, key), base=self._bases[key])
        for key, optimizer in self.optimizers.items():
            if key not in missing:
                home = self._home(optimizer)
                tree[key] = optimizer_target(home, optimizer, under(entries, key))
        return {_PART: tree}

    def begin(
        self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState
    ) -> Callable[[], Sequence[tuple[str | int, ...]] | None]:
        tree = loaded[_PART]
        for key, optimizer in self.optimizers.items():
            check_groups(self._home(optimizer), optimizer, tree.get(key), fit=fit_of(saved))
        return self._rest.begin(loaded, saved)

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        tree = loaded[_PART]
        for key, optimizer in self.optimizers.items():
            if key in tree:
                load_optimizer_state(self._home(optimizer), optimizer, tree[key], fit=fit_of(saved))
        for key, model in self._models.items():
            if key in tree:
                load_model_state(model, tree[key], base=self._bases[key])
        self.saved = saved
        return self._rest.apply(loaded, saved)

    def takes_all(self, saved: SavedState) -> bool:
        return {str(path[0]) for path in saved.sharded.get(_PART, {})} - {_ITEMS} <= self._tensors

    @property
    def epochs(self) -> Mapping[str, int]:
        """The loaded epoch of each loader."""
        return {} if self.saved is None else dict(self.saved.shared.get(_EPOCHS, {}))

    @property
    def remainder(self) -> dict[str, Any]:
        """The loaded values that are not in the state, by their saved keys."""
        shared = {} if self.saved is None else self.saved.shared
        return _by_key({n: each for n, each in shared.items() if n not in self._taken and not is_of_base(n)})


def everything(source: NewMemory) -> dict[str, Any]:
    """Return what was read into new memory, by the keys under which it was saved."""
    tree, items = dict(source.tree), source.saved.shared.items()
    shared = {name: value for name, value in items if name not in _OWN and not is_of_base(name)}
    return {**_by_key({**shared, **tree.pop(_ITEMS, {})}), **tree}


def _item(key: str) -> str:
    return _PREFIX + key if key in _TAKEN else key


def _by_key(items: Mapping[str, Any]) -> dict[str, Any]:
    """Return items by the user's keys, plain values unmarked."""
    return {name.removeprefix(_PREFIX): PlainValue.unmarked(value) for name, value in items.items()}
