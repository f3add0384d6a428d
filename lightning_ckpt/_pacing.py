"""When a run saves by itself: by the save policy, at the end, at a preemption."""

from __future__ import annotations

import logging
import math
import signal
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar, final

from torch.utils.data import IterableDataset

from ckpt_core.cadence import PREEMPTION
from ckpt_core.disclosure import logger_of
from ckpt_core.manager import CheckpointManager
from ckpt_core.saving import SaveHandle
from ckpt_core.types import CheckpointInfo
from lightning_ckpt._evaluation import Evaluations, Measured
from lightning_ckpt._options import Settings
from lightning_ckpt._roots import Roots
from lightning_ckpt._state import LightningState

T = TypeVar("T")
_REGISTER = "register_signal_handlers"
_UNKNOWN = -1

_logger = logger_of(__name__)
_LAST_STEP = "last step"
_BEST = "best"
_warned_of: Final = set[str]()
"""The roots for which this process has warned of a fit that continues from nothing."""
_NEVER_LEFT_OUT = {_LAST_STEP, _BEST}
_FOLLOWED_BY_TRAINING = {"on_train_batch_end", "on_validation_end"}
"""Hooks after which no averaging callback changes weights before `Session.settle` is called again."""


@final
class Pacing:
    """Saves the run's own checkpoints while it trains.

    Concurrency: the thread that trains; every method on every rank alike, for most may save.
    """

    def __init__(self, trainer: Any, settings: Settings, roots: Roots, measured: Measured) -> None:
        self._trainer = trainer
        self._settings = settings
        self._root = str(settings.root)
        self._roots = roots
        policy = settings.options.save
        heard = () if policy is None else policy.preemptions
        self._signals = SignalTakeover(trainer._signal_connector, {n for each in heard for n in each.signals})
        self._manager = self._signals.made_by(lambda: roots.managers.at(self._root))
        self.validation = ValidationExit(trainer, self._manager, roots)
        self._evaluations = Evaluations(trainer, settings.bests, roots, measured)
        self._seen_step = -1
        self._stepped = False
        self._saved_step: int | None = None
        self._saved: SaveHandle | None = None
        self._deferred: str | None = None
        self._edge: tuple[int, Mapping[str, Any]] | None = None
        self._limits: tuple[Any, Any] | None = None

    @property
    def preempted(self) -> bool:
        """Whether a preemption that stops training was announced to any rank."""
        return self._manager.preempted

    def begin(self) -> None:
        """Prepare for the first batch; after a preemption training does not begin."""
        self._seen_step = self._trainer.global_step
        self._saved_step = origin = self._roots.take_up(self._root)
        if origin is None or self._settings.bests:
            committed = self._roots.once(self._manager.checkpoints)
            if origin is None and committed:
                self._warn_of_abandoned(committed)
                self._manager.start_afresh()
            self._evaluations.begin([i for i in committed if origin is not None and i.step <= origin])
        self._manager.due()
        if self.preempted:
            self._stop()

    def after_batch(self) -> None:
        """Save if it is time: after an optimizer step, never while accumulating."""
        if self._stepped:
            self._evaluations.note_steps(self._seen_step)
        step = self._trainer.global_step
        self._stepped = step != self._seen_step and not self._trainer.fit_loop._should_accumulate()
        if not self._stepped:
            return
        self._seen_step = step
        self._note_edge()
        self._save_or_defer(self._reason(step) or self._deferred, awaits=self._evaluations.awaits_validation)
        if self.preempted:
            self._stop()

    def before_validation(self) -> None:
        """Prepare for a validation."""
        self._evaluations.cut_short = False
        self._evaluations.note()
        self.validation.begin()

    def after_validation(self) -> None:
        """Save if it is time, if a save awaited this validation, or if it is a best."""
        self.validation.end()
        if self._trainer.sanity_checking:
            return
        self._evaluations.cut_short = self.validation.cut_short
        self._evaluations.note()
        self._evaluations.complain()
        if not self._trainer.fit_loop._should_accumulate():
            self._note_edge()
            reason = self._reason(self._trainer.global_step) or self._deferred or self._best()
            self._save_or_defer(reason, awaits=self._evaluations.awaits_epoch)
            if self.preempted:
                self._stop()

    def after_epoch(self) -> None:
        """Save if a save awaited the epoch, or if it is a best by a metric of it."""
        if not self._stepped:
            return  # a resumed run only repeats the end of the epoch that it continues from
        self._evaluations.note()
        self._evaluations.complain()
        # A training that stops within an epoch ends here, too, but is not to be resumed as if that were over.
        if self._edge is not None and self._edge[0] == self._trainer.global_step:
            reason = self._deferred or self._best()
            if reason is not None:
                self._save(reason, loops=self._edge[1])

    def _best(self) -> str | None:
        return _BEST if not self.preempted and self._evaluations.among_best() else None

    def end(self) -> None:
        """Save the last step of a training that has ended; look for a preemption."""
        self._manager.due()
        if self._settings.save_last and 0 < self._trainer.global_step != self._saved_step:
            self._save(_LAST_STEP)

    def look_again(self) -> None:
        """Wait for the last save, then look for a preemption."""
        self._manager.wait()
        self._manager.due()

    def finish(self) -> None:
        """Give signals and limits back; `Roots` closes the manager."""
        self._signals.give_back()
        if self._limits is not None:
            self._trainer.limit_val_batches, self._trainer.fit_loop.epoch_loop.min_steps = self._limits
            self._limits = None

    def _reason(self, step: int) -> str | None:
        reason = self._manager.due(step, total_steps=_total_steps(self._trainer))
        if step == self._saved_step:
            return None
        if reason is None and self._settings.save_last and _stops_inside_epoch(self._trainer):
            return _LAST_STEP
        return reason

    def _note_edge(self) -> None:
        """Remember the loops' state at the end of an epoch whose metric may rank it.

        Until `on_train_epoch_end` Lightning changes them, so that a resume would take one batch of the next
        epoch for all of it.
        """
        self._edge = None
        if self._settings.bests and self._trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            loops = self._trainer._checkpoint_connector._get_loops_state_dict()
            self._edge = self._trainer.global_step, loops

    def _save_or_defer(self, reason: str | None, *, awaits: Callable[[], bool]) -> None:
        """Save for a reason; later, if a ranking metric of this step is awaited."""
        if reason is not None and PREEMPTION not in reason and awaits():
            self._deferred = reason
        elif reason is not None:
            self._save(reason)

    def _save(self, reason: str, *, loops: Mapping[str, Any] | None = None) -> None:
        step = self._trainer.global_step
        if reason in _NEVER_LEFT_OUT:
            self._manager.wait()  # so that it is not skipped
        self._deferred = None
        # Saved already, but without the metric that it is to be kept for: that one is replaced.
        replaced = self._saved if self._saved is not None and self._saved.step == step else None
        metrics = self._evaluations.note()
        handle = self._roots.save(
            self._root,
            step,
            LightningState(self._trainer, loops=loops),
            name=None if replaced is None else replaced.name,
            metrics=metrics,
            reason=reason,
        )
        if handle is not None:
            self._saved, self._saved_step = handle, step
            self._evaluations.saved(handle, metrics)
        if weights_may_change(self._trainer):
            self._roots.settle()

    def _stop(self) -> None:
        """End training after this step, without the validation Lightning would make."""
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        if self._limits is None:
            self._limits = (trainer.limit_val_batches, epoch_loop.min_steps)
            _logger.warning("preempted: training stops after step %d", trainer.global_step)
        trainer.limit_val_batches = 0
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = epoch_loop.min_steps = 0

    def _warn_of_abandoned(self, committed: Sequence[CheckpointInfo]) -> None:
        if self._trainer.is_global_zero:
            # The folds of a cross-validation are many fits, and one warning.
            level = logging.INFO if self._root in _warned_of else logging.WARNING
            _warned_of.add(self._root)
            _logger.log(
                level,
                "this fit continues from no checkpoint in %s, which holds %d of an earlier run, up to %s: "
                "from its first save on those are abandoned, and ckpt_path='last' and 'best' mean this "
                "run's. To continue from them instead, stop it and call fit(..., ckpt_path='last'); to keep "
                "runs apart, such as the folds of a cross-validation, give each a dirpath of its own. "
                "Further fits of this process into it are logged as information only",
                self._root, len(committed), committed[-1].name,
            )  # fmt: skip


