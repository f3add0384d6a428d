"""When a run saves by itself: at optimizer steps, by the save policy, at the end, and before a preemption."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any, final

from ckpt_core.cadence import PREEMPTION
from ckpt_core.names import step_name
from lightning_ckpt._options import Settings
from lightning_ckpt._places import Place
from lightning_ckpt._roots import Roots
from lightning_ckpt._signals import SignalTakeover
from lightning_ckpt._state import LightningState
from lightning_ckpt._validation import ValidationExit

_logger = logging.getLogger(__name__)
_LAST_STEP = "last step"
_FOLLOWED_BY_TRAINING = {"on_train_batch_end", "on_validation_end"}
"""Hooks after which no averaging callback changes weights before `Session.settle` is called again."""


@final
class Pacing:
    """Saves the run's own checkpoints while it trains.

    Concurrency: the thread that trains; every method on every rank alike, for most may save.
    """

    def __init__(self, trainer: Any, settings: Settings, roots: Roots) -> None:
        self._trainer = trainer
        self._settings = settings
        self._root = str(settings.root)
        self._roots = roots
        policy = settings.options.save
        heard = () if policy is None else policy.preemptions
        self._signals = SignalTakeover(trainer._signal_connector, {n for each in heard for n in each.signals})
        self._manager = self._signals.made_by(lambda: roots.manager(self._root))
        self.validation = ValidationExit(trainer, self._manager, roots)
        self._seen_step = -1
        self._saved_step: int | None = None
        self._deferred: str | None = None
        self._replaces = False
        self._limits: tuple[Any, Any] | None = None

    @property
    def preempted(self) -> bool:
        """Whether a preemption that stops the training was announced to any rank."""
        return self._manager.preempted

    def resumed(self, step: int, *, later: Sequence[int]) -> None:
        """Note what was resumed from; `later` are steps in the same root that training will meet again."""
        self._saved_step = step
        if later:
            self._replaces = True
            _logger.warning(
                "resumed step %d of %s although later steps are there (%s): they are replaced as training "
                "meets them, and until then ckpt_path='last' still means step %d",
                step, self._root, ", ".join(str(each) for each in later), max(later),
            )  # fmt: skip

    def begin(self) -> None:
        """Training is about to draw its first batch; after a preemption until now it does not even begin."""
        self._seen_step = self._trainer.global_step
        self._manager.due()
        if self.preempted:
            self._stop()

    def after_batch(self) -> None:
        """Save if it is time; only ever after an optimizer step, never inside an accumulation window."""
        step = self._trainer.global_step
        if step == self._seen_step or self._trainer.fit_loop._should_accumulate():
            return
        self._seen_step = step
        reason = self._reason(step) or self._deferred
        if reason is not None and self._awaits_metric() and PREEMPTION not in reason:
            self._deferred = reason
        elif reason is not None:
            self._save(reason)
        if self.preempted:
            self._stop()

    def after_validation(self) -> None:
        """Save if it has become time, or if this validation was waited for."""
        self.validation.end()
        if self._trainer.sanity_checking or self._trainer.fit_loop._should_accumulate():
            return
        reason = self._reason(self._trainer.global_step) or self._deferred
        if reason is not None:
            self._save(reason)
        if self.preempted:
            self._stop()

    def end(self) -> None:
        """The training has ended by itself: save its last step, and see whether it is to go on elsewhere."""
        self._manager.due()
        if self._settings.save_last and 0 < self._trainer.global_step != self._saved_step:
            self._save(_LAST_STEP)

    def finish(self) -> None:
        """Give signals and limits back; the manager is its owner's to close."""
        self._signals.give_back()
        if self._limits is not None:
            self._trainer.limit_val_batches, self._trainer.fit_loop.epoch_loop.min_steps = self._limits
            self._limits = None

    def _reason(self, step: int) -> str | None:
        reason = self._manager.due(step, total_steps=_total_steps(self._trainer))
        if step == self._saved_step:
            return None
        if reason is None and self._settings.save_last and self._stops_inside_epoch():
            return _LAST_STEP
        return reason

    def _stops_inside_epoch(self) -> bool:
        """Whether this is the last step, and at the end this part of an epoch will count as a whole."""
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        stopping = trainer.should_stop and fit_loop._can_stop_early
        return not fit_loop.epoch_loop.batch_progress.is_last_batch and (
            stopping or trainer.max_steps == trainer.global_step
        )

    def _awaits_metric(self) -> bool:
        """Whether retention ranks by a metric that the validation after this batch will renew."""
        fit_loop = self._trainer.fit_loop
        wants = self._settings.best is not None
        return wants and bool(fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher))

    def _save(self, reason: str) -> None:
        step = self._trainer.global_step
        if reason == _LAST_STEP:
            self._manager.wait()  # so that it is not skipped
        self._deferred = None
        handle = self._roots.save(
            Place(self._root, step_name(step)),
            step,
            LightningState(self._trainer),
            metrics=self.validation.metrics,
            reason=reason,
            replace=self._replaces,
        )
        if handle is not None:
            self._saved_step = step
        if weights_may_change(self._trainer):
            self._roots.settle()

    def _stop(self) -> None:
        """End the training after this step, without the validation that Lightning would still make."""
        trainer, epoch_loop = self._trainer, self._trainer.fit_loop.epoch_loop
        if self._limits is None:
            self._limits = (trainer.limit_val_batches, epoch_loop.min_steps)
            _logger.warning("preempted: training stops after step %d", trainer.global_step)
        trainer.limit_val_batches = 0
        trainer.should_stop = True
        trainer.fit_loop.min_epochs = epoch_loop.min_steps = 0


def weights_may_change(trainer: Any) -> bool:
    """Whether hooks that follow the current one may exchange weights, as averaging callbacks do at the end.

    They do it through `.data`, which no copy in the making could notice.
    """
    return trainer.lightning_module._current_fx_name not in _FOLLOWED_BY_TRAINING


def _total_steps(trainer: Any) -> int | None:
    total = trainer.estimated_stepping_batches
    return int(total) if 0 < total < math.inf else None
