"""The state of a training run, item by item, and nested mappings as one."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar, final

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import PLAIN, holds_unreduced_gradients
from ckpt_core.coordination import place_in_job
from ckpt_core.data import LoaderPosition, await_training, is_stateful, tell_of_missing
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.state import _fsdp1
from ckpt_core.state._contents import Contents, base_names, begin
from ckpt_core.state._items import (
    Counters,
    check_kind,
    check_placed,
    derive_rng,
    function_free,
    is_large,
    item_state,
    item_target,
    load_item,
    load_rng_state,
    rng_item,
    rng_seed,
    rng_state,
    rng_target,
)
from ckpt_core.state._model import Models, Names, as_module, model_state, of_own_loaders
from ckpt_core.state._nested import (
    Path,
    dtype_named,
    empty_like,
    get,
    is_leaf,
    is_sharded,
    leaves,
    put,
    shape_of,
    template,
    under,
)
from ckpt_core.state._optimizer import fit_of, optimizer_target, unwrap_optimizer
from ckpt_core.state._override import Override
from ckpt_core.state._tensor_sums import own_checksum
from ckpt_core.state._trained import Place, Trained
from ckpt_core.types import CapturedState, SavedEntries, SavedState
from ckpt_core.validation import boolean, require

_ALL: Final = "all"
"""Key of the gradients that ranks share or are shards of; others are under the rank that holds them."""
_RANKS: Final = "ranks"
_OPTION: Final = "gradient"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Gradients:
    """The gradients of a model's parameters, by parameter name.

    Shards are saved as such, and gradients that are the same on every rank once. Those that ranks accumulate
    each by itself, as under DDP's `no_sync`, are saved by every rank, and fit the same number of ranks only.
    Those of the torch `optimizers` are saved, without any all; FSDP1 knows its parameters by them.
    """

    model: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]

    def capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return live gradients, and what a load must know of them. Collective.

        Raises:
            ConfigError: gradients are where no checkpoint can reach them; the same on every rank.
        """
        rank, size = place_in_job()
        own, is_flat = dict[str, torch.Tensor | None](), _fsdp1.is_fsdp1(self.model)
        problem = self._problem()
        if problem is None and not is_flat:
            trained = {parameter for each in self.optimizers for parameter in _parameters(each)}
            own = {
                name: parameter.grad
                for parameter, name in Names(self.model).own.items()
                if parameter.requires_grad and (parameter in trained or not trained)
            }
        plain = {
            name: None if grad is None else own_checksum(grad)
            for name, grad in own.items()
            if not isinstance(grad, DTensor)
        }
        of_ranks: list[Any] = [(problem, plain)] * size
        if size > 1:
            dist.all_gather_object(of_ranks, (problem, plain))
        if problems := [f"rank {number}: {each}" for number, (each, _) in enumerate(of_ranks) if each]:
            raise ConfigError(
                f"gradients cannot be saved here ({problems[0]}): save when the optimizer has made its step, "
                "or accumulate with synchronisation"
            )
        first = {name: each for _, sums in reversed(of_ranks) for name, each in sums.items()}
        differing = {name for _, sums in of_ranks for name, each in sums.items() if each != first[name]}
        for optimizer in self.optimizers if is_flat else ():
            found = {number: {_OPTION: each.grad} for number, each in enumerate(_parameters(optimizer))}
            held = {number: each for number, each in found.items() if each[_OPTION] is not None}
            named = _fsdp1.by_name(self.model, optimizer, held)["state"]
            own |= {name: values[_OPTION] for name, values in named.items()}
        tree: dict[str, dict[str, Any]] = {}
        for name, grad in own.items():
            if grad is not None:
                tree.setdefault(f"rank-{rank}" if name in differing else _ALL, {})[name] = grad.detach()
        return tree, {_RANKS: size if differing else 0}

    def target(self, entries: SavedEntries, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return memory for the saved gradients of this rank.

        Raises:
            IncompatibleCheckpointError: they were accumulated on another number of ranks, each by itself.
        """
        rank, size = place_in_job()
        if facts.get(_RANKS, 0) not in {0, size}:
            raise IncompatibleCheckpointError(
                f"it was saved within an accumulation window, with gradients that {facts[_RANKS]} ranks had "
                f"each by itself, and there are {size} now: resume on {facts[_RANKS]}, or without "
                "gradients=True, so that the window begins again"
            )
        is_flat = _fsdp1.is_fsdp1(self.model)
        references = model_state(self.model) if is_flat else Names(self.model).by_name
        tree: dict[str, dict[str, Any]] = {}
        for (kind, *rest), entry in entries.items():
            name = ".".join(map(str, rest))
            if kind in {_ALL, f"rank-{rank}"} and entry is not None and name in references:
                tree.setdefault(str(kind), {})[name] = empty_like(references[name], dtype_named(entry.dtype))
        return tree

    def put_back(self, tree: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace every gradient by the loaded one; None where there was none.

        A parameter that is frozen now gets none: an optimizer would move it.
        """
        loaded = {name: grad for each in tree.values() for name, grad in each.items()}
        for parameter in self.model.parameters():
            parameter.grad = None
        found: list[tuple[nn.Parameter, torch.Tensor]] = []
        try:
            if not _fsdp1.is_fsdp1(self.model):
                names = Names(self.model).by_name
                found = [(names[name], grad) for name, grad in loaded.items()]
            else:
                named = {name: {_OPTION: grad} for name, grad in loaded.items()}
                for optimizer in self.optimizers:
                    shards = _fsdp1.to_index_form(self.model, optimizer, named)["state"]
                    # A rank without a part of a parameter has no gradient of it.
                    found += [
                        (each, shards[number][_OPTION].reshape(each.shape))
                        for number, each in enumerate(_parameters(optimizer))
                        if number in shards and each.numel()
                    ]
            for parameter, grad in found:
                if parameter.requires_grad:
                    parameter.grad = grad
        except RuntimeError as error:
            raise IncompatibleCheckpointError(f"a parameter refused its gradient: {error}") from error

    def _problem(self) -> str | None:
        """Return why the gradients cannot be saved now, on this rank."""
        is_flat = _fsdp1.is_fsdp1(self.model)
        if is_flat and not self.optimizers:
            return "FSDP1 names the parameters of optimizers only, and there is none"
        if any(holds_unreduced_gradients(module) for module in self.model.modules()):
            return "FSDP2 accumulates them without synchronisation, in memory of its own"
        for parameter in self.model.parameters():
            if (grad := parameter.grad) is None:
                continue
            if is_flat and grad.numel() != parameter.numel():
                return "FSDP1 accumulates them without synchronisation, in memory of its own"
            if grad.layout != torch.strided:
                return f"one of shape {tuple(grad.shape)} is sparse"
            if isinstance(grad, DTensor) and (
                not isinstance(parameter, DTensor) or grad.placements != parameter.placements
            ):
                return f"one of shape {tuple(grad.shape)} is not placed as its parameter: {grad.placements}"
        return None


def _parameters(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class StateSource(ABC):
    """A training state that can be saved and loaded.

    Calls on every rank, on the training thread:

    1. save: `capture()`. Its tensors are live: they must be copied before the next optimizer step, and those
       that are not parameters or optimizer state before training continues. Its `per_rank` and `shared`
       values are live, too: they must be encoded before training continues.
    2. load: `target(saved)` before anything large is read; its tensors are filled in place and each None is
       replaced by the value read; then `begin(loaded, saved)`, when plain values are read and tensors are
       not; then `apply(loaded, saved)` with the same structure. Before `apply`, only tensors change; if
       `target` or `begin` raises, nothing has changed. A load with `override=` ends with `override`.

    Methods may be collective over the ranks that hold the state.
    """

    @abstractmethod
    def capture(self) -> CapturedState:
        """Return the present state."""

    @abstractmethod
    def target(self, saved: SavedState) -> Mapping[str, dict[str, Any]]:
        """Return part directory -> nested dict: tensors, and None for every plain value.

        It has an entry for every saved entry to be loaded; other entries of the checkpoint need not be read.

        Raises:
            IncompatibleCheckpointError: the checkpoint is of another training state.
        """

    def begin(
        self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState
    ) -> Callable[[], Sequence[Path] | None]:
        """Put back small values that may refuse, before any tensor is read.

        By default nothing.

        Returns:
            A function that undoes it, and returns the paths of values, in `per_rank` or `shared`, that it
            cannot undo: if the load fails later, another that has them must replace them.

        Raises:
            IncompatibleCheckpointError: a part of the state refuses; everything is unchanged.
        """
        del loaded, saved
        return lambda: None

    @abstractmethod
    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        """Put everything back; return notes for the user, such as what was not restored.

        Raises:
            IncompatibleCheckpointError: a part of the state refuses what was loaded.
        """

    def check_override(self, change: Override) -> None:
        """Refuse what cannot be changed, before anything is read; by default all."""
        del change
        raise ConfigError(f"override= changes the optimizers of a TrainState, not of a {type(self).__name__}")

    # Not abstract: what refuses every change has none to make.
    def override(self, change: Override) -> None:  # noqa: B027
        """Change hyperparameters, after `apply`."""

    def takes_all(self, saved: SavedState) -> bool:
        """Return whether a load uses every model and optimizer of a checkpoint."""
        del saved
        return True

    def weights(self) -> StateSource | None:
        """Return the model alone, as the item `model`; by default there is none."""
        return None


_PART = ""


@final
class DictState(StateSource):
    """A nested mapping of tensors, plain values and stateful objects, loaded in place.

    Keys are those that `dcp.save(mapping)` writes (and beside an optimizer's, the names of its classes), so
    either reads the other's checkpoints. As with `dcp.load`, the mapping selects what is loaded; other
    entries of the checkpoint are ignored.
    """

    def __init__(self, mapping: Mapping[str, Any]) -> None:
        self._mapping = mapping

    def capture(self) -> CapturedState:
        return CapturedState(sharded={_PART: _captured(self._mapping)})

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        entries, tree = saved.sharded.get(_PART, {}), dict[str, Any]()
        for path, _, _, value in _entries(self._mapping):
            if isinstance(value, torch.Tensor):
                put(tree, path, value)
            elif isinstance(value, nn.Module):
                # Its own names, without those of other stages of a pipeline.
                live = value.state_dict()
                found = {at: entry for at, entry in under(entries, *path).items() if at[0] in live}
                own = {name: each if isinstance(each, torch.Tensor) else None for name, each in live.items()}
                put(tree, path, own | template(live, _fitting(value, live, found)))
            elif is_stateful(value):
                put(tree, path, self._target_of(value, under(entries, *path)))
            else:
                put(tree, path, None)
        return {_PART: tree}

    def _target_of(self, value: Any, saved: SavedEntries) -> dict[str, Any]:
        # Before its first step an optimizer has no state that tells the placement: its parameters do.
        groups = value.param_groups if isinstance(value, torch.optim.Optimizer) else ()
        trained = {each for group in groups for each in group["params"]}
        if any(map(is_sharded, trained)):
            for _, _, _, each in _entries(self._mapping):
                if isinstance(each, nn.Module) and trained <= {*each.parameters()}:
                    return optimizer_target(each, value, saved)
        return item_target(value, saved)

    def begin(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Callable[[], None]:
        for path, _, _, value in _entries(self._mapping):
            if not isinstance(value, torch.Tensor):
                check_kind(value, get(loaded.get(_PART), path), fit=fit_of(saved))
        return lambda: None

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> list[str]:
        del saved
        tree = loaded.get(_PART, {})
        for path, container, key, value in list(_entries(self._mapping)):
            if isinstance(value, torch.Tensor):
                continue
            outer, new = get(tree, path[:-1]), get(tree, path)
            if outer is None or (isinstance(outer, Mapping) and path[-1] not in outer):
                continue
            if is_stateful(value):
                load_item(".".join(map(str, path)), value, {} if new is None else new, of_tree=True)
            else:
                container[key] = new
        return []

    def weights(self) -> StateSource | None:
        return DictState({"model": self._mapping["model"]}) if "model" in self._mapping else None

    def check_override(self, change: Override) -> None:
        del change
        raise ConfigError(
            f"override= changes the optimizers of a TrainState, not of a {type(self._mapping).__name__}"
        )

    def takes_all(self, saved: SavedState) -> bool:
        tops = {str(path[0]) for entries in saved.sharded.values() for path in entries}
        return tops <= set(map(str, self._mapping))


def _fitting(module: nn.Module, live: Mapping[str, Any], saved: SavedEntries) -> SavedEntries:
    """Leave out entries of other shapes, unless a module may take them."""
    free = of_own_loaders(module, saved, live)
    return {
        path: entry
        for path, entry in saved.items()
        if entry is None
        or path[0] in free
        or not isinstance(own := live[str(path[0])], torch.Tensor)
        or shape_of(own) == entry.shape
    }


def _captured(value: Any) -> Any:
    """Return what is to be saved of a tree; every save waits for it."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, Mapping):
        if {str}.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values())):
            return value  # mostly; found in C
        found = {str(key): _captured(each) for key, each in value.items()}
        if len(found) < len(value):
            _refuse_doubles(value)
        return found
    if is_leaf(value):
        return item_state(value) if is_stateful(value) else value
    return [_captured(each) for each in value]


def _refuse_doubles(mapping: Mapping[Any, Any]) -> None:
    if len(set(map(str, mapping))) < len(mapping):
        twice = [name for name, times in Counter(map(str, mapping)).items() if times > 1]
        raise ConfigError(
            f"several keys of one mapping are called {', '.join(sorted(twice))} in a checkpoint, where every "
            "key is a string; only one of them would be saved"
        )


def _entries(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any, Any]]:
    """Yield the path, container, key and value of each leaf and object."""
    is_mapping = isinstance(value, Mapping)
    if is_mapping:
        _refuse_doubles(value)
    for key, each in list(value.items() if is_mapping else enumerate(value)):
        at = (*path, str(key) if is_mapping else key)
        if isinstance(each, torch.Tensor) or is_leaf(each):
            yield at, value, key, each
        else:
            yield from _entries(each, at)


_log = logger_of(__name__)
_T = TypeVar("_T")
Several: TypeAlias = _T | Mapping[str, _T] | Sequence[_T] | None

_BARE = (
    "the model's parameters are at its top level, beside the optimizer, as torchtitan has them: load it as a "
    'mapping, load({**model.state_dict(), "optimizer": ...}), whose values are tensors or have a state_dict'
)
_AS_STOCK = (
    "it has {}: load objects under these names, such as "
    'load({{"model": model, "optim": optimizer}}, source=...), or leave out of items= what is not there'
)
_SEED = "rng_seed"
_GRADIENTS = "gradients"
_MODEL: Place = (_PART, "model")
POSITIONS = "dataloader.positions"
"""Shared item: rank 0's positions, for ranks that are added later; no item can have this name."""


@final
class TrainState(StateSource):
    """The state of a training loop, for `CheckpointManager.save` and `load`.

    In the checkpoint, the tensors are under `model`, `optimizer` (`optimizer.<name>` for several) and
    `items.<name>`; schedulers, scaler and small items are shared; data position and RNG are per rank.

    Not thread-safe; every rank builds its own, of the same structure, and uses it on the training thread.

    Args:
        model: the trained model, wrapped or not; several as a mapping or sequence.
        optimizer: one, or several by name or in order; each may train any of the models.
        scheduler: anything with `state_dict` and `load_state_dict`; one or several.
        scaler: a gradient scaler.
        dataloader: one or several torch DataLoaders, or objects with `state_dict` and `load_state_dict`. The
            next `iter` after a load gives the rest of the epoch. Not yet being iterated, unless they tell
            their position themselves. Without any, a resume begins the data again.
        gradients: whether the parameters' gradients are part of the state, for saves within an accumulation
            window. A capture compares them between ranks.
        rng: whether the random number generators are part of the state.
        contents: "all" of the model, or "trainable": what is not frozen, and for the rest its name and
            checksums, with which a load compares the live model. By default "trainable" for PEFT models.
        items: any other objects with `state_dict` and `load_state_dict`; `Counters` for plain values.

    Raises:
        ConfigError: an object has no state that could be saved, an item has a name that is taken, or a loader
            is being iterated already.
    """

    # Every part of a training is a keyword of its own.
    def __init__(  # noqa: PLR0913
        self,
        *,
        model: Models,
        optimizer: Several[Any] = None,
        scheduler: Several[Any] = None,
        scaler: Any = None,
        dataloader: Several[Any] = None,
        gradients: bool = False,
        rng: bool = True,
        contents: Contents | None = None,
        **items: Any,
    ) -> None:
        require("TrainState", boolean("gradients", gradients))
        self._model = as_module(model)
        self._contents: Contents | None = contents
        self._optimizers = dict(_named("optimizer", optimizer))
        self._shared = dict(_named("scheduler", scheduler)) | dict(_named("scaler", scaler))
        loaders = dict(_named("dataloader", dataloader))
        self._dataloaders = {name: LoaderPosition(each) for name, each in loaders.items()}
        self._items = items
        self._with = frozenset({"model", *(["rng"] if rng else ()), *([_GRADIENTS] if gradients else ())})
        self._others: Callable[[], Trained] | None = None
        self._begun: tuple[SavedState, list[str]] | None = None
        self._asks = 2 if self._optimizers and not loaders else 0
        for each in self._optimizers.values():
            unwrap_optimizer(each)
        taken = {*self._optimizers, *self._shared, *loaders, *([_SEED] if rng else ())}
        if refused := sorted((taken | {POSITIONS}) & items.keys()):
            raise ConfigError(f"no item can be called {', '.join(refused)}: the state uses the name itself")
        for name, each in (self._shared | items).items():
            if not is_stateful(each):
                raise ConfigError(
                    f"{name} is a {type(each).__name__}, which has no state_dict and load_state_dict; "
                    "give a DataLoader as dataloader=, and keep plain values in ckpt_core.Counters"
                )
        begin(self._model, contents)

    @property
    def model(self) -> nn.Module:
        """The model; a container if there are several."""
        return self._model

    @property
    def optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The torch optimizers without wrappers; only their steps change the model."""
        return tuple(self._torch_optimizers.values())

    @property
    def names(self) -> frozenset[str]:
        """The items of this state, as `select` takes them."""
        named = (*self._optimizers, *self._shared, *self._dataloaders)
        return self._with | {*(name.partition(".")[0] for name in named), *self._items}

    def select(self, names: Collection[str]) -> TrainState:
        """Return a state of some items; the others are neither saved nor loaded.

        Raises:
            ConfigError: this state has no item of that name.
        """
        if unknown := set(names) - self.names:
            raise ConfigError(
                f"no such items: {', '.join(sorted(unknown))}; this state has {', '.join(sorted(self.names))}"
            )
        selected = copy.copy(self)
        selected._optimizers = _only(self._optimizers, names)
        selected._shared = _only(self._shared, names)
        selected._dataloaders = _only(self._dataloaders, names)
        selected._items = {name: item for name, item in self._items.items() if name in names}
        selected._with = self._with & set(names)
        return selected

    def capture(self) -> CapturedState:
        # First, because it is collective: a rank that fails later keeps no other one waiting.
        gradients = self._gradients.capture() if _GRADIENTS in self._with else None
        trained = self._trained().capture()
        tree = dict(trained.sharded.get(_PART, {}))
        shared: dict[str, Any] = {
            name: function_free(each.state_dict()) for name, each in self._shared.items()
        }
        for name, item in self._items.items():
            state = item_state(item)
            check_placed(name, item, state)
            if is_large(state):
                put(tree, ("items", name), state)
            else:
                shared[name] = state
        if gradients is not None:
            tree[_GRADIENTS], shared[_GRADIENTS] = gradients
        if self._asks:
            self._asks = self._asks - 1 if tell_of_missing("it to TrainState(dataloader=...)") else 0
        per_rank: dict[str, Any] = {name: each.state() for name, each in self._dataloaders.items()}
        if per_rank:
            shared[POSITIONS] = dict(per_rank)
        if "rng" in self._with:
            # Last: a loader that was never iterated draws from the global generator when asked for its state.
            per_rank["rng"] = rng_state()
            shared[_SEED] = rng_seed(per_rank["rng"])
        return replace(
            trained,
            sharded={_PART: tree},
            per_rank=per_rank,
            shared={**trained.shared, **shared},
            alike=[*trained.alike, *(name for name in (*self._shared, *self._items) if name in shared)],
            positions={
                name: position
                for name, each in self._dataloaders.items()
                if (position := each.in_samples(per_rank[name])) is not None
            },
        )

    def training(self, others: Callable[[], Trained]) -> TrainState:
        """Return this state with other models and optimizers than its own."""
        changed = copy.copy(self)
        changed._others = others
        return changed

    def _trained(self) -> Trained:
        if self._others is not None:
            return self._others()
        return Trained(
            {_MODEL: self._model} if "model" in self._with else {},
            {(_PART, *_path(name)): (self._model, each) for name, each in self._optimizers.items()},
            contents=self._contents,
            apart=True,
        )

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        entries = saved.sharded.get(_PART, {})
        if saved.strict:
            self._check_present(entries, saved)
        self._target = self._trained()
        tree = self._target.target(saved).get(_PART, {})
        for name, item in self._items.items():
            if found := under(entries, "items", name):
                put(tree, ("items", name), item_target(item, found))
        if _GRADIENTS in self._with and _GRADIENTS in saved.shared:
            tree[_GRADIENTS] = self._gradients.target(under(entries, _GRADIENTS), saved.shared[_GRADIENTS])
        for name, each in self._kept_by_stock(saved):
            put(tree, _path(name), template(function_free(each.state_dict()), under(entries, *_path(name))))
        return {_PART: tree | (rng_target(entries, place_in_job()[0]) if "rng" in self._with else {})}

    def _kept_by_stock(self, saved: SavedState) -> Iterator[tuple[str, Any]]:
        """Yield items and schedulers that stock DCP stored at the top level.

        Torchtitan and others do.
        """
        entries = saved.sharded.get(_PART, {})
        if saved.world_size is None:
            for name, each in (self._shared | self._items).items():
                if under(entries, *_path(name)):
                    yield name, each

    def _check_present(self, entries: SavedEntries, saved: SavedState) -> None:
        tops = {path[:2] for path in entries}
        has_model = any(path[0] == "model" for path in tops) or "model" not in self._with or base_names(saved)
        # A model without parameters and buffers has no entries.
        missing = [] if has_model or not any(leaves(model_state(self._model))) else ["model"]
        missing += [name for name in self._optimizers if not under(entries, *_path(name))]
        # Directories that stock DCP wrote have no shared items; `apply` reports what stays unchanged.
        if saved.world_size is not None:
            missing += [name for name in self._shared if name not in saved.shared]
            missing += [
                name for name in self._items if name not in saved.shared and ("items", name) not in tops
            ]
        if missing:
            names = ", ".join(missing)
            bare = "model" in missing and tops >= {(name,) for name in model_state(self._model)}
            there = ", ".join(sorted({str(path[0]) for path in tops}))
            advice = f"to load the rest, leave {names} out of the items to load"
            if saved.world_size is None:
                advice = _BARE if bare else _AS_STOCK.format(there)
            raise IncompatibleCheckpointError(f"the checkpoint has no {names}; {advice}", missing=missing)

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        if self._begun is None or self._begun[0] is not saved:
            self.begin(loaded, saved)
        tree, (_, notes) = loaded.get(_PART, {}), self._begun or (None, [])
        self._begun = None
        self._target.apply(loaded, saved, strict=not saved.include)
        inside = [(("items", name), item) for name, item in self._items.items()]
        for path, item in [*inside, *((_path(name), each) for name, each in self._kept_by_stock(saved))]:
            if (state := get(tree, path)) is not None:
                load_item(".".join(path).removeprefix("items."), item, state, of_tree=True)
        notes += self._apply_gradients(tree, saved)
        if "rng" in self._with:
            # Last: making the iterator of a loader draws from the global generator.
            notes += _apply_rng(saved, tree)
            await_training(self._dataloaders.values(), partial(load_rng_state, rng_state()))
        for note in notes:
            _log.warning("%s", note)
        return notes

    @property
    def _gradients(self) -> Gradients:
        return Gradients(model=self._model, optimizers=self.optimizers)

    def _apply_gradients(self, tree: Mapping[str, Any], saved: SavedState) -> Iterator[str]:
        if _GRADIENTS in self._with and _GRADIENTS in saved.shared:
            self._gradients.put_back(tree.get(_GRADIENTS, {}))
        elif _GRADIENTS in self._with:
            yield "the checkpoint was saved without gradients=True; gradients are unchanged"
        elif "model" in self._with and self._optimizers and under(saved.sharded.get(_PART, {}), _GRADIENTS):
            yield (
                "the checkpoint was saved within an accumulation window, and its gradients are not loaded "
                "without gradients=True: the first optimizer step is made of fewer batches than others"
            )

    def begin(
        self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState
    ) -> Callable[[], Sequence[Path]]:
        """Put back schedulers, scaler, small items and data positions.

        A loader that refuses its position may have changed; everything else is unchanged then. What is undone
        returns the items and loaders that are not quite as before.
        """
        generators = rng_state()
        undo: list[Callable[[], Sequence[Path]]] = []

        def roll_back() -> list[Path]:
            left = [path for each in reversed(undo) for path in each()]
            load_rng_state(generators)
            self._begun = None
            return left

        tree = loaded.get(_PART, {})
        try:
            self._target.begin(loaded, saved)
            for name, item in self._items.items():
                check_kind(item, saved.shared.get(name, get(tree, ("items", name))), fit=fit_of(saved))
            notes = list(self._apply_small(tree, saved, undo))
        except BaseException:
            roll_back()
            raise
        self._begun = saved, notes
        return roll_back

    def check_override(self, change: Override) -> None:
        change.check({name: each.param_groups for name, each in self._torch_optimizers.items()})

    def override(self, change: Override) -> None:
        schedulers = [each for name, each in self._shared.items() if name.partition(".")[0] == "scheduler"]
        change.apply(self._torch_optimizers, schedulers)

    @property
    def _torch_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        return {name.partition(".")[2]: unwrap_optimizer(each) for name, each in self._optimizers.items()}

    def weights(self) -> StateSource | None:
        return self.select({"model"}) if "model" in self._with else None

    def takes_all(self, saved: SavedState) -> bool:
        tops = {str(path[0]) for entries in saved.sharded.values() for path in entries}
        return tops & {"model", "optimizer"} <= self.names

    def _apply_small(
        self, tree: Mapping[str, Any], saved: SavedState, undo: list[Callable[[], Sequence[Path]]]
    ) -> Iterator[str]:
        by_stock = dict(self._kept_by_stock(saved))
        for name, each in (self._shared | self._items).items():
            if name in by_stock:
                continue  # its tensors are not read yet
            if name in saved.shared:
                undo.append(_undo(name, each))
                load_item(name, each, saved.shared[name])
            elif name not in self._items or get(tree, ("items", name)) is None:
                yield f"the checkpoint has no {name}; it is unchanged"
        same_ranks = saved.world_size in {None, place_in_job()[1]}
        added = saved.shared.get(POSITIONS, {})
        for name, position in self._dataloaders.items():
            state = saved.per_rank.get(name, added.get(name))
            if state is None:
                yield f"the checkpoint has no position of {name}; it keeps its own"
            else:
                undo.append(partial(_forget, name, position))
                yield from (f"{name}: {note}" for note in position.restore(state, same_ranks=same_ranks))


def _undo(name: str, item: Any) -> Callable[[], Sequence[Path]]:
    before = copy.deepcopy(function_free(item.state_dict()))
    known = {path for path, _ in leaves(before)}

    def undo() -> Sequence[Path]:
        if isinstance(item, Counters):
            vars(item).clear()
        load_item(name, item, before)
        # Many a `load_state_dict` adds to what is there.
        return [(name, *path) for path, _ in leaves(function_free(item.state_dict())) if path not in known]

    return undo


def _forget(name: str, position: LoaderPosition) -> Sequence[Path]:
    """Forget a position; samplers and datasets have been changed for good."""
    position.forget()
    return [(name,)]


def _apply_rng(saved: SavedState, tree: Mapping[str, Any]) -> Sequence[str]:
    own = saved.per_rank.get("rng", tree.get(rng_item(place_in_job()[0])))
    if own is not None:
        return load_rng_state(own)
    if _SEED not in saved.shared:
        return ["the checkpoint has no states of random number generators; they are unchanged"]
    rank = place_in_job()[0]
    derive_rng(saved.shared[_SEED], rank)
    return [
        f"rank {rank} was not among the {saved.world_size} that saved; "
        "its random numbers are derived from rank 0's"
    ]


def _named(name: str, value: Several[Any]) -> Iterator[tuple[str, Any]]:
    """Yield `value` under `name`, or several values under `name.<key>`."""
    if isinstance(value, Mapping):
        yield from ((f"{name}.{key}", each) for key, each in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"{name}.{index}", each) for index, each in enumerate(value))
    elif value is not None:
        yield name, value


def _path(name: str) -> tuple[str, ...]:
    """Split `optimizer.<name>` into a path of two; names may have dots."""
    return tuple(name.split(".", 1))


def _only(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: each for name, each in values.items() if name.partition(".")[0] in names}


State: TypeAlias = StateSource | Mapping[str, Any]


def as_source(state: State, items: Collection[str] | None = None) -> StateSource:
    """Return the state as a `StateSource` of only the given items."""
    if isinstance(state, TrainState) and items is not None:
        return state.select(items)
    if isinstance(state, StateSource):
        return state
    if isinstance(state, Mapping):
        return DictState(state)
    raise ConfigError(
        f"a {type(state).__name__} is no training state: give TrainState(model=..., optimizer=...), "
        "or a mapping of tensors and objects with state_dict and load_state_dict"
    )


def checked_override(state: State, override: Any) -> Override:
    """Return what a user asks to change, if it can be changed in a state."""
    source, change = as_source(state), Override.of(override)
    if change:
        source.check_override(change)
    return change


def as_captured(state: State | CapturedState) -> CapturedState:
    """Return the present state; see `StateSource.capture`."""
    return state if isinstance(state, CapturedState) else as_source(state).capture()
