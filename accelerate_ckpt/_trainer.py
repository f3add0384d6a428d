"""Checkpoints for the Hugging Face Trainer, which uses neither Accelerate's `save_state` nor its hooks."""

from __future__ import annotations

import atexit
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, final

import torch
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME

from accelerate_ckpt._places import Place, kind_of
from accelerate_ckpt._settings import Settings
from accelerate_ckpt._trainer_callback import EvaluationLeft, TrainerEvents
from accelerate_ckpt._trainer_choice import newest_to_resume
from accelerate_ckpt._trainer_state import StockTrainer, TrainingState
from ckpt_core import (
    CheckpointError,
    CheckpointInfo,
    CheckpointManager,
    ConfigError,
    CorruptCheckpointError,
    KeepBest,
    KeepLatest,
)
from ckpt_core.cadence import SavePolicy
from ckpt_core.coordination import coordinator_for_job
from ckpt_core.retention import RetentionPolicy
from ckpt_core.storage import open_storage
from ckpt_core.telemetry import Sink

_logger = logging.getLogger(__name__)

_ATTACHED = "_ckpt_suite"
_SHADOWED = (
    "train",
    "_save_checkpoint",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_best_model",
    "_maybe_log_save_evaluate",
)


@final
class TrainerCheckpoints:
    """The checkpoints of one Trainer: `checkpoint-{step}` in its output directory.

    - Threads: all methods on the thread that trains.
    - Ranks: every method but `latest` is collective.

    Attributes:
        manager: saves, finds and removes them.
    """

    def __init__(self, trainer: Trainer, settings: Settings, sinks: Sequence[Sink] = ()) -> None:
        _check_supported(trainer)
        self._trainer: Any = trainer
        self._stock_files = settings.stock_files
        self._stock = StockTrainer(
            train=trainer.train,
            save_checkpoint=trainer._save_checkpoint,
            load_from_checkpoint=trainer._load_from_checkpoint,
            load_optimizer_and_scheduler=trainer._load_optimizer_and_scheduler,
            load_best_model=trainer._load_best_model,
            maybe_log_save_evaluate=trainer._maybe_log_save_evaluate,
        )
        self._coordinator = coordinator_for_job(deadline_seconds=settings.options.deadline_seconds)
        self._closed = False
        self._gated = settings.options.save is not None
        root: Any = trainer.args.output_dir
        self.manager = CheckpointManager(
            root, options=settings.options, coordinator=self._coordinator, sinks=sinks
        )
        self.events = TrainerEvents(self.manager, gated=self._gated)

    def shadows(self) -> dict[str, Any]:
        """What the Trainer is to call instead of its own methods."""
        made = (
            self.train, self.save, self._load_model, self._load_rest, self._load_best, self._after_step
        )  # fmt: skip
        return dict(zip(_SHADOWED, made, strict=True))

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001
        """Train; `resume_from_checkpoint=True` takes the newest checkpoint that verifies.

        Raises:
            CheckpointNotFoundError: there is none to resume from.
            CorruptCheckpointError: all are damaged.
        """
        chosen: Any = resume_from_checkpoint
        if resume_from_checkpoint is True:
            self.manager.wait()
            chosen = self._coordinator.once(lambda: newest_to_resume(self.manager))
        return self._stock.train(chosen, *args, **kwargs)

    def save(self, model: Any, trial: Any) -> None:
        """Save now, as the Trainer does when its control says so.

        Raises:
            SaveError: it could not start, or the save before has failed.
        """
        del model
        if trial is not None:
            raise ConfigError(
                "hyperparameter search moves the output directory: it keeps the stock checkpoints"
            )
        state = self._trainer.state
        self.manager.save(
            state.global_step,
            TrainingState(self._trainer, self._stock, stock_files=self._stock_files),
            metrics=_metrics(state.log_history),
            annotations={"framework": "transformers", "reason": self.events.reason},
            name=f"checkpoint-{state.global_step}",
        )

    @property
    def preempted(self) -> bool:
        """Whether a preemption announced to any rank has stopped the training."""
        return self.manager.preempted

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint; it is not verified here."""
        return self.manager.latest()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            SaveError: it failed.
        """
        self.manager.wait()

    def close(self) -> None:
        """Wait for the save in flight and give the output directory back; harmless when repeated.

        Raises:
            SaveError: the save in flight failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.manager.close()
        finally:
            self._coordinator.close()

    def _after_step(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save, as the control says; a preemption ends the evaluation early."""
        self.events.may_leave = self._gated
        try:
            self._stock.maybe_log_save_evaluate(*args, **kwargs)
        except EvaluationLeft:
            _logger.warning(
                "preempted: the evaluation of step %d is cut short", self._trainer.state.global_step
            )
            self.events.left_evaluation(self._trainer.state, self._trainer.control)
            # Again, for the save: what was to be logged has been.
            self._stock.maybe_log_save_evaluate(*args, **kwargs)
        finally:
            self.events.may_leave = False

    def _load_model(self, checkpoint: str, model: Any = None) -> None:
        # Ours is loaded once, with its optimizer, as soon as both are wrapped: see `_load_rest`.
        if not self._is_ours(checkpoint):
            self._stock.load_from_checkpoint(checkpoint, model)

    def _load_rest(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self._is_ours(checkpoint):
            self._stock.load_optimizer_and_scheduler(checkpoint)
            return
        self._load(checkpoint, with_optimizer=True)
        scheduler = Path(checkpoint) / SCHEDULER_NAME
        if scheduler.is_file() and self._trainer.lr_scheduler is not None:
            self._trainer.lr_scheduler.load_state_dict(torch.load(scheduler, weights_only=True))

    def _load_best(self) -> None:
        self.manager.wait()
        best = self._trainer.state.best_model_checkpoint
        if best is not None and self._is_ours(best):
            self._load(best, with_optimizer=False)
        else:
            self._stock.load_best_model()

    def _load(self, checkpoint: str, *, with_optimizer: bool) -> None:
        state = TrainingState(
            self._trainer, self._stock, stock_files=self._stock_files, with_optimizer=with_optimizer
        )
        place = Place.of(checkpoint)
        if place.root == self.manager.storage.url:
            self.manager.load(state, name=place.name, items=None if with_optimizer else ["model"])
            return
        with CheckpointManager(
            place.root, coordinator=self._coordinator, options=self.manager.options
        ) as other:
            other.load(state, name=place.name, items=None if with_optimizer else ["model"])

    def _is_ours(self, checkpoint: str) -> bool:
        place = Place.of(checkpoint)
        storage = open_storage(place.root)
        kind = self._coordinator.once(lambda: kind_of(storage, place.name))
        if kind == "torn":
            raise CorruptCheckpointError(
                f"{checkpoint} was never committed: its save was interrupted, and nothing was loaded. Use "
                "resume_from_checkpoint=True to get the newest that is whole"
            )
        return kind == "committed"


def enable_trainer(
    trainer: Trainer,
    *,
    save: SavePolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    keep: RetentionPolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    sinks: Sequence[Sink] = (),
    **options: Any,
) -> Trainer:
    """Make this Trainer's checkpoints asynchronous, sharded and committed; call before `train`.

    Collective. `CKPT_SUITE_…` and the accelerate configuration are read as by `enable`.

    Args:
        trainer: any Trainer whose output directory is local or shared.
        save: when to save, in place of the Trainer's `save_strategy`; the Trainer decides if None.
        keep: which checkpoints stay; `save_total_limit`, and the best one, if None.
        sinks: receivers of telemetry events.
        **options: `stock_files` (whether `model.safetensors` and `optimizer.pt` are written too, by the main
            process, so that the stock Trainer reads the checkpoint; True) and the other fields of
            `CheckpointOptions`.

    Raises:
        ConfigError: an option is wrong, or the Trainer is set up for something that cannot work.
    """
    if _ATTACHED in trainer.__dict__:
        raise ConfigError("this Trainer is enabled already; call disable_trainer() first")
    settings = Settings.resolve({"save": save, "keep": keep, **options})
    if settings.options.keep is None:
        settings = replace(settings, options=replace(settings.options, keep=_retention(trainer)))
    attached = TrainerCheckpoints(trainer, settings, sinks)
    trainer.add_callback(attached.events)
    trainer.__dict__.update({**attached.shadows(), _ATTACHED: attached})
    attached.events.take_over_rotation(trainer.args)
    atexit.register(_close_at_exit, weakref.ref(attached))
    return trainer


def disable_trainer(trainer: Trainer) -> Trainer:
    """Wait for the save in flight and put the Trainer's own methods back; harmless when repeated.

    Raises:
        SaveError: the save in flight failed; the methods are back all the same.
    """
    attached: TrainerCheckpoints | None = trainer.__dict__.get(_ATTACHED)
    if attached is None:
        return trainer
    for name in (*_SHADOWED, _ATTACHED):
        trainer.__dict__.pop(name, None)
    trainer.remove_callback(attached.events)
    attached.events.give_back_rotation(trainer.args)
    attached.close()
    return trainer


def trainer_checkpoints(trainer: Trainer) -> TrainerCheckpoints:
    """The checkpoints of an enabled Trainer.

    Raises:
        ConfigError: it is not enabled.
    """
    attached: TrainerCheckpoints | None = trainer.__dict__.get(_ATTACHED)
    if attached is None:
        raise ConfigError("this Trainer is not enabled: call accelerate_ckpt.enable_trainer(trainer) first")
    return attached


def _check_supported(trainer: Trainer) -> None:
    args = trainer.args
    problems = {
        "push_to_hub=True uploads a directory that is not there yet; push after training": args.push_to_hub,
        "enable_jit_checkpoint=True occupies the name of the checkpoint; use save=OnPreemption() instead": (
            getattr(args, "enable_jit_checkpoint", False)
        ),
        "DeepSpeed keeps its shards to itself": trainer.is_deepspeed_enabled,
    }
    found = [text for text, wrong in problems.items() if wrong]
    if found:
        raise ConfigError(f"this Trainer's checkpoints cannot be taken over: {'; '.join(found)}")


def _retention(trainer: Trainer) -> RetentionPolicy | None:
    """What `save_total_limit` means: the newest ones, and the best one beside them."""
    args = trainer.args
    if args.save_total_limit is None or args.save_total_limit <= 0:
        return None
    policies: list[RetentionPolicy] = [KeepLatest(args.save_total_limit)]
    if args.metric_for_best_model is not None:
        metric = args.metric_for_best_model.removeprefix("eval_")
        policies.append(KeepBest(f"eval_{metric}", mode="max" if args.greater_is_better else "min"))
    return reduce(lambda one, other: one | other, policies)


def _metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The numbers logged last under every name."""
    return {
        name: float(value)
        for entry in history
        for name, value in entry.items()
        if type(value) in {int, float}
    }


def _close_at_exit(reference: weakref.ref[TrainerCheckpoints]) -> None:
    attached = reference()
    if attached is None:
        return
    try:
        attached.close()
    except CheckpointError as error:
        _logger.error("%s", error)  # noqa: TRY400 - the message is all there is to say
