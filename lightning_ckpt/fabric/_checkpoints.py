"""`setup_fabric`: `fabric.save` and `fabric.load` of one Fabric, made by the core."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, Unpack, final

import torch
from torch.utils.data import DataLoader

from ckpt_core.coordination import Coordinator
from ckpt_core.data import tell_of_missing, track
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError
from ckpt_core.hosting import CheckpointPath, Kind, ManagersByRoot, RunRoot, attach, attached_to, detach
from ckpt_core.manager import CheckpointManager
from ckpt_core.options import CheckpointOptions, shows_options
from ckpt_core.policies import Counts, RetentionPolicy, SavePolicy
from ckpt_core.saving import SaveHandle
from ckpt_core.state import Contents, contents_problem
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink
from ckpt_core.validation import boolean, require
from lightning_ckpt._ckpt_path import kind_at, load_stock, path_of, refuse_unjudged
from lightning_ckpt._options import Settings
from lightning_ckpt._session import refuse_what_is_passed_over
from lightning_ckpt._state import NewMemory
from lightning_ckpt.fabric._state import FabricState, Filters, everything

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
    given = {"save": save, "keep": keep, **options}
    settings = Settings(
        own=RunRoot.of(root),
        options=CheckpointOptions.from_mapping(given),
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
        deadline = settings.options.deadline_seconds
        self._managers = ManagersByRoot(self._make, deadline_seconds=deadline)
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
        kind = self._once(lambda: kind_at(path, self._settings.readable_at))
        if kind is not Kind.STOCK:
            return self._load(path_of(path, kind), state, strict=strict)
        options = self._settings.options
        refuse_unjudged(path, options, host="Fabric")
        return load_stock(
            path,
            lambda **trust: stock(**trust) or {},
            type(self._fabric.strategy),
            trusted=weights_only is False or options.allow_pickle,
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
        for key, epoch in source.epochs.items():
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
