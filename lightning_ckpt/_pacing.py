"""When a run saves by itself: by the save policy, at the end, at a preemption."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from secrets import token_hex
from typing import Any, Final, final

from ckpt_core.cadence import PREEMPTION, needed_counts, preemptions
from ckpt_core.disclosure import logger_of
from ckpt_core.names import run_name, step_name
from ckpt_core.types import CheckpointInfo
from lightning_ckpt._committed import Announcements
from lightning_ckpt._options import Settings
from lightning_ckpt._roots import Roots
from lightning_ckpt._state import LightningState
from lightning_ckpt.loops import (
    Evaluations,
    Running,
    SignalTakeover,
    TrainingCounts,
    ValidationExit,
    job_note,
    requeue_signal,
)

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

    Attributes:
        validation: leaves a validation at a preemption.
        is_to_requeue: whether SLURM is to start this job again once the root is free.
    """

    def __init__(self, running: Running, settings: Settings, roots: Roots) -> None:
        self._running = running
        self._loops = running.loops
        self._trainer = trainer = running.loops.trainer
        self._settings = settings
        self._root = str(settings.root)
        self._roots = roots
        policy = settings.options.save
        self.counts = TrainingCounts(
            running, settings.tokens, roots.all_reduce_max, needed=bool(needed_counts(policy))
        )
        self._requeue_signal = requeue_signal(trainer)
        names = {name for each in preemptions(policy) for name in each.signals}
        self._signals = SignalTakeover(trainer._signal_connector, names, self._requeue_signal)
        self.is_to_requeue = False
        self._manager = self._signals.made_by(lambda: roots.at(self._root))
        self.validation = ValidationExit(trainer, self._manager, roots.same)
        self._announcements = Announcements(trainer, settings)
        self._evaluations = Evaluations(trainer, settings.bests, running.measured, roots.once)
        self._begun_at = self._seen_step = -1
        self._stepped = False
        self._left = False
        self._evaluated = False
        self._total_steps: int | None = None
        self._saved_step: int | None = None
        self._deferred: str | None = None

    @property
    def preempted(self) -> bool:
        """Whether a preemption that stops training was announced to any rank."""
        return self._manager.preempted

    def begin(self) -> None:
        """Prepare for the first batch; after a preemption training does not begin."""
        # What a resumed run makes up for may be a validation that is worth a save of the same step.
        self._begun_at = self._trainer.global_step
        self._total_steps = _total_steps(self._trainer)
        self._seen_step = self._begun_at if self._loops.resumed is None else -1
        self._saved_step = origin = self._roots.take_up(self._root)
        if origin is None or self._settings.bests:
            committed = self._roots.once(self._manager.checkpoints)
            if origin is None and committed:
                if self._trainer.is_global_zero:
                    _warn_of_abandoned(self._root, committed)
                self._manager.start_afresh()
            self._evaluations.begin([i for i in committed if origin is not None and i.step <= origin])
        self._manager.due(**self.counts.now())
        self._end_if_preempted(here=False)

    def after_batch(self) -> None:
        """Save before a validation, at a preemption or in the middle of an epoch.

        A save that is ranked by the validation waits for it. So does one at the epoch's end: a resume would
        call the hooks of the epoch's end without what they have collected in the epoch.
        """
        self._announcements.make()
        step = self._trainer.global_step
        fit_loop = self._trainer.fit_loop
        self._stepped = step != self._seen_step and not fit_loop._should_accumulate()
        if not self._stepped:
            return
        self._seen_step = step
        self._evaluated = False
        self._evaluations.note_step(step)
        if fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher):
            self._deferred = reason = self._deferred or self._reason(step)
            waits = self._settings.bests or self._loops.epoch_is_over or reason == _LAST_STEP
            if reason is not None and (PREEMPTION in reason or not waits):
                self._save(reason)
            self._end_if_preempted(here=True)

    def before_save_by_path(self, root: str) -> None:
        """Decide on this step first, for a save to the same root would count as its save.

        A `ModelCheckpoint` saves in hooks of the batch, and deletes its checkpoints by a rule of its own.
        """
        step = self._trainer.global_step
        if not self._loops.holds_batch:
            self.counts.add_up()
        if root == self._root and step > 0:
            self._deferred = self._deferred or self._reason(step)

    def before_validation(self) -> None:
        """Prepare for a validation."""
        self._evaluations.cut_short = False
        self._evaluations.note()
        self.validation.begin()

    def after_validation(self) -> None:
        """Note what was measured; save at a preemption that has cut it short."""
        self.validation.end()
        if self._trainer.sanity_checking:
            return
        self._evaluated = True
        self._evaluations.cut_short = self.validation.cut_short
        self._evaluations.note()
        self._evaluations.complain()
        if self.validation.cut_short and not self._trainer.fit_loop._should_accumulate():
            reason = self._reason(self._trainer.global_step) or self._deferred
            self._running.repeats_validation = True
            if reason is not None:
                self._save(reason)
            self._left = True
            self._end_if_preempted(here=False)

    def after_step(self) -> None:
        """Save if it is time: after an optimizer step, never while accumulating."""
        if self._left:
            raise StopIteration
        if self._stepped and not self._loops.epoch_is_over:
            self._save_if_due(self._seen_step)
            self._end_if_preempted(here=True)

    def before_epoch_end(self) -> None:
        """Finish staged copies, for averaging callbacks; at a preemption end here."""
        self._roots.settle()
        if self._left:
            raise StopIteration

    def after_epoch(self) -> None:
        """Save if it is time, at the end of an epoch that has not been left early."""
        self._evaluated = True
        self._evaluations.note()
        self._evaluations.complain()
        self._total_steps = _total_steps(self._trainer)
        if self._loops.epoch_is_over and self._stepped:
            self._save_if_due(self._seen_step)
            self._roots.settle()
            self._end_if_preempted(here=False)

    def _save_if_due(self, step: int) -> None:
        reason = self._reason(step) or self._deferred
        if reason is not None:
            self._save(reason)
        elif self._evaluated and not self.preempted and self._evaluations.among_best():
            self._save(_BEST)
        if self._settings.options.on_exception is not None:
            self.counts.add_up()
            metrics, state = self._evaluations.note(), self._state()
            self._manager.note_step(step, state, metrics=metrics, annotations=job_note())

    def failed(self, error: BaseException) -> None:
        """Save the last whole step, if that is wanted and possible on all ranks."""
        self._manager.save_last_step(error)

    def _state(self) -> LightningState:
        return LightningState(self._trainer, running=self._running, contents=self._settings.contents)

    def end(self) -> None:
        """Save the last step of a training that has ended; look for a preemption."""
        self._manager.due()
        if self._settings.save_last and 0 < self._trainer.global_step != self._saved_step:
            self._save(_LAST_STEP)

    def look_again(self) -> None:
        """Wait for the last save, and announce it; then look for a preemption."""
        try:
            self._manager.wait()
        finally:
            self._announcements.end()
        self._manager.due()
        if self.preempted and self._requeue_signal is not None:
            self.is_to_requeue = bool(self._roots.all_reduce_max([int(self._signals.was_noted)])[0])

    def finish(self) -> None:
        """Give signals back; `Roots` closes the manager."""
        self._signals.give_back()

    def _reason(self, step: int) -> str | None:
        reason = self._manager.due(step, total_steps=self._total_steps, **self.counts.now())
        if step in {self._saved_step, self._begun_at}:
            return None
        if reason is None and self._settings.save_last and self._loops.ends_at(step):
            return _LAST_STEP
        return reason

    def _save(self, reason: str) -> None:
        step = self._trainer.global_step
        self.counts.add_up()
        if reason in _NEVER_LEFT_OUT:
            self._manager.wait()  # so that it is not skipped
        self._deferred = None
        self._running.left = self.preempted
        # Saved already, perhaps by the run before, but without the metric that it is to be kept for.
        again = step == self._saved_step
        metrics = self._evaluations.note()
        handle = self._roots.save(
            self._root,
            step,
            self._state(),
            name=self._roots.once(lambda: run_name(step_name(step), token_hex(4))) if again else None,
            metrics=metrics,
            reason=reason,
        )
        if handle is not None:
            self._saved_step = step
            self._evaluations.saved(handle, metrics)
            self._announcements.saved(handle)

    def _end_if_preempted(self, *, here: bool) -> None:
        """End training after this step, whatever the least number of steps is.

        Args:
            here: whether it ends without what Lightning would do next.

        Raises:
            StopIteration: it ends here.
        """
        if not self.preempted:
            return
        self._roots.settle()
        if not self._trainer.should_stop:
            _logger.warning("preempted: training stops after step %d", self._trainer.global_step)
        self._loops.stop()
        if here:
            self._left = True
            raise StopIteration


def weights_may_change(trainer: Any) -> bool:
    """Return whether later hooks of this moment may exchange weights.

    Averaging callbacks do so at the end of training.

    They do it through `.data`, which a staged copy in progress cannot notice.
    """
    return trainer.lightning_module._current_fx_name not in _FOLLOWED_BY_TRAINING


def _total_steps(trainer: Any) -> int | None:
    total = trainer.estimated_stepping_batches
    return int(total) if 0 < total < math.inf else None


def _warn_of_abandoned(root: str, committed: Sequence[CheckpointInfo]) -> None:
    # The folds of a cross-validation are many fits, and one warning.
    level = logging.INFO if root in _warned_of else logging.WARNING
    _warned_of.add(root)
    _logger.log(
        level,
        "this fit continues from no checkpoint in %s, which holds %d of an earlier run, up to %s: "
        "from its first save on those are abandoned, and ckpt_path='last' and 'best' mean this "
        "run's. To continue from them instead, stop it and call fit(..., ckpt_path='last'); to keep "
        "runs apart, such as the folds of a cross-validation, give each a dirpath of its own. "
        "Further fits of this process into it are logged as information only",
        root, len(committed), committed[-1].name,
    )  # fmt: skip