def _stops_inside_epoch(trainer: Any) -> bool:
    """Return whether training stops here, inside an epoch that will count as whole."""
    fit_loop = trainer.fit_loop
    stopping = trainer.should_stop and fit_loop._can_stop_early
    return not fit_loop.epoch_loop.batch_progress.is_last_batch and (
        stopping or trainer.max_steps == trainer.global_step
    )


def weights_may_change(trainer: Any) -> bool:
    """Return whether later hooks of this moment may exchange weights.

    Averaging callbacks do so at the end of training.

    They do it through `.data`, which a staged copy in progress cannot notice.
    """
    return trainer.lightning_module._current_fx_name not in _FOLLOWED_BY_TRAINING


def _total_steps(trainer: Any) -> int | None:
    total = trainer.estimated_stepping_batches
    return int(total) if 0 < total < math.inf else None


@final
class ValidationExit:
    """Ends a fit's validation at a preemption, after the same batch on every rank.

    Where ranks have unequal or unknown numbers of batches it does not look: the others would wait for a rank
    that has finished. There a preemption is noticed when the validation ends.

    Concurrency: the thread that trains; every method on every rank alike.
    """

    def __init__(self, trainer: Any, manager: CheckpointManager, roots: Roots) -> None:
        save = manager.options.save
        self._listens = save is not None and bool(save.preemptions)
        self._trainer = trainer
        self._manager = manager
        self._roots = roots
        self._looks = False
        self.cut_short = False

    def begin(self) -> None:
        """Prepare for a validation."""
        self.cut_short = False
        self._looks = self._listens and not self._trainer.sanity_checking
        if self._looks:
            sizes = _sizes(self._trainer.fit_loop.epoch_loop.val_loop)
            self._looks = self._roots.same(sizes) and _UNKNOWN not in sizes

    def after_batch(self) -> None:
        """Leave the validation if a preemption that stops training was announced.

        Raises:
            StopIteration: the validation ends here; its loop takes it as the end of the data.
        """
        trainer = self._trainer
        if not self._looks or trainer.fit_loop.epoch_loop.val_loop.batch_progress.is_last_batch:
            return
        self._manager.due()
        if self._manager.preempted:
            _logger.warning("preempted: the validation after step %d is cut short", trainer.global_step)
            self.cut_short = True
            # Lightning's own word for results that do not count: early stopping and the like pass them over.
            trainer.sanity_checking = True
            raise StopIteration

    def end(self) -> None:
        """Set the Trainer's state back after the validation's own hooks."""
        if self.cut_short:
            self._trainer.validating = True


