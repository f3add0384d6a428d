"""`enable`, `disable`, and the `AcceleratorCheckpoints` that they attach."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Unpack, final

from accelerate import Accelerator

from accelerate_ckpt._host_calls import UNSUPPORTED
from accelerate_ckpt._loading import Loading
from accelerate_ckpt._metrics import Metrics
from accelerate_ckpt._progress import Progress
from accelerate_ckpt._roll_call import RollCall
from accelerate_ckpt._roots import Roots
from accelerate_ckpt._settings import Settings
from accelerate_ckpt._small_files import Pickles
from accelerate_ckpt._state import AcceleratorState, CallArguments
from accelerate_ckpt._window import Window
from ckpt_core import CheckpointInfo, CheckpointManager, ConfigError, SaveHandle
from ckpt_core.cadence import Counts, SavePolicy, needed_counts
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import CheckpointPath, attach, attached_to, detach
from ckpt_core.options import shows_options
from ckpt_core.retention import RetentionPolicy
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink

_logger = logger_of(__name__)

ENDED = 143
"""Exit code of a preempted script that does not check for it: that of a shell after SIGTERM."""

_SHADOWED = (
    "save_state",
    "load_state",
    "end_training",
    "free_memory",
    "log",
    "prepare_optimizer",
    "prepare_data_loader",
    "skip_first_batches",
)


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
        self.progress = Progress.of(accelerator)
        self.stock = SimpleNamespace(**{name: getattr(accelerator, name) for name in _SHADOWED})
        self._accelerator = accelerator
        self._gated = settings.options.save is not None
        self._arguments = CallArguments(
            pickles=Pickles(allowed=settings.options.allow_pickle),
            stock_files=settings.stock_files,
            gradients=settings.gradients,
            contents=settings.contents,
        )
        self._metrics = Metrics(settings.options.keep if accelerator.is_main_process else None)
        self._batches_seen = -1
        self._roots = Roots(accelerator, settings, sinks, listen=not implicit)
        self._loading = Loading(
            accelerator,
            roots=self._roots,
            stock=self.stock,
            progress=self.progress,
            pickles=self._arguments.pickles,
            state=lambda manager: self._state(manager, self._arguments),
        )
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
        return self.progress.steps.step

    @property
    def preempted(self) -> bool:
        """Whether the last look found a preemption that stops training, on any rank."""
        return self._roots.preempted

    def check_preemption(self) -> bool:
        """Look for a preemption and return `preempted`, where nothing is saved.

        It is for code that does not call `save_state`, such as an evaluation.

        Collective where the save policy has an `OnPreemption`; the next `save_state` then saves.
        """
        return self._roots.check_preemption()

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
        place = self._roots.place(output_dir)
        return self._save(place, metrics or {}, "call", safe=safe_serialization)

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
        if self._gated:
            root = self._roots.root(output_dir)
            if self._within_window():
                return None
            manager = self._roots.managers.at(root)
            _require_counts(manager.options.save, counts)
            reason = manager.due(self.step, total_steps=total_steps, **counts)
        if reason is None:
            return None
        return self._save(self._roots.place(output_dir), metrics or {}, reason, safe=safe_serialization)

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
        arguments = {"load_kwargs": dict(load_kwargs) if load_kwargs else None, **load_model_func_kwargs}
        self.wait()
        if self._roll_call.was_missed():
            self._roots.part(alone=False)
        self._metrics.forget()
        if input_dir is None:
            self._loading.newest(arguments)
        else:
            self._loading.place(CheckpointPath.of(input_dir), arguments)
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

    def _takes_part(self) -> bool:
        """Return whether this rank saves, together or alone."""
        who = self._roll_call.call()
        if who != "all" or self._roots.is_alone:
            self._roots.part(alone=who == "alone")
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
        self._loading.require_change(manager)
        if Window(accelerator, gradients=self._arguments.gradients).is_lost:
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
        state = self._state(manager, replace(self._arguments, safe=safe))
        with self._roll_call.watching():
            handle = manager.save(
                self.step, state, metrics=measured, annotations=annotations, name=place.name
            )
        if handle is not None:
            self._metrics.saved(measured)
            accelerator.project_configuration.iteration += 1
        return handle

    def _state(self, manager: CheckpointManager, arguments: CallArguments) -> AcceleratorState:
        return AcceleratorState(
            self._accelerator,
            self.stock,
            self.progress,
            coordinator=self._roots.managers.coordinator,
            storage=manager.storage,
            arguments=arguments,
        )


def _require_counts(policy: SavePolicy | None, counts: Counts) -> None:
    missing = sorted(name for name in needed_counts(policy) if counts.get(name) is None)
    if missing:
        raise ConfigError(
            f"{policy!r} needs the number of {' and '.join(missing)}, which save_state() does not know: call "
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

    Collective. What is not given here comes from `CKPT_SUITE_…` in the environment, then from the `ckpt`
    section of the accelerate configuration, then from the defaults. DeepSpeed, Megatron-LM and XLA keep their
    own checkpoints: the accelerator comes back unchanged, with a warning.

    Args:
        accelerator: any accelerator, before or after `prepare`.
        root: where `save_state()` without a directory saves, as `checkpoint_{n}`.
        save: which of the `save_state` calls save; every one if None.
        keep: which checkpoints stay; with automatic naming, `total_limit` if None.
        sinks: receivers of telemetry events.
        **options: `stock_files` (whether plain replicas also get `model.safetensors` and `optimizer.bin`,
            written by the main process while training waits, so that stock `load_state` reads them; False),
            `gradients` (whether a save within an accumulation window holds its gradients; False),
            `contents` ("all" of the models, or "trainable", which refers to what is frozen; the default for
            PEFT models),
            `override` (hyperparameters that `load_state` changes, such as `{"lr": 1e-4}`, once for all
            restarts), `log_costs` (whether the trackers receive `checkpoint/stall_ms`, `durable_s`, `bytes`
            and `overhead` of every save; True), and every other field of `CheckpointOptions` but
            `on_exception`, such as `back_pressure` and `on_error`.

    Raises:
        ConfigError: an option is wrong, or the accelerator is enabled already, or is none.
    """
    _refuse_others(accelerator)
    attached: AcceleratorCheckpoints | None = attached_to(accelerator)
    if attached is not None and not attached.implicit:
        raise ConfigError("this accelerator is enabled already; call accelerate_ckpt.disable() first")
    disable(accelerator)
    settings = Settings.resolve({"root": root, "save": save, "keep": keep, **options})
    _attach(accelerator, settings, sinks)
    return accelerator


