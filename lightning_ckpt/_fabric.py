"""`setup_fabric`: `fabric.save` and `fabric.load` of one Fabric, made by the core."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, TypeAlias, Unpack, final

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

from ckpt_core.coordination import Coordinator
from ckpt_core.data import tell_of_missing, track
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.hosting import CheckpointPath, ManagersByRoot, RunRoot, attach, attached_to, detach
from ckpt_core.manager import CheckpointManager
from ckpt_core.options import CheckpointOptions, shows_options
from ckpt_core.policies import Counts, RetentionPolicy, SavePolicy
from ckpt_core.saving import SaveHandle
from ckpt_core.state import (
    Contents,
    StateSource,
    Trained,
    TrainState,
    contents_problem,
    is_of_base,
    owner,
)
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink
from ckpt_core.types import CapturedState, SavedState
from ckpt_core.validation import boolean, require
from lightning_ckpt._ckpt_path import found_at, load_stock, path_of
from lightning_ckpt._options import Settings
from lightning_ckpt._session import refuse_what_is_passed_over
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
        rng = bool(self.optimizers) if rng is None else rng
        rest = TrainState(
            model=nn.Module(),
            dataloader=dict(self.loaders),
            rng=rng and not {"rng", "rng_seed"} & self.plain.keys(),
            **items,
        )
        self._state = rest.select(rest.names - {"model"}).training(self._trained)

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

    def _trained(self) -> Trained:
        return Trained(
            {(_PART, key): model for key, model in self._models.items()},
            {(_PART, key): (self._home(each), each) for key, each in self.optimizers.items()},
            contents=self._contents,
            check=self._require,
            apart=True,
        )

    def _require(self, saved: SavedState, lacking: Sequence[tuple[str, ...]]) -> None:
        if not lacking or not saved.strict:
            return
        missing = sorted(key for _, key in lacking)
        tops = {str(path[0]) for path in saved.sharded.get(_PART, {})} - {_ITEMS}
        raise IncompatibleCheckpointError(
            f"the checkpoint has no {', '.join(missing)}; of models and optimizers it has "
            f"{', '.join(sorted(tops)) or 'none'}: use the keys that were saved, or strict=False",
            missing=missing,
        )

    def capture(self) -> CapturedState:
        captured = self._state.capture()
        tree, shared = dict(captured.sharded[_PART]), dict(captured.shared)
        local = dict(captured.local)
        for key in self._filters.keys() & self._models.keys():
            whole, tree[key] = tree[key], self._filtered(key, tree[key])
            for name in whole.keys() - tree[key].keys():
                local.pop((_PART, f"{key}.{name}"), None)
        if self.iterations:
            shared[_EPOCHS] = {
                key: max(0, count - (not captured.per_rank[f"{_LOADERS}.{key}"].get("ended", False)))
                for key, count in self.iterations.items()
            }
        for key in self._filters.keys() & self.plain.keys():
            shared[_item(key)] = PlainValue(self._filtered(key, self.plain[key].value)).state_dict()
        return replace(captured, sharded={_PART: tree}, shared=shared, local=local)

    def _filtered(self, key: str, values: Mapping[str, Any]) -> Mapping[str, Any]:
        return {name: value for name, value in values.items() if self._filters[key](name, value)}

    def target(self, saved: SavedState) -> dict[str, dict[str, Any]]:
        return self._state.target(saved)

    def begin(
        self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState
    ) -> Callable[[], Sequence[tuple[str | int, ...]] | None]:
        return self._state.begin(loaded, saved)

    def apply(self, loaded: Mapping[str, Mapping[str, Any]], saved: SavedState) -> Sequence[str]:
        self.saved = saved
        return self._state.apply(loaded, saved)

    def takes_all(self, saved: SavedState) -> bool:
        return {str(path[0]) for path in saved.sharded.get(_PART, {})} - {_ITEMS} <= self._tensors

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


LAST: Final = "last"
"""The path that stands for the newest checkpoint of the root that verifies."""

_COUNTER: Final = "_num_iter_calls"
_STOCK: Final = "_ckpt_stock_class"
_logger = logger_of(__name__)


@shows_options(ends=False, sinks=(), contents=None, log_costs=True)
def setup_fabric(
    fabric: Any,
    root: str | os.PathLike[str] | Storage,
    *,
    save: SavePolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    keep: RetentionPolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    step: str = "step",
    **options: Any,
) -> FabricCheckpoints:
    """Make `fabric.save`, `load` and `load_raw` asynchronous, sharded and committed.

    Call it on every rank, before or after `fabric.launch()`. A second call for the same Fabric replaces the
    first.

    Args:
        fabric: of `lightning` or `lightning_fabric`, on one device, DDP, FSDP or ModelParallelStrategy.
        root: directory, URL (`s3://bucket/run`) or `Storage` of the run.
        save: when `maybe_save` saves; `fabric.save` always does.
        keep: what to keep in `root`; everything if None.
        step: the key of the state that counts steps; without it, saves are counted.
        **options: `contents` ("all" of the models, or "trainable", which refers to what is frozen; the
            default for PEFT models), `sinks`, `log_costs` (whether the loggers receive what each save has
            cost; True), and the other fields of `CheckpointOptions` but `on_exception`.

    Raises:
        ConfigError: an option is wrong, or the strategy hides its state.
    """
    package = _package_of(fabric)
    refuse_what_is_passed_over(fabric.strategy)
    sinks: Sequence[Sink] = options.pop("sinks", ())
    contents: Contents | None = options.pop("contents", None)
    log_costs: bool = options.pop("log_costs", True)
    require("setup_fabric", contents_problem(contents), boolean("log_costs", log_costs))
    settings = Settings(
        own=RunRoot.of(root),
        options=CheckpointOptions.from_mapping({"save": save, "keep": keep, **options}),
        save_last=False,
        sinks=sinks,
        contents=contents,
        log_costs=log_costs,
    )
    settings.options.refuse_ends("Fabric")
    if (attached := attached_to(fabric)) is not None:
        attached.close()
    wrappers = importlib.import_module(f"{package}.wrappers")
    checkpoints = FabricCheckpoints(fabric, settings, unwrap=wrappers._unwrap_objects, step=step)
    attach(fabric, checkpoints, {name: getattr(checkpoints, name) for name in _SHADOWED})
    return checkpoints


def _package_of(fabric: Any) -> str:
    """Return a Fabric's package: `lightning.fabric` or `lightning_fabric`."""
    for cls in type(fabric).__mro__:
        package, _, module = cls.__module__.rpartition(".")
        if cls.__name__ == "Fabric" and module == "fabric" and package:
            return package
    raise ConfigError(
        f"setup_fabric() takes a Fabric, not a {type(fabric).__name__}; for a Trainer there is the callback "
        "lightning_ckpt.ShardedCheckpoint"
    )


