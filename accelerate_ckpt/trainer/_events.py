"""The callback: when the Trainer saves, and that it waits at the end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, final

from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from accelerate_ckpt.trainer._data import TrainerData
from accelerate_ckpt.trainer._session import TrainerSession, best_of, is_new_best
from ckpt_core import ConfigError, KeepBest
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import ranking, replaced
from ckpt_core.policies import Counts, RetentionPolicy

# ruff: noqa: ARG002 - the Trainer gives every callback the same arguments

_logger = logger_of(__name__)

BEST = "new best"
"""The reason of a save at an evaluation that is a new best."""


class EvaluationLeft(Exception):  # noqa: N818 - it is no error, and never leaves the Trainer
    """Signals a preemption in the middle of an evaluation."""


@final
class TrainerEvents(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Applies the save policy, stops at a preemption, waits at the end of training.

    Attributes:
        gated: whether a save policy decides, instead of the Trainer's `save_strategy`.
        own_evaluation: whether the evaluation that runs is one of the training's own.
        evaluation_left: whether an evaluation that was due at this step is not made, for a preemption.
    """

    def __init__(
        self, session: TrainerSession, data: TrainerData, go_on: Callable[[], None], *, gated: bool
    ) -> None:
        self._session = session
        self._data = data
        self._go_on = go_on
        self._strategy: Any = SaveStrategy.NO
        self._wanted: list[KeepBest] = []
        self.gated = gated
        self.reason = "trainer"
        self.own_evaluation = self.evaluation_left = self.decided = self.epoch_ended = False
        self._stopping = False

    def __reduce__(self) -> Any:
        return TrainerCallback, ()  # in a copy of the Trainer, which is stock's

    @contextmanager
    def in_charge(self, args: TrainingArguments, keep: RetentionPolicy | None) -> Generator[None]:
        """Stop the Trainer from deleting, and let it track its best model at every step."""
        metric, mode = best_of(args)
        # `keep` is what `retention` returns, which always keeps the Trainer's own best.
        own = metric is not None and (keep is not None or args.load_best_model_at_end)
        self._wanted = [*ranking(keep), *([KeepBest(str(metric), mode=mode)] if own else [])]
        self._strategy = args.save_strategy
        strategy = SaveStrategy.STEPS if self.gated else args.save_strategy
        with replaced(args, save_total_limit=None, save_strategy=strategy):
            if not self.gated:
                self._warn_of_lost_best(args)
            yield

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin training, or begin again, as `auto_find_batch_size` does.

        All other callbacks have begun: a resumed training makes up for what its step has left out.
        """
        self._session.begin(state.global_step)
        self.evaluation_left = self.decided = self.epoch_ended = self._stopping = False
        # As saved, they are of a step that is done.
        control.should_log = control.should_evaluate = control.should_save = False
        if self.gated:
            self._session.manager.due(**self._counts(state))
        # Each rank has looked for it on its own disk, and all of them or none must load it at the end.
        state.best_model_checkpoint = self._session.best_left(state.best_model_checkpoint)
        self._go_on()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.epoch_ended = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reason, self._stopping = "trainer", control.should_training_stop
        reason = self._reason(state) if self.gated or self._session.manager.options.counts else None
        if not self.gated:
            return
        at_end = state.global_step >= state.max_steps
        wants_end = self._strategy not in {SaveStrategy.NO, None}
        self.reason = reason or "end of training"
        control.should_save = reason is not None or (at_end and wants_end)
        self._stop(control)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Request a save of a new best, whatever the save policy says, if it is wanted."""
        wanted = self._wanted
        if self.own_evaluation:
            self.decided = control.should_training_stop and not self._stopping
        if not (self.gated and self.own_evaluation and wanted):
            return
        # What was measured may differ in its last bit from rank to rank.
        if self._session.managers.once(lambda: is_new_best(wanted, state.log_history, state.global_step)):
            self.reason = BEST
            control.should_save = True

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave an evaluation if a preemption was announced, on every rank alike."""
        manager = self._session.manager
        if self.gated and self.own_evaluation and manager.due() and manager.preempted:
            raise EvaluationLeft

    def left_evaluation(self, state: Any, control: Any) -> None:
        """Decide again about a step whose evaluation a preemption cut short."""
        reason = self._reason(state)
        if reason is not None:
            self.reason, control.should_save = reason, True
        control.should_evaluate = True
        self._stop(control)

    def _reason(self, state: Any) -> str | None:
        manager = self._session.manager
        needed = manager.options.counts
        if "tokens" in needed and state.global_step and not state.num_input_tokens_seen:
            raise ConfigError(
                f"EveryTokens: the Trainer has counted no tokens up to step {state.global_step}: it counts "
                "the main_input_name of its model, which the batches do not have; give another save policy"
            )
        counts: Counts = self._counts(state) if needed else {}
        return manager.due(state.global_step, total_steps=state.max_steps, **counts)

    def _counts(self, state: Any) -> Counts:
        epochs = self._data.epochs if state.global_step else 0
        return {
            "epochs": int(state.epoch or 0) if epochs is None else epochs,
            "tokens": state.num_input_tokens_seen,
        }

    def _stop(self, control: Any) -> None:
        """End training after a preemption, without the evaluation before the save."""
        if self._session.manager.preempted:
            control.should_training_stop = True
            self.evaluation_left |= control.should_evaluate
            control.should_evaluate = False

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide again about the epoch's last step if the policy counts epochs."""
        if not self._data.end_epoch(stopped=control.should_training_stop):
            # It is due at the end of the epoch, which a preemption alone does not bring.
            control.should_evaluate &= not self._session.manager.preempted or self._stopping
        self.epoch_ended, self._stopping = True, control.should_training_stop
        reason = self._reason(state) if "epochs" in self._session.manager.options.counts else None
        if self.gated:
            self.reason, control.should_save = reason or self.reason, reason is not None
            self._stop(control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.manager.wait()
        self._session.manager.due()

    def _warn_of_lost_best(self, args: TrainingArguments) -> None:
        """Warn at the start if the best may be measured where nothing is saved."""
        if (
            not self._wanted
            or args.eval_strategy == IntervalStrategy.NO
            or args.save_strategy == SaveStrategy.BEST
        ):
            return
        same, every = args.save_strategy == args.eval_strategy, args.eval_steps
        if same and (args.save_strategy != SaveStrategy.STEPS or (every and every % args.save_steps == 0)):
            return
        _logger.warning(
            "the Trainer evaluates where it does not save (eval_strategy=%s, save_strategy=%s): the best "
            "%s is only kept if a save follows its evaluation. Save at every evaluation, with "
            'save_strategy="best", or with save= of enable_trainer(), which saves every new best',
            args.eval_strategy,
            args.save_strategy,
            " or ".join(sorted({policy.metric for policy in self._wanted})),
        )