def enable_implicitly(accelerator: Accelerator) -> None:
    """Enable an accelerator for a script that does not; a later `enable` replaces it."""
    _attach(accelerator, Settings.resolve({}), implicit=True)


def _refuse_others(accelerator: object) -> None:
    if isinstance(accelerator, Accelerator):
        return
    trainer = any(
        cls.__module__.startswith("transformers.") for cls in type(accelerator).__mro__
    ) and hasattr(accelerator, "train_dataset")
    raise ConfigError(
        f"enable() takes an accelerate.Accelerator, not a {type(accelerator).__name__}"
        + ("; for a Trainer there is enable_trainer()" if trainer else "")
    )


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
    attach(accelerator, attached, _shadows(attached))


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


def _shadows(attached: AcceleratorCheckpoints) -> dict[str, Callable[..., Any]]:
    stock = attached.stock

    def end_training() -> None:
        try:
            # While the process group is still there.
            attached.close()
        finally:
            stock.end_training()

    def free_memory(*objects: Any) -> Any:
        try:
            attached.begin_anew()
        finally:
            freed = stock.free_memory(*objects)
        return freed

    def log(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        attached.note_metrics(values)
        return stock.log(values, *args, **kwargs)

    def prepare_optimizer(*args: Any, **kwargs: Any) -> Any:
        return attached.progress.prepared_optimizer(stock.prepare_optimizer(*args, **kwargs))

    def prepare_data_loader(data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        return attached.progress.loaders.prepare(stock.prepare_data_loader, data_loader, *args, **kwargs)

    def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
        copy = stock.skip_first_batches(dataloader, num_batches)
        attached.progress.loaders.track_copy(dataloader, copy)
        return copy

    return {
        "save_state": _save_state(attached, end_training),
        "load_state": attached.load,
        "end_training": end_training,
        "free_memory": free_memory,
        "log": log,
        "prepare_optimizer": prepare_optimizer,
        "prepare_data_loader": prepare_data_loader,
        "skip_first_batches": skip_first_batches,
    }


def _save_state(attached: AcceleratorCheckpoints, end_training: Callable[[], None]) -> Callable[..., Any]:
    def save_state(
        output_dir: str | None = None,
        safe_serialization: bool = True,  # noqa: FBT001, FBT002 - as in stock
        **_: Any,
    ) -> Path | str | None:
        handle = attached.maybe_save(output_dir, safe_serialization=safe_serialization)
        if attached.implicit and attached.preempted:
            _logger.warning("preempted: the script ends here, with its last checkpoint committed")
            end_training()
            raise SystemExit(ENDED)
        if handle is None:
            return None
        where = attached.directory(output_dir, handle)
        return where if "://" in where else Path(where)

    return save_state