_SHADOWED: Final = ("save", "load", "load_raw", "setup_dataloaders")


@final
class FabricCheckpoints:
    """The checkpoints of one Fabric.

    `save`, `load`, `load_raw` and `setup_dataloaders` are those of the Fabric, too.

    - Threads: all methods on the thread that trains.
    - Ranks: every method is collective, `preempted` excepted.

    Args:
        unwrap: Fabric's own function that takes its wrappers off a state.
        step: the key of the state that counts steps.
    """

    def __init__(self, fabric: Any, settings: Settings, *, unwrap: Callable[[Any], Any], step: str) -> None:
        self._fabric = fabric
        self._stock = SimpleNamespace(**{name: getattr(fabric, name) for name in _SHADOWED})
        self._settings = settings
        self._unwrap = unwrap
        self._step = step
        self._counts: dict[str, int] = {}
        self._asks = 2
        self._managers = ManagersByRoot(self._make, deadline_seconds=settings.options.deadline_seconds)
        self._once = self._managers.once

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the root."""
        return self._managers.at(str(self._settings.root))

    @property
    def preempted(self) -> bool:
        """Whether a preemption that stops training was announced to any rank."""
        return self._managers.preempted

    def maybe_save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        metrics: Mapping[str, float] | None = None,
        total_steps: int | None = None,
        **counts: Unpack[Counts],
    ) -> SaveHandle | None:
        """Save if the save policy requires it; see `CheckpointManager.maybe_save`."""
        manager = self.manager
        reason = manager.due(step, total_steps=total_steps, **counts)
        if reason is None:
            return None
        self._managers.wait(but=manager)
        return manager.save(step, self._source(state), metrics=metrics, annotations={"reason": reason})

    def save(
        self,
        path: str | os.PathLike[str],
        state: Mapping[str, Any],
        filter: Filters | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
    ) -> SaveHandle | None:
        """Save now, under this path; return once everything is copied.

        Args:
            path: of the checkpoint, a directory afterwards; its parent is the root. If there is a checkpoint
                of that name, it is replaced once the new one is complete.
            state: as Fabric takes it: modules, optimizers, loaders, objects with state, plain values.
            filter: key of a model or dictionary -> function of name and value that returns whether to save.
            metrics: numbers for `KeepBest`.

        Raises:
            SaveError: it could not start, or the save before has failed.
            ConfigError: the path or the state cannot be saved.
        """
        place = path_of(self._once(lambda: os.fspath(path)))
        if str(place) == self._settings.root:
            raise ConfigError(
                f"{place} is the root: give the path of a checkpoint in it, such as {place}/last"
            )
        manager = self._managers.at(place.root)
        self._managers.wait(but=manager)
        return manager.save(
            self._step_of(state, place.root, manager),
            self._source(state, filter),
            name=place.name,
            metrics=metrics,
            annotations={"reason": "asked for by path"},
        )

    def load(
        self,
        path: str | os.PathLike[str],
        state: dict[str, Any] | None = None,
        strict: bool = True,  # noqa: FBT001, FBT002 - Fabric's signature
        *,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint into `state`, in place; return its other values.

        Random number generators are put back if the state has an optimizer.

        Args:
            path: a checkpoint of ours or of Fabric's; a root, which stands for its newest that verifies; or
                "last", which stands for that of our root, and for nothing, with a line in the log, as long as
                there is none.
            state: as at the save, or a part of it; if None, everything is read into new memory on each rank.
            strict: whether the checkpoint must have every key, and every name of a model.
            weights_only: False lets Fabric unpickle its own files.

        Raises:
            CheckpointError: see `CheckpointManager.load`; nothing was touched.
        """
        self._track(list((state or {}).values()))
        text = self._once(lambda: os.fspath(path))
        if text != LAST:
            stock = partial(self._stock.load, text, state, strict)
            return self._load_from(text, stock, state, strict=strict, weights_only=weights_only)
        self._managers.wait()
        manager = self.manager
        if not self._once(lambda: bool(manager.checkpoints(abandoned=True))):
            # A resume says whether there is really nothing, and takes the root.
            manager.resume(self._target(state) if state else NewMemory())
            return {}
        return self._load(CheckpointPath(str(self._settings.root)), state, strict=strict)

    def load_raw(
        self,
        path: str | os.PathLike[str],
        obj: Any,
        strict: bool = True,  # noqa: FBT001, FBT002 - Fabric's signature
        *,
        weights_only: bool | None = None,
    ) -> None:
        """Load a module from the `model` of a checkpoint, or from a file of its own.

        An optimizer is loaded from a file of its own only.

        Raises:
            CheckpointError: see `load`.
        """
        text = self._once(lambda: os.fspath(path))
        stock = partial(self._stock.load_raw, text, obj, strict)
        self._load_from(text, stock, {"model": obj}, strict=strict, weights_only=weights_only)

    def _load_from(
        self,
        path: str,
        stock: Callable[..., dict[str, Any] | None],
        state: dict[str, Any] | None,
        *,
        strict: bool,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Load what is at a path; what Fabric wrote by itself with its own `stock`."""
        self._managers.wait()
        found = self._once(lambda: found_at(path, self._settings.readable_at))
        if found is not None:
            return self._load(CheckpointPath(*found), state, strict=strict)
        return load_stock(
            path,
            lambda **trust: stock(**trust) or {},
            self._fabric.strategy,
            self._settings.options,
            trusted=weights_only is False,
            once=self._once,
        )

    def setup_dataloaders(self, *loaders: Any, **options: Any) -> Any:
        """Set up loaders as Fabric does, and follow their position."""
        found = self._stock.setup_dataloaders(*loaders, **options)
        self._track(found if isinstance(found, list) else [found])
        return found

    def _track(self, values: list[Any]) -> None:
        for value in self._unwrap(values):
            if isinstance(value, DataLoader):
                track(value)

    def wait(self) -> None:
        """Wait for every save in flight.

        Raises:
            SaveError: one failed.
        """
        self._managers.wait()

    def close(self) -> None:
        """Wait for every save, release the roots, and give Fabric its own methods back.

        Idempotent. A script that ends without it has closed at exit.

        Raises:
            SaveError: a save in flight failed.
        """
        if attached_to(self._fabric) is self:
            detach(self._fabric)
        self._managers.close()

    def _make(self, root: str, coordinator: Coordinator) -> CheckpointManager:
        manager = self._settings.manager(root, coordinator, training=True, log=self._fabric.log_dict)
        if root != self._settings.root:
            manager.start_afresh()  # elsewhere only the user's names show what belongs together
        return manager

    def _source(self, state: Mapping[str, Any], filters: Filters | None = None) -> FabricState:
        source = FabricState(self._unwrap(dict(state)), filters=filters, contents=self._settings.contents)
        if source.optimizers and self._asks:
            how = 'fabric.save(path, {..., "loader": loader}), and the same to fabric.load'
            self._asks = self._asks - 1 if not source.loaders and tell_of_missing(how) else 0
        counts = {key: getattr(state[key], _COUNTER, None) for key in source.loaders}
        source.iterations = {key: count for key, count in counts.items() if count is not None}
        return source

    def _target(self, state: Mapping[str, Any]) -> FabricState:
        return FabricState(self._unwrap(dict(state)), rng=None, contents=self._settings.contents)

    def _step_of(self, state: Mapping[str, Any], root: str, manager: CheckpointManager) -> int:
        """Return the step in a state, else one more than that of the last save there."""
        given = state.get(self._step)
        if isinstance(given, int) and not isinstance(given, bool):
            return given
        if isinstance(given, torch.Tensor) and given.numel() == 1 and not given.is_floating_point():
            return int(given)
        if root not in self._counts:
            steps = self._once(lambda: [info.step for info in manager.checkpoints(abandoned=True)])
            self._counts[root] = max(steps, default=0)
        self._counts[root] += 1
        return self._counts[root]

    def _load(self, place: CheckpointPath, state: dict[str, Any] | None, *, strict: bool) -> dict[str, Any]:
        manager = self._managers.at(place.root)
        if not state:
            memory = NewMemory()
            manager.load(memory, name=place.name or None)
            return everything(memory)
        source = self._target(state)
        if source.optimizers and strict and not place.name and place.root == self._settings.root:
            manager.resume(source)
        else:
            manager.load(source, name=place.name or None, strict=strict)
        if source.optimizers and strict:
            self._managers.loaded(manager)
        state.update({key: plain.value for key, plain in source.plain.items()})
        for key, epoch in (source.saved.shared.get(_EPOCHS, {}) if source.saved else {}).items():
            if hasattr(loader := state.get(key), _COUNTER):
                setattr(loader, _COUNTER, epoch)
                loader.__class__ = _begun_at_once(type(loader))
        return source.remainder


def _begun_at_once(stock: type[Any]) -> type[Any]:
    """Return the class of a loader that `iter` lets go on within its epoch.

    Fabric's own begins a pass with the first batch. With `zip` the end of another loader comes before that,
    and the rest of this epoch would take the place of the next. Afterwards its class is stock again.
    """
    if _STOCK in vars(stock):
        return stock

    def __iter__(self: Any) -> Any:  # noqa: N807 - it is a method of the class below
        tracker = track(self._dataloader)
        replay = tracker.next
        if replay is None or replay.fresh:
            self.__class__ = stock
            return stock.__iter__(self)
        if replay is tracker.replay:  # and not after a look, which counts for nothing
            setattr(self, _COUNTER, getattr(self, _COUNTER) + 1)
        begun = copy.copy(self)
        begun._dataloader = iter(self._dataloader)
        return stock.__iter__(begun)

    return type(
        stock.__name__, (stock,), {"__module__": stock.__module__, "__iter__": __iter__, _STOCK: stock}
    )
