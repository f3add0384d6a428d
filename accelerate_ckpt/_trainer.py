"""Checkpoints for the Hugging Face Trainer, which uses neither Accelerate's `save_state` nor its hooks."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, final

from transformers import Trainer

from accelerate_ckpt._patch import ENDED
from accelerate_ckpt._settings import Settings
from accelerate_ckpt._trainer_callback import BEST, EvaluationLeft, TrainerEvents
from accelerate_ckpt._trainer_resume import TrainerResume
from accelerate_ckpt._trainer_retention import metrics_at
from accelerate_ckpt._trainer_session import TrainerSession
from accelerate_ckpt._trainer_state import StockTrainer, TrainingState
from ckpt_core import CheckpointError, CheckpointInfo, CheckpointManager, ConfigError
from ckpt_core.cadence import SavePolicy
from ckpt_core.retention import RetentionPolicy
from ckpt_core.telemetry import Sink

_logger = logging.getLogger(__name__)

_ATTACHED, _WAITING = "_ckpt_suite", "_ckpt_suite_waiting"
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
    - Jobs: the output directory is claimed, and signals are heard, only while `train` runs.

    Attributes:
        events: what a callback does of it.
        implicit: whether nobody asked for it in the script, so that `enable_trainer` may still be called.
    """

    def __init__(
        self, trainer: Trainer, settings: Settings, sinks: Sequence[Sink] = (), *, implicit: bool = False
    ) -> None:
        _check_supported(trainer)
        self._trainer: Any = trainer
        self._stock_files = settings.stock_files
        self._stock = StockTrainer(
            train=trainer.train,
            save_checkpoint=trainer._save_checkpoint,
            save_model=trainer.save_model,
            load_from_checkpoint=trainer._load_from_checkpoint,
            load_optimizer_and_scheduler=trainer._load_optimizer_and_scheduler,
            load_best_model=trainer._load_best_model,
            maybe_log_save_evaluate=trainer._maybe_log_save_evaluate,
        )
        self._session = TrainerSession(trainer, settings, sinks)
        self._resume = TrainerResume(trainer, self._stock, self._session, stock_files=self._stock_files)
        self.events = TrainerEvents(self._session, gated=settings.options.save is not None)
        self.implicit = implicit

    def shadows(self) -> dict[str, Any]:
        """What the Trainer is to call instead of its own methods."""
        resume = self._resume
        made = (
            self.train, self.save, resume.load_model, resume.load_rest, resume.load_best, self._after_step
        )  # fmt: skip
        return dict(zip(_SHADOWED, made, strict=True))

    @property
    def manager(self) -> CheckpointManager:
        """Saves, finds and removes them; every training has its own."""
        return self._session.manager

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,  # noqa: FBT001 - as in stock
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train; `resume_from_checkpoint=True` takes the newest checkpoint that verifies, if there is any.

        Raises:
            CorruptCheckpointError: all are damaged, or the one that was named is.
            ConfigError: what was named holds checkpoints, but is none.
            UnsafeCheckpointError: what was chosen needs `allow_pickle=True`; nothing was touched.
            SaveError: the last save failed.
            SystemExit: it was preempted, in a script that knows nothing of us.
        """
        if kwargs.get("trial", args[0] if args else None) is not None:
            return self._train_trial(resume_from_checkpoint, *args, **kwargs)
        arguments = self._trainer.args
        with self._session.training() as manager:
            self.events.take_over(arguments, manager.options.keep)
            try:
                with self._resume.chosen(resume_from_checkpoint) as checkpoint:
                    result = self._stock.train(checkpoint, *args, **kwargs)
            finally:
                self.events.give_back(arguments)
        if self.implicit and self.preempted:
            # The script does not know of it, and would take the training for finished.
            _logger.warning(
                "preempted: step %d is saved, and the script ends", self._trainer.state.global_step
            )
            raise SystemExit(ENDED)
        return result

    def _train_trial(self, *args: Any, **kwargs: Any) -> Any:
        """Train for a hyperparameter search, whose trials have directories of their own."""
        told = "a hyperparameter search has a directory for each trial: it keeps the stock checkpoints"
        if not self.implicit:
            raise ConfigError(f"{told}; call disable_trainer() before hyperparameter_search()")
        _logger.warning("%s", told)
        disable_trainer(self._trainer)
        return self._stock.train(*args, **kwargs)

    def save(self, model: Any, trial: Any) -> None:
        """Save now, as the Trainer does when its control says so.

        Raises:
            SaveError: it could not start, or the save before has failed.
        """
        del model, trial
        state, name = self._trainer.state, f"checkpoint-{self._trainer.state.global_step}"
        if self.events.reason == BEST:
            self.manager.wait()  # back-pressure must not leave it out
        best = state.best_model_checkpoint
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = os.path.join(self._trainer.args.output_dir, name)  # noqa: PTH118
        handle = self.manager.save(
            state.global_step,
            TrainingState(self._trainer, self._stock, self._session.pickles, stock_files=self._stock_files),
            metrics=metrics_at(state.log_history, state.global_step),
            annotations={"framework": "transformers", "reason": self.events.reason},
            name=name,
        )
        if handle is None:
            state.best_model_checkpoint = best
        self._session.saved_step = state.global_step

    @property
    def preempted(self) -> bool:
        """Whether a preemption announced to any rank has stopped the training."""
        return self._session.preempted or self.manager.preempted

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
        self._session.close()

    def _after_step(self, *args: Any, **kwargs: Any) -> None:
        """Log, evaluate and save, as the control says; a preemption ends the evaluation early."""
        self.events.own_evaluation = True
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
            self.events.own_evaluation = False


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
    _check_is_trainer(trainer)
    if "root" in options:
        raise ConfigError(
            f"checkpoints go to the Trainer's output_dir ({trainer.args.output_dir}); leave root= out"
        )
    attached = attached_to(trainer)
    if attached is not None and not attached.implicit:
        raise ConfigError("this Trainer is enabled already; call disable_trainer() first")
    settings = Settings.resolve({"save": save, "keep": keep, **options})
    _check_supported(trainer)  # before what is there goes
    disable_trainer(trainer)
    attach(trainer, settings, sinks)
    return trainer


def enable_trainer_implicitly(trainer: Trainer) -> None:
    """What the runner does for scripts that do not call `enable_trainer`, which may still be called.

    Nothing happens before it trains: a Trainer that one rank has made alone, to evaluate, waits for no other.

    Raises:
        ConfigError: a setting is wrong. What is not supported stays as it is, with a warning.
    """
    settings = Settings.resolve({})

    def train(*args: Any, **kwargs: Any) -> Any:
        del trainer.__dict__["train"], trainer.__dict__[_WAITING]
        try:
            attach(trainer, settings, implicit=True)
        except ConfigError as error:
            _logger.warning("%s: they stay the stock Trainer's own", error)
        return trainer.train(*args, **kwargs)

    trainer.__dict__.update({"train": train, _WAITING: True})


def attach(
    trainer: Trainer, settings: Settings, sinks: Sequence[Sink] = (), *, implicit: bool = False
) -> None:
    """Shadow the methods of this instance; its class and other instances are left alone."""
    attached = TrainerCheckpoints(trainer, settings, sinks, implicit=implicit)
    trainer.add_callback(attached.events)
    trainer.__dict__.update({**attached.shadows(), _ATTACHED: attached})
    atexit.register(_close_at_exit, weakref.ref(attached))


def attached_to(trainer: Trainer) -> TrainerCheckpoints | None:
    """The checkpoints of a Trainer, or None if it is not enabled."""
    return trainer.__dict__.get(_ATTACHED)


def disable_trainer(trainer: Trainer) -> Trainer:
    """Wait for the save in flight and put the Trainer's own methods back; harmless when repeated.

    Raises:
        SaveError: the save in flight failed; the methods are back all the same.
    """
    _check_is_trainer(trainer)
    if trainer.__dict__.pop(_WAITING, False):
        del trainer.__dict__["train"]
    attached = attached_to(trainer)
    if attached is None:
        return trainer
    for name in (*_SHADOWED, _ATTACHED):
        trainer.__dict__.pop(name, None)
    trainer.remove_callback(attached.events)
    attached.close()
    return trainer


def trainer_checkpoints(trainer: Trainer) -> TrainerCheckpoints:
    """The checkpoints of an enabled Trainer.

    Raises:
        ConfigError: it is not enabled.
    """
    _check_is_trainer(trainer)
    attached = attached_to(trainer)
    if attached is None:
        raise ConfigError("this Trainer is not enabled: call accelerate_ckpt.enable_trainer(trainer) first")
    return attached


def _check_is_trainer(trainer: Any) -> None:
    if isinstance(trainer, Trainer):
        return
    if isinstance(trainer, type) and issubclass(trainer, Trainer):
        raise ConfigError(f"{trainer.__name__} is a class: make a Trainer of it first, and give that")
    other = "; an Accelerator has accelerate_ckpt.enable()" if type(trainer).__name__ == "Accelerator" else ""
    raise ConfigError(f"a transformers.Trainer is needed, not {type(trainer).__name__}{other}")


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


def _close_at_exit(reference: weakref.ref[TrainerCheckpoints]) -> None:
    attached = reference()
    if attached is None:
        return
    try:
        attached.close()
    except CheckpointError as error:
        _logger.error("%s", error)  # noqa: TRY400 - the message is all there is to say
