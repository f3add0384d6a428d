"""The checkpoints of one Trainer, whose attached strategy calls this module."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

from ckpt_core.cadence import OnPreemption, preemptions
from ckpt_core.commit import Catalog, Lease, remove
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    IncompatibleCheckpointError,
)
from ckpt_core.hosting import CheckpointPath, ManagersByRoot, by_number, shadow
from ckpt_core.manager import CheckpointManager
from ckpt_core.names import MARKER
from ckpt_core.saving import SaveHandle
from ckpt_core.state import Gradients, TrainState, unwrap_optimizer
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo
from lightning_ckpt._ckpt_path import found_at, load_stock, path_of
from lightning_ckpt._committed import AsModelCheckpoint
from lightning_ckpt._fit import Fit, Measured
from lightning_ckpt._options import Settings
from lightning_ckpt._pacing import Pacing, job_note, requeue, requeue_signal
from lightning_ckpt._state import LightningState

_logger = logger_of(__name__)
_SHOWN = 10
_FOLLOWED_BY_TRAINING = {"on_train_batch_end", "on_validation_end"}
"""Hooks after which no averaging callback changes weights before `Session.settle` is called again."""
_STOCK_IO = ".plugins.io.torch_io"


@final
class Session(ManagersByRoot):
    """Saves and loads for one Trainer, with the lineage of its state in each root.

    It lives as long as the Trainer; `start` and `finish` delimit each fit, validate, test or predict. A
    manager lives as long as that. The checkpoint that the live state comes from is remembered longer, so that
    another fit of the same Trainer continues the lineage of the first.

    Concurrency: the thread that trains, on every rank alike, except `remove` (coordinator only).

    Attributes:
        resumed: the checkpoint that this run was given; None without one.
        restored: it in words, for the user.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        super().__init__(self._opened, deadline_seconds=settings.options.deadline_seconds)
        policy, requeues = settings.options.save, requeue_signal(trainer)
        heard = any(each.stop and requeues in each.signals for each in preemptions(policy))
        if settings.root is not None and requeues is not None and not heard:
            signalled = OnPreemption((requeues,))
            save = signalled if policy is None else policy | signalled
            settings = replace(settings, options=replace(settings.options, save=save))
        self.trainer = trainer
        self.settings = settings
        self.resumed: LightningState | None = None
        self.restored: str | None = None
        self.pacing: Pacing | None = None
        self.was_preempted = self.is_running = self._trains = False
        self._fit: Fit | None = None
        self._module: Any = None
        self._error: BaseException | None = None
        self._shadowed: list[Any] = []
        self._written = set[str]()
        self._accepted = set[CheckpointPath]()
        self._newest: SaveHandle | None = None
        self._origins: dict[str, tuple[int, str]] = {}
        self._saved: list[tuple[str, SaveHandle]] = []
        self._taken_up = set[str]()

    def __reduce__(self) -> Any:
        # What belongs to a Trainer is not copied with the callback or the strategy that holds it.
        return type(None), ()

    def start(self, stage: str) -> None:
        self.is_running, self._error = True, None
        self.resumed = self.restored = self.pacing = self._fit = None
        if stage != "fit" or self.trainer.fast_dev_run:
            return
        for each in self.trainer.checkpoint_callbacks:
            if hasattr(each, "file_exists") and not isinstance(each, AsModelCheckpoint):
                # It looks for free names, and would give that of a save in flight again.
                shadow(each, {"file_exists": partial(self._file_exists, type(each).file_exists, each)})
                self._shadowed.append(each)
        self._fit = Fit(self.trainer)
        if self.settings.root is not None:
            self._trains = True
            self.pacing = Pacing(self._fit, self)

    def choose(self, ckpt_path: str | None) -> None:
        """Begin a run with a checkpoint; refuse one that only some ranks have found.

        Those would wait for the others to load it.
        """
        trainer = self.trainer
        if trainer.world_size > 1 and not self.same([int(ckpt_path is None)]):
            found = "no checkpoint" if ckpt_path is None else ckpt_path
            raise ConfigError(
                f"rank {trainer.global_rank} of {trainer.world_size} is to begin with {found}, "
                "others are not: every rank must see the same directory, on storage that all of them share, "
                "and be given the same ckpt_path"
            )
        if self._fit is None:
            return
        # A second fit of the same Trainer resumes nothing, too: its optimizers are new.
        if ckpt_path is None and self.settings.override:
            raise ConfigError(
                "override= changes a training midway, and this fit resumes nothing: call fit(..., "
                f'ckpt_path="last"), and check that {self.settings.root} has checkpoints; or begin with '
                "these values in the script and without override="
            )
        # Earlier fits are forgotten unless this one continues with the same module.
        module = trainer.lightning_module
        same = self._module is module and ckpt_path is None
        reached = trainer.global_step if same else -1
        self._origins = {root: origin for root, origin in self._origins.items() if origin[0] <= reached}
        self._module = module
        if self.pacing is not None:
            manager = self.at(str(self.settings.root))
            if ckpt_path is None and not same:
                _convert_early(trainer.strategy)
                model = trainer.strategy.model or module
                manager.initialise(TrainState(model=model, contents=self.settings.contents))
            manager.has_weights()

    def save(self, checkpoint: dict[str, Any], path: str | os.PathLike[str]) -> None:
        place = path_of(self.once(lambda: os.fspath(path)))
        step = self.trainer.global_step
        measured = Measured() if self._fit is None else self._fit.measured
        measured.note(self.trainer.callback_metrics, step)
        if self.pacing is not None:
            self.pacing.before_save_by_path(place.root)
        self.write(
            place.root,
            step,
            LightningState(self.trainer, checkpoint, fit=self._fit, contents=self.settings.contents),
            name=place.name,
            metrics=measured.at(step),
            reason="asked for by path",
        )
        # Averaging callbacks may exchange weights next, through `.data`, which no staged copy notices.
        if self.trainer.lightning_module._current_fx_name not in _FOLLOWED_BY_TRAINING:
            self.settle()
        if not self.is_running:
            # After a fit nothing else would wait for it.
            self.close()

    def load(
        self, path: str | os.PathLike[str], stock: Callable[..., Any], *, trusted: bool, has_optimizers: bool
    ) -> dict[str, Any]:
        """Read a checkpoint; return what Lightning loads. A root means its newest."""
        settings = self.settings
        text = self.once(lambda: os.fspath(path))
        self.wait()
        found = self.once(lambda: found_at(text, settings.readable_at))
        place = None if found is None else CheckpointPath(*found)
        is_own = self.pacing is not None and place is not None and place.root == settings.root
        if self.pacing is not None and not is_own and settings.override:
            raise ConfigError(
                f"override= changes the training in {settings.root}, and is recorded there as a branch; "
                f"{place or text} is of another: give that as dirpath=, or leave override= out"
            )
        if place is None:
            strategy = self.trainer.strategy
            return load_stock(text, stock, strategy, settings.options, trusted=trusted, once=self.once)
        if not has_optimizers:
            _convert_early(self.trainer.strategy)
        state = LightningState(self.trainer, has_optimizers=has_optimizers, contents=settings.contents)
        self._read(place, state, is_own=is_own)
        self.resumed = state
        if self._fit is not None:
            self._fit.resume(state)
        return state.checkpoint

    def _read(self, place: CheckpointPath, state: LightningState, *, is_own: bool) -> None:
        manager, change = self.at(place.root), self.settings.override.values if is_own else {}
        try:
            if not place.name and is_own:
                manager.resume(state, override=change)
            else:
                manager.load(state, name=place.name or None, override=change)
        except IncompatibleCheckpointError as error:
            raise in_lightnings_words(error, str(place), state.refusal) from error
        if (saved := state.saved) is None:
            raise CheckpointNotFoundError(f"{place} holds no checkpoint any more; was it pruned just now?")
        if self.trainer.state.fn == "fit" and saved.step is not None:
            self.loaded(manager)
            self._origins[place.root] = saved.step, saved.name
            self._taken_up.add(place.root)
        self.restored = f"Restored step {saved.step} of {place.root} (checkpoint {saved.name})"

    def _file_exists(self, stock: Callable[..., bool], callback: Any, path: str, trainer: Any) -> bool:
        there = stock(callback, path, trainer)
        return self.once(lambda: self.is_taken(path_of(path))) or there

    def take_part(self) -> None:
        if self._fit is not None:
            self._fit.listener = self.pacing

    def begin_training(self) -> None:
        """Finish a resume, right before the first batch is drawn."""
        strategy, fit, loaded = self.trainer.strategy, self._fit, self.resumed
        optimizers = [unwrap_optimizer(each) for each in strategy.optimizers]
        if fit is not None:
            fit.begin()
        if loaded is not None and loaded.gradients is not None:
            Gradients(model=strategy.model, optimizers=strategy.optimizers).put_back(loaded.gradients)
        if loaded is not None and loaded.change is not None:
            schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
            loaded.change.apply(by_number(optimizers), schedulers)
        if self.pacing is not None:
            self.pacing.begin()

    def _opened(self, root: str, coordinator: Coordinator) -> CheckpointManager:
        def log(numbers: Mapping[str, float], step: int) -> None:
            for logger in self.trainer.loggers:
                logger.log_metrics(dict(numbers), step=step)

        return self.settings.manager(root, coordinator, training=self._trains, log=log)

    def same(self, numbers: Sequence[int]) -> bool:
        """Return whether numbers are equal on every rank; one small all-reduce."""
        combined = self.coordinator.all_reduce_max([*numbers, *(-number for number in numbers)])
        return combined == (*numbers, *(-number for number in numbers))

    def take_up(self, root: str) -> int | None:
        """Continue the lineage of `root` from the live state's checkpoint.

        Returns the step of that checkpoint, or None.
        """
        if root in self._origins and root not in self._taken_up:
            try:
                self.at(root).continue_from(name=self._origins[root][1])
            except CheckpointNotFoundError as error:
                _logger.warning("%s; it was there when this run saved or loaded it", error)
                del self._origins[root]
        self._taken_up.add(root)
        return self._origins[root][0] if root in self._origins else None

    def write(
        self,
        root: str,
        step: int,
        state: LightningState,
        *,
        name: str | None = None,
        metrics: Mapping[str, float],
        reason: str,
    ) -> SaveHandle | None:
        manager = self.at(root)
        self.wait(but=manager)
        if root != self.settings.root and root not in self._taken_up | self._origins.keys():
            # The host names what is there: continue from the newest.
            latest = self.once(manager.latest)
            if latest is not None and latest.step <= step:
                self._origins[root] = latest.step, latest.name
        self.take_up(root)
        noted = {"reason": reason, **job_note()}
        try:
            handle = manager.save(step, state, metrics=metrics, annotations=noted, name=name)
        except CheckpointError as error:
            for note in state.unstorable():
                error.add_note(note)
            raise
        if handle is not None:
            self._note_saved()
            self._saved.append((root, handle))
            self._newest = handle
            self._written.add(root)
            self._accepted.add(CheckpointPath(root, handle.name))
        return handle

    def is_taken(self, place: CheckpointPath) -> bool:
        """Return whether a name is in use, also in flight; coordinator only."""
        if place in self._accepted:
            return True
        if "://" not in place.root:
            return os.path.lexists(str(place))
        # The host's own client may have cached the listing from before the commit.
        return self.settings.storage_at(place.root).exists(f"{place.name}/{MARKER}")

    def settle(self) -> None:
        for manager in self:
            manager.wait_staged()

    def remove(self, path: str | os.PathLike[str], remove_file: Callable[[], None]) -> None:
        """Remove a checkpoint once the save in flight is committed, unless it fails.

        Only where this run has saved itself: Lightning also removes what it resumed from elsewhere.
        """
        place = path_of(path)
        storage = self.settings.storage_at(place.root)
        if place.root not in self._written:
            with suppress(OSError, CheckpointError):
                if self.is_taken(place) or storage.exists(place.name):
                    _logger.warning(
                        "%s is kept although Lightning wants it removed: this run has saved nothing to %s, "
                        "so it belongs to another run",
                        place, place.root,
                    )  # fmt: skip
            return
        self._accepted.discard(place)
        # The manager that owns the root by then, and counts what is in it.
        manager = self.get(place.root)

        def ended(saved: Future[CheckpointInfo]) -> None:
            if Future.exception(saved) is None:  # looked at without taking it from the user
                _remove(storage, manager, place, remove_file)
            else:
                _logger.warning("%s is kept, because the save after it failed", place)

        if self._newest is None:
            _remove(storage, manager, place, remove_file)
        else:
            self._newest.committed.add_done_callback(ended)

    def close(self, *, farewell: bool = True) -> None:
        self._newest = None
        try:
            super().close(farewell=farewell)
        finally:
            self._note_saved()
            self._saved, self._taken_up = [], set()

    def _note_saved(self) -> None:
        for root, handle in self._saved:
            if handle.done() and handle.error is None:
                self._origins[root] = handle.step, handle.name
        self._saved = [each for each in self._saved if not each[1].done()]

    def failed(self, error: BaseException) -> None:
        """Note the exception that ends this run, so that `finish` does not hide it."""
        self._error = error
        if self.pacing is not None:
            self.pacing.failed(error)
        if self._fit is not None:
            self._fit.failed()

    def finish(self) -> None:
        """Wait for saves in flight, while the process group is still there."""
        self.is_running = False
        while self._shadowed:
            vars(self._shadowed.pop()).pop("file_exists", None)
        pacing, self.pacing = self.pacing, None
        if self._fit is not None:
            self._fit.release()
        try:
            self._close(pacing)
        except CheckpointError as failure:
            if self._error is None:
                raise
            self._error.add_note(f"while the last save was waited for: {failure}")
            _logger.error("%s", failure)  # noqa: TRY400 - the error that ended the run is raised
        finally:
            self._error = None

    def _close(self, pacing: Pacing | None) -> None:
        try:
            # Ranks that have not failed are still training; those that have would wait for them.
            if pacing is not None and self._error is None:
                pacing.look_again()
        finally:
            if pacing is not None:
                self.was_preempted = pacing.preempted
            self._trains = False
            self.close(farewell=self._error is None)
        if pacing is not None and pacing.is_to_requeue and self.trainer.is_global_zero:
            requeue()