def _sizes(loop: Any) -> tuple[int, int, int]:
    """Return what determines the number of batches of a validation."""
    batches = loop.max_batches
    loaders = loop._combined_loader.flattened
    if not batches or any(_unsized(loader) for loader in loaders) or float("inf") in batches:
        return _UNKNOWN, _UNKNOWN, _UNKNOWN
    return sum(batches), max(batches), min(batches)


def _unsized(loader: Any) -> bool:
    return isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(loader, "__len__")


@final
class SignalTakeover:
    """Keeps the core's signal handlers ahead of Lightning's until `give_back`.

    Lightning remembers the handlers that it finds and puts those back at its end, so ours are set aside
    while it looks. Its own SIGTERM handler waits for a collective: ranks that are signalled one after
    another, or in the middle of a step, hang in it. Under SLURM its SIGUSR1 handler saves wherever the signal
    arrives.

    Args:
        connector: what registers Lightning's handlers for a Trainer.
        names: of the signals.
    """

    def __init__(self, connector: Any, names: Iterable[str]) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        self._numbers = [signal.Signals[name] for name in sorted(names)] if on_main else []
        self._connector = connector
        self._before: dict[signal.Signals, Any] = {}
        self._ours: dict[signal.Signals, Any] = {}
        self._theirs: dict[signal.Signals, Any] = {}

    def made_by(self, make: Callable[[], T]) -> T:
        """Call `make`; keep the handlers that it installs ahead of Lightning's."""
        self._before = {number: _handler(number) for number in self._numbers}
        made = make()
        self._ours = {number: _handler(number) for number in self._numbers}
        if self._numbers:
            setattr(self._connector, _REGISTER, self._register)
        return made

    def give_back(self) -> None:
        """Hand the signals back to Lightning's handlers; idempotent."""
        self._connector.__dict__.pop(_REGISTER, None)
        for number, theirs in self._theirs.items():
            _install(number, theirs)
        self._theirs = {}

    def _register(self) -> None:
        for number, before in self._before.items():
            _install(number, before)
        getattr(type(self._connector), _REGISTER)(self._connector)
        self._theirs = {number: _install(number, ours) for number, ours in self._ours.items()}


def _handler(number: signal.Signals) -> Any:
    handler = signal.getsignal(number)
    # None is a handler that C code installed, which Python cannot put back.
    return signal.SIG_DFL if handler is None else handler


def _install(number: signal.Signals, handler: Any) -> Any:
    previous = _handler(number)
    signal.signal(number, handler)
    return previous
