"""When the Trainer saves, and that it waits at the end: all that a callback can do."""

from __future__ import annotations

from typing import Any, final

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ckpt_core import CheckpointManager


class EvaluationLeft(Exception):  # noqa: N818 - it is no error, and never leaves the Trainer
    """A preemption was announced in the middle of an evaluation."""


@final
class TrainerEvents(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Lets the save policy decide, stops after a save for a preemption, and drains at the end of training.

    Attributes:
        reason: why the save that is due is due.
        may_leave: whether the evaluation that runs is one of the training's own, and is caught.
    """

    def __init__(self, manager: CheckpointManager, *, gated: bool) -> None:
        self._manager = manager
        self._gated = gated
        self._limit: int | None = None
        self.reason = "trainer"
        self.may_leave = False

    def take_over_rotation(self, args: TrainingArguments) -> None:
        """Keep the Trainer from deleting: its limit has become a retention policy."""
        self._limit, args.save_total_limit = args.save_total_limit, None

    def give_back_rotation(self, args: TrainingArguments) -> None:
        """Undo `take_over_rotation`."""
        args.save_total_limit = self._limit

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Decide about this step, after the Trainer's own flow has."""
        del args, kwargs
        if not self._gated:
            return
        reason = self._manager.due(state.global_step, total_steps=state.max_steps)
        last = state.global_step >= state.max_steps and control.should_save
        self.reason = reason or "end of training"
        control.should_save = reason is not None or last
        self._stop(control)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave an evaluation, after the same batch on every rank, if a preemption was announced.

        Raises:
            EvaluationLeft: see `left_evaluation`.
        """
        del args, state, control, kwargs
        if self.may_leave and self._manager.due() and self._manager.preempted:
            raise EvaluationLeft

    def left_evaluation(self, state: TrainerState, control: TrainerControl) -> None:
        """Decide about the step again, in whose evaluation a preemption was announced."""
        reason = self._manager.due(state.global_step, total_steps=state.max_steps)
        if reason is not None:
            self.reason, control.should_save = reason, True
        self._stop(control)

    def _stop(self, control: TrainerControl) -> None:
        """End the training after a preemption, without the evaluation that would come before the save."""
        if self._manager.preempted:
            control.should_training_stop = True
            control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The save policy has decided at the epoch's last step."""
        del args, state, kwargs
        if self._gated:
            control.should_save = False
            self._stop(control)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training ends when its last checkpoint is committed."""
        del args, state, control, kwargs
        self._manager.due()
        self._manager.wait()