def _convert_early(strategy: Any) -> None:
    """Give the model its dtype before it is loaded; Lightning does after that.

    Otherwise weights in double precision would be loaded into single.
    """
    names = {cls.__name__ for cls in type(strategy.precision_plugin).__mro__}
    if names & {"DoublePrecision", "HalfPrecision"}:
        strategy.model = strategy.precision_plugin.convert_module(strategy.model)


def in_lightnings_words(
    error: IncompatibleCheckpointError,
    place: str,
    refusal: IncompatibleCheckpointError | None,
    loaded: str = "nothing was loaded",
) -> IncompatibleCheckpointError:
    """Replace the core's advice, to load a part, by what a Trainer can do."""
    kinds = {
        "the checkpoint lacks": error.missing,
        "the model and its optimizers lack": error.unexpected,
        "differ": error.mismatched,
    }
    lines = [f"{len(names)} {verb}: {', '.join(names[:_SHOWN])}" for verb, names in kinds.items() if names]
    if not lines and refusal is None:
        return error
    what = "; ".join(lines) if refusal is None else str(refusal)
    return IncompatibleCheckpointError(
        f"{place} does not fit this LightningModule, and {loaded}. {what}. It is probably of another model "
        "or another optimizer: check ckpt_path and the configuration. To begin a new training with the "
        "weights that fit, make the model by lightning_ckpt.load_from_checkpoint(Model, path, strict=False) "
        "and fit it without ckpt_path; to validate, test or predict, set model.strict_loading = False",
        missing=error.missing,
        unexpected=error.unexpected,
        mismatched=error.mismatched,
    )


