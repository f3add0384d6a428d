"""`enable`, `disable`, and the `AcceleratorCheckpoints` that they attach."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack, final

import numpy as np
import torch
from accelerate import Accelerator

from accelerate_ckpt._host_calls import UNSUPPORTED
from accelerate_ckpt._progress import Progress, Window, steps_made
from accelerate_ckpt._roll_call import RollCall
from accelerate_ckpt._roots import Roots, Settings, found_at, newest_stock, torn_in
from accelerate_ckpt._small_files import load_by_stock, read_small
from accelerate_ckpt._state import AcceleratorState, model_part
from ckpt_core import (
    CheckpointInfo,
    CheckpointManager,
    CheckpointNotFoundError,
    ConfigError,
    SaveHandle,
    UnsafeCheckpointError,
)
from ckpt_core.collective import collective_phase
from ckpt_core.commit import Occupant, require_trusted
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ALLOW_PICKLE
from ckpt_core.groups import local_part
from ckpt_core.hosting import CheckpointPath, attach, attached_to, detach, ranking
from ckpt_core.names import METADATA
from ckpt_core.options import CheckpointOptions, shows_options
from ckpt_core.policies import Counts, RetentionPolicy, SavePolicy
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink


@final
class Metrics:
    """Remembers what was logged at the present step; main thread only.

    Args:
        keep: the policy whose `KeepBest` rank checkpoints. A best value at a step that is never saved is lost
            to them, of which a warning is logged once; None logs none.
    """

    def __init__(self, keep: RetentionPolicy | None) -> None:
        self._wanted = {each.metric: each for each in ranking(keep)}
        self._measured: dict[str, tuple[int, float]] = {}
        self._best: dict[str, float] = {}
        self._said = keep is None

    def note(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            scalar = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            number = value.item() if scalar else value
            if type(number) in {int, float}:
                self._miss(name)
                self._measured[name] = step, float(number)

    def at(self, step: int) -> dict[str, float]:
        return {name: value for name, (measured, value) in self._measured.items() if measured == step}

    def saved(self, step: int, values: Mapping[str, float]) -> None:
        for name in self._wanted.keys() & values.keys():
            if name in self.at(step):  # what was given by hand counts, not what was logged
                self._measured[name] = step, values[name]
            if self._improves(name, values[name]):
                self._best[name] = values[name]

    def forget(self) -> None:
        """Forget all measurements: training continues from another state."""
        for name in self._wanted:
            self._miss(name)
        self._measured.clear()
        self._best.clear()

    def _miss(self, name: str) -> None:
        """Warn, once, of a best measurement about to be forgotten that was not saved."""
        if self._said or name not in self._wanted or name not in self._measured:
            return
        step, value = self._measured[name]
        if step == 0 or not self._improves(name, value):
            return
        self._said = True
        _logger.warning(
            "%s=%g, logged at step %d, is the best so far, but step %d was not saved after that, so that "
            "%r cannot keep it (this is logged once). Where you evaluate, call accelerator.log() and then "
            "save_state(), or accelerate_ckpt.checkpoints(accelerator).save(), which saves whatever the save "
            "policy says",
            name, value, step, step, self._wanted[name],
        )  # fmt: skip

    def _improves(self, name: str, value: float) -> bool:
        if name not in self._best or not math.isfinite(value):
            return math.isfinite(value)
        return value < self._best[name] if self._wanted[name].mode == "min" else value > self._best[name]


_logger = logger_of(__name__)

ENDED = 143
"""Exit code of a preempted script that does not check for it: that of a shell after SIGTERM."""

_SHADOWED = {
    "save_state": "_save_state",
    "load_state": "load",
    "end_training": "_end_training",
    "free_memory": "_free_memory",
    "log": "_log",
    "prepare_optimizer": "_prepare_optimizer",
    "prepare_data_loader": "_prepare_data_loader",
}
"""Methods of the accelerator, and those of ours that replace them."""


@final
class AcceleratorCheckpoints:
    """The checkpoints of one accelerator.

    - Threads: all methods on the thread that trains.
    - Ranks: every method but `latest` and `note_metrics` is collective: call it on every process. A save that
      the main process alone comes to is made by it alone, if models are replicas.

    Attributes:
        implicit: whether the script did not ask for it: it may still call `enable`, and a preemption ends it,
            because it does not check for one.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        settings: Settings,
        sinks: Sequence[Sink] = (),
        *,
        implicit: bool = False,
    ) -> None:
        self.implicit = implicit
        self.progress = Progress(accelerator)
        self.stock = SimpleNamespace(**{name: getattr(accelerator, name) for name in _SHADOWED})
        self._accelerator = accelerator
        self._gated = settings.options.save is not None
        self._settings = settings
        self._metrics = Metrics(settings.options.keep if accelerator.is_main_process else None)
        self._batches_seen = -1
        self._roots = Roots(accelerator, settings, sinks, listen=not implicit)
        self._roots.continue_numbering()
        self._roll_call = RollCall(accelerator, settings.options.deadline_seconds)

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the root for automatic names, or of the only root.

        Raises:
            ConfigError: there is neither.
        """
        return self._roots.only()

    @property
    def step(self) -> int:
        """Number of optimizer steps, those before the last load included."""
        return self.progress.step

    @property
    def preempted(self) -> bool:
        """Whether the last look found a preemption that stops training, on any rank."""
        return self._roots.managers.preempted

    def check_preemption(self) -> bool:
        """Look for a preemption and return `preempted`, where nothing is saved.

        It is for code that does not call `save_state`, such as an evaluation.

        Collective where the save policy has an `OnPreemption`; the next `save_state` then saves.
        """
        for manager in self._roots.managers:
            manager.due()
        return self.preempted

    def directory(
        self, output_dir: str | os.PathLike[str] | None = None, handle: SaveHandle | None = None
    ) -> str:
        """Return the path or URL that `save(output_dir)` would save to now.

        Args:
            output_dir: as given to `save`.
            handle: what `save` has returned, to name that checkpoint instead.

        Raises:
            ConfigError: there is no directory to save to.
        """
        place = self._roots.place(output_dir)
        return str(place if handle is None else CheckpointPath(place.root, handle.name))

    def save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        safe_serialization: bool = True,
    ) -> SaveHandle | None:
        """Save now, whatever the save policy says.

        Returns None if a save is in flight and `back_pressure` is `skip`.

        Args:
            output_dir: directory or URL; the next automatic name if None, or if automatic naming is on.
            metrics: numbers for `KeepBest`, beside those that went through `accelerator.log`.
            safe_serialization: as in the stock `save_state`.

        Raises:
            SaveError: it could not start, or the save before has failed.
            ConfigError: there is no directory to save to.
        """
        if not self._takes_part():
            return None
        return self._save(self._roots.place(output_dir), metrics or {}, "call", safe=safe_serialization)

    def maybe_save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        safe_serialization: bool = True,
        total_steps: int | None = None,
        **counts: Unpack[Counts],
    ) -> SaveHandle | None:
        """Save if the save policy says so, or if there is none, as `save_state` does.

        See `save`; `total_steps`, `epochs` and `tokens` are for policies that need them.

        Where it is called for every batch, the save policy is only asked when an optimizer step is complete.

        Raises:
            ConfigError: the save policy needs a count that is not given.
        """
        reason: str | None = "call"
        if not self._takes_part():
            return None
        place, options = self._roots.place(output_dir), self._settings.options
        if self._gated or options.counts:
            if self._gated and self._within_window():
                return None
            _require_counts(options, total_steps=total_steps, **counts)
            due = self._roots.managers.at(place.root).due(self.step, total_steps=total_steps, **counts)
            reason = due if self._gated else reason
        if reason is None:
            return None
        return self._save(place, metrics or {}, reason, safe=safe_serialization)

    def load(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of ours, or one of stock Accelerate.

        Ours may be of any strategy and any number of ranks.

        Args:
            input_dir: directory or URL; the newest that verifies if None. If there is none yet, training
                starts afresh, and the log says so.
            load_kwargs: as in the stock `load_state`.
            load_model_func_kwargs: as in the stock `load_state`; `strict=False` leaves what does not fit in
                the models as it is, with a warning.

        Raises:
            CheckpointNotFoundError: there is none of that name.
            CorruptCheckpointError: it is damaged or torn; nothing was touched.
            IncompatibleCheckpointError: it does not fit what was prepared; nothing was touched.
            UnsafeCheckpointError: it, or `load_kwargs`, needs `allow_pickle=True`; nothing was touched.
        """
        if not (self._settings.pickles.allowed or (load_kwargs or {}).get("weights_only", True)):
            raise UnsafeCheckpointError(
                'load_kwargs={"weights_only": False} lets a checkpoint run any code, and nothing was loaded. '
                f"If you trust who wrote it, give {ALLOW_PICKLE}"
            )
        arguments = {"load_kwargs": dict(load_kwargs) if load_kwargs else None, **load_model_func_kwargs}
        self.wait()
        if self._roll_call.was_missed():
            self._roots.part("without")
        self._metrics.forget()
        if input_dir is None:
            self._load_newest(arguments)
        else:
            self._load_place(CheckpointPath.of(input_dir), arguments)
        self._roots.continue_numbering()

    def latest(self) -> CheckpointInfo | None:
        """Return the newest committed checkpoint of `manager`, unverified."""
        return self.manager.latest()

    def wait(self) -> None:
        """Wait for every save in flight.

        Raises:
            SaveError: one failed.
        """
        self._roots.managers.wait()

    def note_metrics(self, values: Mapping[str, Any]) -> None:
        """Note logged numbers as metrics of a save of this step, and of no later one."""
        self._metrics.note(self.step, values)

    def begin_anew(self) -> None:
        """Forget optimizers, loaders and steps, as for a new training.

        What is prepared from now on belongs to that.

        Raises:
            SaveError: a save in flight failed; everything is forgotten all the same.
        """
        self._metrics.forget()
        self.progress.release()
        self._batches_seen = -1
        self._roots.begin_new_runs()

    def close(self) -> None:
        """Wait for every save in flight and release the roots; idempotent.

        Raises:
            SaveError: a save in flight failed.
        """
        self._metrics.forget()
        self._roots.close()

    def shadows(self) -> dict[str, Callable[..., Any]]:
        return {name: getattr(self, ours) for name, ours in _SHADOWED.items()}

    def _save_state(
        self,
        output_dir: str | None = None,
        safe_serialization: bool = True,  # noqa: FBT001, FBT002 - as in stock
        **_: Any,
    ) -> Path | str | None:
        handle = self.maybe_save(output_dir, safe_serialization=safe_serialization)
        if self.implicit and self.preempted:
            _logger.warning("preempted: the script ends here, with its last checkpoint committed")
            self._end_training()
            raise SystemExit(ENDED)
        if handle is None:
            return None
        where = self.directory(output_dir, handle)
        return where if "://" in where else Path(where)

    def _end_training(self) -> None:
        try:
            self.close()  # while the process group is still there
        finally:
            self.stock.end_training()

    def _free_memory(self, *objects: Any) -> Any:
        try:
            self.begin_anew()
        finally:
            freed = self.stock.free_memory(*objects)
        return freed

    def _log(self, values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.note_metrics(values)
        return self.stock.log(values, *args, **kwargs)

    def _prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = self.stock.prepare_optimizer(*args, **kwargs)
        self.progress.count(optimizer)
        return optimizer

    def _prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        return self.progress.loaders.prepare(self.stock.prepare_data_loader, *args, **kwargs)

    def _takes_part(self) -> bool:
        self._roots.part(who := self._roll_call.call())
        return who != "without"

    def _within_window(self) -> bool:
        """Return whether gradients accumulate, in a window whose end will be seen."""
        accelerator, seen = self._accelerator, self._batches_seen
        self._batches_seen = accelerator.step
        return not accelerator.sync_gradients and accelerator.step - seen in {0, 1}

    def _save(
        self, place: CheckpointPath, metrics: Mapping[str, float], reason: str, *, safe: bool
    ) -> SaveHandle | None:
        accelerator, manager = self._accelerator, self._roots.managers.at(place.root)
        if self._settings.override and manager is not self._roots.managers.origin:
            raise ConfigError(
                f"override= changes a training midway, and nothing was loaded from {manager.storage.url}: "
                "call load_state() before the first save, and save to the directory that it loads from; or "
                "begin with these values in the script and without override="
            )
        with_gradients = self._settings.gradients
        if Window(accelerator, gradients=with_gradients).is_open and not with_gradients:
            _logger.warning(
                "saving %s within an accumulation window: the gradients accumulated so far are not saved, so "
                "a resumed run is not exact; save when accelerator.sync_gradients is true, or give enable() "
                "gradients=True",
                place.name,
            )
        measured = {**self._metrics.at(self.step), **metrics}
        annotations = {
            "framework": "accelerate",
            "strategy": accelerator.distributed_type.value,
            "reason": reason,
        }
        state = self._state(manager, replace(self._settings, safe=safe))
        with self._roll_call.watching():
            handle = manager.save(
                self.step, state, metrics=measured, annotations=annotations, name=place.name
            )
        if handle is not None:
            self._metrics.saved(self.step, measured)
            accelerator.project_configuration.iteration += 1
        return handle

    def _state(self, manager: CheckpointManager, settings: Settings) -> AcceleratorState:
        return AcceleratorState(
            self._accelerator,
            self.progress,
            coordinator=self._roots.managers.coordinator,
            storage=manager.storage,
            settings=settings,
        )

    def _load_newest(self, arguments: Mapping[str, Any]) -> None:
        manager, once = self._roots.only(), self._roots.managers.once
        manager.fetcher.fetch()
        state, strict = self._state(manager, self._settings), arguments.get("strict", True)
        if manager.options.init_from is not None and once(lambda: newest_stock(manager.storage)):
            manager.has_weights()
        if strict is True:
            found = manager.resume(state, override=self._settings.override.values) is not None
        elif found := once(lambda: bool(manager.checkpoints(abandoned=True))):
            manager.load(state, strict=strict, override=self._settings.override.values)
        if found:
            self._roots.managers.loaded(manager)
            self._tell(manager, state.restored)
            return
        if (name := once(lambda: newest_stock(manager.storage))) is not None:
            self._load_stock(manager, name, arguments)
            return
        manager.initialise(state)
        torn = once(lambda: torn_in(manager.storage))
        _logger.log(
            logging.WARNING if torn else logging.INFO,
            "nothing has been committed to %s yet%s: training starts afresh",
            manager.storage.url,
            f" ({', '.join(torn)}: interrupted saves, look at them with `ckpt ls`)" if torn else "",
        )

    def _load_place(self, place: CheckpointPath, arguments: Mapping[str, Any]) -> None:
        manager = self._roots.managers.at(place.root)
        manager.fetcher.fetch(name=place.name)
        storage, newest = manager.storage, "load_state() without a directory"
        kind = self._roots.managers.once(lambda: found_at(storage, place.name, newest=newest))
        if kind is Occupant.NOTHING:
            raise CheckpointNotFoundError(f"there is no checkpoint at {storage.url}/{place.name}")
        if kind is Occupant.STOCK:
            self._load_stock(manager, place.name, arguments)
        else:
            self._load_ours(manager, place.name, arguments)
            self._tell(manager, place.name)

    def _load_ours(self, manager: CheckpointManager, name: str, arguments: Mapping[str, Any]) -> None:
        strict, state = arguments.get("strict", True), self._state(manager, self._settings)
        manager.load(state, name=name, strict=strict, override=self._settings.override.values)
        self._roots.managers.loaded(manager)

    def _tell(self, manager: CheckpointManager, name: str) -> None:
        if self._accelerator.is_main_process:
            tell_restored(self.progress.step, manager.storage.url, name)

    def _load_stock(self, manager: CheckpointManager, name: str, arguments: Mapping[str, Any]) -> None:
        """Load what stock wrote; shards by the core: stock loses FSDP1's optimizer."""
        storage, accelerator, pickles = manager.storage, self._accelerator, self._settings.pickles
        _logger.info("%s/%s was written by stock Accelerate", storage.url, name)
        self._roots.managers.once(lambda: require_trusted(storage, name, manager.options.manifest_verifier))
        if storage.exists(f"{name}/{model_part(0)}/{METADATA}"):
            self._load_ours(manager, name, arguments)
        elif self._settings.override:
            raise ConfigError(
                f"override= changes checkpoints of ours, and stock Accelerate wrote {storage.url}/{name}: "
                "load it without, and save once"
            )
        elif (local := local_part(storage)) is None:
            raise ConfigError(
                f"{storage.url}/{name}: stock Accelerate reads what it wrote from local directories"
            )
        else:
            untouched = f"{storage.url}/{name} could not be read, and nothing was loaded"
            with collective_phase(self._roots.managers.coordinator, untouched, what="reading small files"):
                small = read_small(accelerator, storage, name, pickles, committed=False)
            with pickles.kept_from_others():
                load_by_stock(accelerator, self.stock, local.local_path(name), small, arguments=arguments)
        self.progress.restore(steps_made(self._accelerator._optimizers))
        self._tell(manager, name)


def _require_counts(options: CheckpointOptions, **counts: Any) -> None:
    missing = sorted(name for name in options.counts if counts.get(name) is None)
    if missing:
        raise ConfigError(
            f"save={options.save!r}, keep={options.keep!r} need the number of {' and '.join(missing)}, which "
            "save_state() does not know: call "
            "accelerate_ckpt.checkpoints(accelerator).maybe_save"
            f"({', '.join(f'{name}=…' for name in missing)}) in its place, or save by steps or seconds"
        )


@shows_options(ends=False, stock_files=False, gradients=False, contents=None, override=None, log_costs=True)
def enable(
    accelerator: Accelerator,
    root: str | os.PathLike[str] | Storage | None = None,
    *,
    save: SavePolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    keep: RetentionPolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    sinks: Sequence[Sink] = (),
    **options: Any,
) -> Accelerator:
    """Make `save_state` and `load_state` asynchronous, sharded and committed.

    Collective. What is not given here comes from `CKPT_SUITE_…` in the environment, then from the file that
    `CKPT_SUITE_CONFIG` names, then from the defaults. DeepSpeed, Megatron-LM and XLA keep their own
    checkpoints: the accelerator comes back unchanged, with a warning.

    Args:
        accelerator: any accelerator, before or after `prepare`.
        root: where `save_state()` without a directory saves, as `checkpoint_{n}`.
        save: which of the `save_state` calls save; every one if None. A call that is not due returns None.
        keep: which checkpoints stay; with automatic naming, `total_limit` if None, which also prunes those
            that are abandoned.
        sinks: receivers of telemetry events.
        stock_files: whether plain replicas also get `model.safetensors` and `optimizer.bin`, written by the
            main process while training waits, so that stock `load_state` reads them.
        gradients: whether a save within an accumulation window holds its gradients.
        contents: "all" of the models, or "trainable", which refers to what is frozen; the default for PEFT
            models.
        override: hyperparameters that `load_state` changes, such as `{"lr": 1e-4}`, once for all restarts.
        log_costs: whether the trackers receive `checkpoint/stall_ms`, `durable_s`, `bytes` and `overhead` of
            every save.
        **options: every other field of `CheckpointOptions` but `on_exception`.

    Raises:
        ConfigError: an option is wrong, or the accelerator is enabled already, or is none.
    """
    given: object = accelerator
    if not isinstance(given, Accelerator):
        of_transformers = any(each.__module__.startswith("transformers.") for each in type(given).__mro__)
        is_trainer = of_transformers and hasattr(given, "train_dataset")
        raise ConfigError(
            f"enable() takes an accelerate.Accelerator, not a {type(given).__name__}"
            + ("; for a Trainer there is enable_trainer()" if is_trainer else "")
        )
    attached: AcceleratorCheckpoints | None = attached_to(accelerator)
    if attached is not None and not attached.implicit:
        raise ConfigError("this accelerator is enabled already; call accelerate_ckpt.disable() first")
    disable(accelerator)
    _attach(accelerator, Settings.resolve({"root": root, "save": save, "keep": keep, **options}), sinks)
    return accelerator


def enable_implicitly(accelerator: Accelerator) -> None:
    """Enable an accelerator for a script that does not; a later `enable` replaces it."""
    _attach(accelerator, Settings.resolve({}), implicit=True)


def _attach(
    accelerator: Accelerator, settings: Settings, sinks: Sequence[Sink] = (), *, implicit: bool = False
) -> None:
    """Replace methods of this instance; its class and other instances stay."""
    if accelerator.distributed_type in UNSUPPORTED:
        _logger.warning(
            "%s keeps its shards to itself: save_state and load_state stay as they are",
            accelerator.distributed_type.value,
        )
        return
    settings.options.refuse_ends("an Accelerator")
    attached = AcceleratorCheckpoints(accelerator, settings, sinks, implicit=implicit)
    attach(accelerator, attached, attached.shadows())


def disable(accelerator: Accelerator) -> Accelerator:
    """Wait for every save and put the accelerator's own methods back; idempotent.

    Raises:
        SaveError: a save in flight failed; the methods are back all the same.
    """
    attached = detach(accelerator)
    if attached is not None:
        attached.progress.release()
        attached.close()
    return accelerator


def checkpoints(accelerator: Accelerator) -> AcceleratorCheckpoints:
    """Return the checkpoints of an enabled accelerator.

    Raises:
        ConfigError: it is not enabled.
    """
    attached: AcceleratorCheckpoints | None = attached_to(accelerator)
    if attached is not None:
        return attached
    if accelerator.distributed_type in UNSUPPORTED:
        engine = accelerator.distributed_type.value
        raise ConfigError(f"{engine} keeps its own checkpoints: there are none of ckpt-suite's")
    raise ConfigError("this accelerator is not enabled: call accelerate_ckpt.enable(accelerator) first")


def tell_restored(step: int, root: str, name: str) -> None:
    """Say what a run goes on from, where a script without a logging setup shows it."""
    _logger.warning("Restored step %d of %s (checkpoint %s)", step, root, name)
