"""The state of a Fabric training, as its users write it, as a `StateSource`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The entries of a state by kind, each under the user's key."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    loaders: Mapping[str, Any]
    stateful: Mapping[str, Any]
    plain: Mapping[str, PlainValue]

    @classmethod
    def of(cls, state: Mapping[Any, Any]) -> Parts:
        """Sort what Fabric's wrappers hold."""
        wrong = [key for key in state if not isinstance(key, str) or not key]
        if wrong:
            raise ConfigError(f"the keys of a state must be names, not {wrong!r:.200}")
        parts = cls(models={}, optimizers={}, loaders={}, stateful={}, plain={})
        for key, value in state.items():
            kind: Any = parts.plain
            if isinstance(value, nn.Module):
                kind = parts.models
            elif isinstance(value, torch.optim.Optimizer):
                kind = parts.optimizers
            elif isinstance(value, DataLoader | Sampler):
                kind = parts.loaders
            elif callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict"):
                kind = parts.stateful
            kind[key] = PlainValue(value) if kind is parts.plain else value
        if reserved := {_ITEMS, "pickled"} & (parts.models.keys() | parts.optimizers.keys()):
            raise ConfigError(f"give {', '.join(sorted(reserved))} another key: checkpoints use that name")
        return parts

    @property
    def tensors(self) -> set[str]:
        return self.models.keys() | self.optimizers.keys()

    def home(self, optimizer: torch.optim.Optimizer) -> nn.Module:
        """Return the model that an optimizer trains; a container if it trains several."""
        if not self.models:
            raise ConfigError("an optimizer is saved and loaded with its model: add the model to the state")
        return owner(self.models, optimizer)


@final
class FabricState(StateSource):
    """A state as `fabric.save` takes it; a `StateSource`.

    Tensors are under the user's keys, as in `dcp.save({"model": model.state_dict()})`; everything else is as
    in a `TrainState`, which does it.

    Args:
        filters: key -> function that is given name and value, and returns whether to save it.
        iterations: key of a loader -> how often it was iterated, where Fabric counts that.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        filters: Filters | None = None,
        rng: bool = True,
        iterations: Mapping[str, int] | None = None,
        contents: Contents | None = None,
    ) -> None:
        self.saved: SavedState | None = None
        self._parts = parts
        self._filters = _checked(filters or {}, parts)
        self._iterations = dict(iterations or {})
        self._contents: Contents | None = contents
        self._bases: dict[str, frozenset[str]] = {}
        items: dict[str, Any] = {
            _item(key): each for key, each in (*parts.stateful.items(), *parts.plain.items())
        }
        rest = TrainState(
            model=nn.Module(),
            dataloader=dict(parts.loaders),
            rng=rng and not {"rng", "rng_seed"} & parts.plain.keys(),
            **items,
        )
        self._rest = rest.select(rest.names - {"model"})

    def capture(self) -> CapturedState:
        rest = self._rest.capture()
        tree, local = dict(rest.sharded[_PART]), dict(rest.local)
        groups, stable = list(rest.groups), list(rest.stable)
        bases: dict[str, Any] = {}
        for key, model in self._parts.models.items():
            kept, items = saved_part(model, model_state(model), self._contents, place=key)
            tree[key] = self._filtered(key, kept)
            bases |= items
            local |= local_buffers(model, tree[key], prefix=f"{key}.")
        for key, optimizer in self._parts.optimizers.items():
            home = self._parts.home(optimizer)
            tree[key] = optimizer_state(home, optimizer)
            groups.append((_PART, (key, "param_groups")))
            stable += stable_tensors(home, [optimizer])
        shared = {**rest.shared, **bases}
        if self._iterations:
            shared[_EPOCHS] = {
                key: max(0, count - (not rest.per_rank[f"{_LOADERS}.{key}"].get("ended", False)))
                for key, count in self._iterations.items()
            }
        for key in self._filters.keys() & self._parts.plain.keys():
            shared[_item(key)] = PlainValue(self._filtered(key, self._parts.plain[key].value)).state_dict()
        return replace(
            rest,
            sharded={_PART: tree},
            shared=shared,
            alike=[*rest.alike, *bases],
            local=local,
            groups=groups,
            stable=stable,
            optimizers=tuple(self._parts.optimizers.values()),
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
            key: supplied(model, saved, self._contents, place=key)
            for key, model in self._parts.models.items()
        }
        supplying = {key for key, names in self._bases.items() if names}
        missing = sorted(self._parts.tensors - tops - self._empty() - supplying)
        if missing and saved.strict:
            there = ", ".join(sorted(map(str, tops - {_ITEMS}))) or "none"
            raise IncompatibleCheckpointError(
                f"the checkpoint has no {', '.join(missing)}; of models and optimizers it has {there}: use "
                "the keys that were saved, or strict=False",
                missing=missing,
            )
        tree = dict(self._rest.target(saved)[_PART])
        for key, model in self._parts.models.items():
            if key not in missing:
                tree[key] = model_target(model, under(entries, key), base=self._bases[key])
        for key, optimizer in self._parts.optimizers.items():
            if key not in missing:
                home = self._parts.home(optimizer)
                tree[key] = optimizer_target(home, optimizer, under(entries, key))
        return {_PART: tree}

    def _empty(self) -> set[str]:
        """Return the models without tensors, of which a checkpoint records nothing."""
        return {key for key, model in self._parts.models.items() if not any(leaves(model_state(model)))}

    def begin(
        self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState
    ) -> Callable[[], Sequence[tuple[str | int, ...]] | None]:
        tree = loaded[_PART]
        for key, optimizer in self._parts.optimizers.items():
            check_groups(self._parts.home(optimizer), optimizer, tree.get(key), fit=fit_of(saved))
        return self._rest.begin(loaded, saved)

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        tree = loaded[_PART]
        for key, optimizer in self._parts.optimizers.items():
            if key in tree:
                load_optimizer_state(self._parts.home(optimizer), optimizer, tree[key], fit=fit_of(saved))
        for key, model in self._parts.models.items():
            if key in tree:
                load_model_state(model, tree[key], base=self._bases[key])
        self.saved = saved
        return self._rest.apply(loaded, saved)

    def takes_all(self, saved: SavedState) -> bool:
        """Return whether every model and optimizer of a checkpoint is in this state."""
        return {str(path[0]) for path in saved.sharded.get(_PART, {})} - {_ITEMS} <= self._parts.tensors

    @property
    def epochs(self) -> Mapping[str, int]:
        """The loaded epoch of each loader."""
        return {} if self.saved is None else dict(self.saved.shared.get(_EPOCHS, {}))

    @property
    def remainder(self) -> dict[str, Any]:
        """The loaded values that are not in the state, by their saved keys."""
        shared = {} if self.saved is None else self.saved.shared
        taken = {_item(key) for key in (*self._parts.stateful, *self._parts.plain)} | _OWN
        return _by_key(
            {name: value for name, value in shared.items() if name not in taken and not is_of_base(name)}
        )


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


def _checked(filters: Filters, parts: Parts) -> Filters:
    """Check the `filter` of a save."""
    given: Any = filters
    if not isinstance(given, Mapping) or not all(map(callable, filters.values())):
        raise ConfigError(f"filter must map keys of the state to functions of name and value, not {given!r}")
    dictionaries = {key for key, each in parts.plain.items() if isinstance(each.value, Mapping)}
    wrong = sorted(map(str, filters.keys() - parts.models.keys() - dictionaries))
    if wrong:
        raise ConfigError(
            f"filter has {', '.join(wrong)}, which is no model or dictionary of the state; leave an "
            "optimizer out of the state instead"
        )
    return filters