def refuse_what_is_passed_over(strategy: Any) -> None:
    """Refuse state that no checkpoint can reach, and a `CheckpointIO` of others."""
    names = [cls.__name__ for cls in type(strategy).__mro__]
    hidden = next((name for name in names if "DeepSpeed" in name or "XLA" in name), None)
    if hidden is not None:
        raise ConfigError(
            f"{hidden} hides its shards from a checkpoint: use FSDPStrategy, ModelParallelStrategy or DDP, "
            "or leave ShardedCheckpoint out and save natively"
        )
    io = strategy._checkpoint_io
    if not (io is None or hasattr(io, "join_trainer_of") or type(io).__module__.endswith(_STOCK_IO)):
        raise ConfigError(
            f"{type(io).__name__}, the CheckpointIO of this run, would write nothing: ckpt-suite writes all, "
            "in the background, to directories and URLs. Leave it out of plugins= and of the strategy's "
            "checkpoint_io=, or leave ckpt-suite out"
        )


def _remove(
    storage: Storage,
    manager: CheckpointManager | None,
    place: CheckpointPath,
    remove_file: Callable[[], None],
) -> None:
    """Remove a checkpoint, mostly on the background thread; log a failure."""
    try:
        if storage.exists(place.name):
            remove_file()
        elif manager is not None:
            manager.discard(place.name)
        else:  # after a fit, at the user's request
            with Lease.acquire(storage, "the removal of a checkpoint"):
                remove(storage, Catalog(storage).find(name=place.name))
    except CheckpointNotFoundError:
        _logger.debug("%s is gone already", place)
    except (OSError, CheckpointError) as error:
        # A whole checkpoint too many stays; the log and the listing show it.
        _logger.warning("%s was not removed: %s", place, error)
