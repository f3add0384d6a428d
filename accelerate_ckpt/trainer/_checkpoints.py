"""`enable_trainer` and `TrainerCheckpoints`: the methods of one Trainer, replaced."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import torch
from transformers import Trainer
from transformers.trainer import SCHEDULER_NAME
from transformers.trainer_utils import HubStrategy

from accelerate_ckpt._checkpoints import ENDED, tell_restored
from accelerate_ckpt._roots import Settings
from accelerate_ckpt.trainer._callbacks import CallbackStates, ToCome, load_exported, undo_of_evaluation
from accelerate_ckpt.trainer._data import TrainerData
from accelerate_ckpt.trainer._events import BEST, EvaluationLeft, TrainerEvents
from accelerate_ckpt.trainer._loading import Ours, chosen, is_ours, require_readable
from accelerate_ckpt.trainer._session import TrainerSession, metrics_at
from accelerate_ckpt.trainer._state import TrainingState
from ckpt_core import CheckpointInfo, CheckpointManager, ConfigError
from ckpt_core.cadence import needed_counts
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import CheckpointPath, attach, attached_to, detach, replaced, shadow
from ckpt_core.options import shows_options
from ckpt_core.policies import RetentionPolicy, SavePolicy
from ckpt_core.state import load_item
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink
from ckpt_core.validation import require

_logger = logger_of(__name__)

_WAITING = "_ckpt_suite_waiting"
_SHADOWED = {
    "train": "train",
    "_save_checkpoint": "save",
    "_load_from_checkpoint": "_load_model",
    "_load_optimizer_and_scheduler": "_load_rest",
    "_load_best_model": "_load_best",
    "_maybe_log_save_evaluate": "_after_step",
}
"""Methods of the Trainer, and those of ours that replace them."""


@final
class TrainerCheckpoints:
    """The checkpoints of one Trainer: `checkpoint-{step}` in its output directory.

    - Threads: all methods on the thread that trains.
    - Ranks: every method but `latest` is collective.
    - Jobs: the output directory is claimed, and signals are caught, only while `train` runs.

    Attributes:
        implicit: whether the script did not ask for it, so that it may still call `enable_trainer`.
    """

    def __init__(
        self, trainer: Trainer, settings: Settings, sinks: Sequence[Sink] = (), *, implicit: bool = False
    ) -> None:
        _check_supported(trainer)
        self._trainer: Any = trainer
        self._stock = SimpleNamespace(**{name: getattr(trainer, name) for name in ("save_model", *_SHADOWED)})
        self._session = TrainerSession(trainer, settings, sinks)
        self._settings = settings
        self._data = TrainerData(trainer)
        gated = settings.options.save is not None
        self.events = TrainerEvents(self._session, self._data, self._go_on, gated=gated)
        self._resumed: Ours | None = None
        self._loaded: ToCome | None = None
        self._logged: tuple[Any, Any] = (None, None)
        self.implicit = implicit

    def shadows(self) -> dict[str, Any]:
        return {name: getattr(self, ours) for name, ours in _SHADOWED.items()} | self._data.shadows()

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the checkpoints; every training has its own."""
        return self._session.manager

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike[str] | bool | None = None,  # noqa: FBT001 - as in stock
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Train; `resume_from_checkpoint=True` takes the newest that verifies, if any.

        Raises:
            CorruptCheckpointError: all are damaged, or the one that was named is.
            ConfigError: what was named holds checkpoints, but is none.
            UnsafeCheckpointError: what was chosen needs `allow_pickle=True`; nothing was touched.
            SaveError: the last save failed.
            SystemExit: it was preempted, in a script that did not enable it.
        """
        if kwargs.get("trial", args[0] if args else None) is not None:
            problem = "a hyperparameter search has a directory for each trial: it keeps the stock checkpoints"
            if not self.implicit:
                raise ConfigError(f"{problem}; call disable_trainer() before hyperparameter_search()")
            _logger.warning("%s", problem)
            disable_trainer(self._trainer)
            return self._stock.train(resume_from_checkpoint, *args, **kwargs)
        self._come_last()
        self._ignored = kwargs.get("ignore_keys_for_eval", args[1] if len(args) > 1 else None)
        with (
            self._session.training() as manager,
            self.events.in_charge(self._trainer.args, manager.options.keep),
            chosen(self._session, resume_from_checkpoint, self._trainer.args) as checkpoint,
        ):
            ours = checkpoint if isinstance(checkpoint, Ours) else None
            with replaced(self, _resumed=ours), self._data.training(None if ours is None else ours.resumed):
                result = self._stock.train(checkpoint if ours is None else ours.view, *args, **kwargs)
        if self.implicit and self.preempted:
            # The script does not know of it, and would take the training for finished.
            _logger.warning(
                "preempted: step %d is saved, and the script ends", self._trainer.state.global_step
            )
            raise SystemExit(ENDED)
        return result

    def save(self, model: Any, trial: Any) -> None:
        """Save now, as the Trainer does when its control says so.

        Raises:
            SaveError: it could not start, or the save before has failed.
        """
        del model, trial
        state = self._trainer.state
        if self.events.reason == BEST:
            self.manager.wait()  # back-pressure must not leave it out
        name, best = self._session.name_of(state.global_step), state.best_model_checkpoint
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = self._session.path_of(name)
        handle = self.manager.save(
            state.global_step,
            self._present(),
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
        """Return the newest committed checkpoint, unverified."""
        return self.manager.latest()

    def wait(self) -> None:
        """Wait for the save in flight.

        Raises:
            SaveError: it failed.
        """
        self.manager.wait()

    def close(self) -> None:
        """Wait for the save in flight and release the output directory; idempotent.

        Raises:
            SaveError: the save in flight failed.
        """
        self._session.close()

    def _come_last(self) -> None:
        """Let our callback hear of everything after all others, which may decide."""
        self._trainer.remove_callback(self.events)
        self._trainer.add_callback(self.events)

    def _load_model(self, checkpoint: str, model: Any = None) -> None:
        """Load the model of a stock checkpoint; ours is loaded with its optimizer."""
        if self._resumed is None:
            with self._settings.pickles.kept_from_others():
                self._stock._load_from_checkpoint(checkpoint, model)

    def _load_rest(self, checkpoint: str | None) -> None:
        """Load model, optimizer and scheduler of ours, or the rest of a stock checkpoint."""
        ours, pickles, trainer = self._resumed, self._settings.pickles, self._trainer
        if ours is None:
            with pickles.kept_from_others():
                self._stock._load_optimizer_and_scheduler(checkpoint)
        else:
            state = TrainingState(trainer, self._stock, self._settings)
            if self._session.load(ours.checkpoint, state, change=self._settings.override.values):
                self._session.saved_step = None
            self._loaded = state.to_come
            path = Path(ours.view) / SCHEDULER_NAME
            if path.exists() and trainer.lr_scheduler is not None:
                saved = pickles.load(path.read_bytes(), f"{ours.checkpoint}/{SCHEDULER_NAME}")
                load_item("the scheduler", trainer.lr_scheduler, saved)
            state.apply_change()
        self._come_last()  # the Trainer may have replaced callbacks

    def _load_best(self) -> None:
        self.manager.wait()
        best = self._trainer.state.best_model_checkpoint
        if best is not None and is_ours(self._session, best):
            state = TrainingState(self._trainer, self._stock, self._settings, with_optimizer=False)
            self._session.load(best, state, items=["model"])
            return
        if best is not None:
            require_readable(self._session, best, ours=False)
        with self._settings.pickles.kept_from_others():
            self._stock._load_best_model()

    def _go_on(self) -> None:
        """Load callbacks, and make up for what the resumed step has left out."""
        trainer, ours, to_come = self._trainer, self._resumed, self._loaded
        self._loaded = None
        if ours is not None and to_come is not None:
            if callbacks := CallbackStates(trainer):
                self._session.load(ours.checkpoint, callbacks)
            load_exported(trainer)
            if trainer.args.process_index == 0:
                place = CheckpointPath.of(ours.checkpoint)
                tell_restored(trainer.state.global_step, place.root, place.name)
        self._data.begin()
        if ours is None or to_come is None:
            return
        self._logged, stops = to_come.logged, to_come.stops(trainer.args)
        if to_come.evaluation:
            # From its random numbers; the training goes on from those that follow.
            trainer._load_rng_state(ours.view)
            trainer.control.should_evaluate = True
            self._after_step(
                trainer._tr_loss, None, trainer.model, None, trainer.state.epoch, self._ignored, 0.0
            )
            trainer._save_rng_state(ours.view)
        elif stops and trainer.args.process_index == 0:
            _logger.warning(
                "the evaluation of step %d has decided to stop the training, and so it ends: raise max_steps "
                "or num_train_epochs to train on",
                trainer.state.global_step,
            )
        trainer.control.should_training_stop |= stops
        self._data.epoch_ended = to_come.epoch_ended or self.preempted

    def _after_step(self, loss: Any, norm: Any, *args: Any, learning_rate: Any = None, **kwargs: Any) -> None:
        """Log, evaluate and save as the control says; a preemption cuts evaluation short."""
        trainer, events = self._trainer, self.events
        if norm is None and learning_rate is None:  # no step of this epoch was made since the resume
            norm, learning_rate = self._logged
        self._logged = norm, learning_rate

        def stock() -> None:
            self._stock._maybe_log_save_evaluate(loss, norm, *args, learning_rate=learning_rate, **kwargs)

        events.own_evaluation, undo = True, None
        try:
            if trainer.control.should_evaluate and (events.gated or self.manager.options.on_exception):
                with replaced(trainer.control, should_save=False, should_evaluate=False):
                    stock()  # what is logged is not undone
                with replaced(events, evaluation_left=True):
                    self._note_step()  # the evaluation may fail
                undo = undo_of_evaluation(trainer)
            stock()
        except EvaluationLeft:
            assert undo is not None
            _logger.warning("preempted: the evaluation of step %d is cut short", trainer.state.global_step)
            undo()
            events.left_evaluation(trainer.state, trainer.control)
            stock()
        finally:
            events.own_evaluation = False
        self._note_step()

    def _note_step(self) -> None:
        """Note the present step for `on_exception`; once more after its evaluation."""
        if self.manager.options.on_exception is not None:
            step, present = self._trainer.state.global_step, self._present()
            present.stock_files = False  # it would be written at every step
            self.manager.note_step(
                step,
                present,
                metrics=metrics_at(self._trainer.state.log_history, step),
                annotations={"framework": "transformers"},
                name=f"checkpoint-{step}",
                again=True,
            )

    def _present(self) -> TrainingState:
        """Return the state as it is now, with what the step that is saved has left out."""
        args, events, (norm, rate) = self._trainer.args, self.events, self._logged
        source = TrainingState(self._trainer, self._stock, self._settings, progress=self._data.progress())
        source.to_come = ToCome(
            evaluation=events.evaluation_left,
            decided=events.decided,
            until=(args.max_steps, args.num_train_epochs),
            epoch_ended=events.epoch_ended,
            logged=(norm.item() if isinstance(norm, torch.Tensor) else norm, rate),
        )
        return source


@shows_options(stock_files=None, contents=None, override=None, log_costs=True)
def enable_trainer(
    trainer: Trainer,
    root: str | os.PathLike[str] | Storage | None = None,
    *,
    save: SavePolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    keep: RetentionPolicy | Mapping[str, Any] | Sequence[Any] | None = None,
    sinks: Sequence[Sink] = (),
    **options: Any,
) -> Trainer:
    """Make a Trainer's checkpoints asynchronous, sharded and committed.

    Call it before `train`.

    Collective. `CKPT_SUITE_…` and the file of `CKPT_SUITE_CONFIG` are read as by `enable`.

    Args:
        trainer: any Trainer.
        root: where its checkpoints go, such as a URL; its output directory, which must then be local to one
            machine or shared, if None.
        save: when to save, in place of the Trainer's `save_strategy`; the Trainer decides if None.
        keep: which checkpoints stay; `save_total_limit`, and the best one, if None.
        sinks: receivers of telemetry events.
        stock_files: True writes `model.safetensors` and `optimizer.pt`, too, so that the stock Trainer reads
            the checkpoint; False neither; None the weights of a model that is not sharded, in
            `model.safetensors` alone.
        contents: "all" of the model, or "trainable", which refers to what is frozen.
        override: hyperparameters that a resumed training changes, as of `enable`.
        log_costs: whether `report_to` gets what each save has cost.
        **options: the other fields of `CheckpointOptions`.

    Raises:
        ConfigError: an option is wrong, or the Trainer is set up for something that cannot work.
    """
    _check_is_trainer(trainer)
    attached = attached_to(trainer)
    if attached is not None and not attached.implicit:
        raise ConfigError("this Trainer is enabled already; call disable_trainer() first")
    settings = Settings.resolve({"root": root, "save": save, "keep": keep, **options})
    if options.get("gradients"):
        raise ConfigError("gradients=True is no option here: the Trainer saves between accumulation windows")
    _check_supported(trainer)  # before the present one is disabled
    _require_tokens(trainer, settings.options.save)
    disable_trainer(trainer)
    _attach(trainer, settings, sinks)
    return trainer


def enable_trainer_implicitly(trainer: Trainer) -> None:
    """Enable a Trainer for a script that does not, but still may.

    Nothing happens before it trains: a Trainer that one rank has made alone, to evaluate, waits for no other.
    """
    settings = Settings.resolve({})
    _require_tokens(trainer, settings.options.save)

    def train(*args: Any, **kwargs: Any) -> Any:
        del trainer.__dict__["train"], trainer.__dict__[_WAITING]
        try:
            _attach(trainer, settings, implicit=True)
        except ConfigError as error:
            _logger.warning("%s: they stay the stock Trainer's own", error)
        return trainer.train(*args, **kwargs)

    shadow(trainer, {"train": train})
    trainer.__dict__[_WAITING] = True


def _attach(
    trainer: Trainer, settings: Settings, sinks: Sequence[Sink] = (), *, implicit: bool = False
) -> None:
    """Replace methods of this instance; its class and other instances stay."""
    attached = TrainerCheckpoints(trainer, settings, sinks, implicit=implicit)
    trainer.add_callback(attached.events)
    attach(trainer, attached, attached.shadows())


def disable_trainer(trainer: Trainer) -> Trainer:
    """Wait for the save in flight and put the Trainer's own methods back; idempotent.

    Raises:
        SaveError: the save in flight failed; the methods are back all the same.
    """
    _check_is_trainer(trainer)
    if trainer.__dict__.pop(_WAITING, False):
        del trainer.__dict__["train"]
    attached = detach(trainer)
    if attached is not None:
        trainer.remove_callback(attached.events)
        attached.close()
    return trainer


def trainer_checkpoints(trainer: Trainer) -> TrainerCheckpoints:
    """Return the checkpoints of an enabled Trainer.

    Raises:
        ConfigError: it is not enabled.
    """
    _check_is_trainer(trainer)
    attached: TrainerCheckpoints | None = attached_to(trainer)
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


def _require_tokens(trainer: Trainer, policy: SavePolicy | None) -> None:
    if "tokens" in needed_counts(policy):
        problem = 'EveryTokens needs TrainingArguments(include_num_input_tokens_seen="all" or "non_padding")'
        require("save", problem if trainer.args.include_num_input_tokens_seen in {"no", False} else None)


def _check_supported(trainer: Trainer) -> None:
    args = trainer.args
    strategy = HubStrategy(args.hub_strategy).value
    name = args.hub_model_id or Path(args.output_dir or ".").resolve().name  # as the Trainer itself calls it
    place = f"hf://{name if '/' in name else f'USER/{name}'}"
    line = f'export=Export(to="hf", place="{place}", when={{"every": 1}})'
    problems = {
        f'push_to_hub=True with hub_strategy="{strategy}" uploads a directory that is not there yet: write '
        f'{line} instead, or hub_strategy="end", and push after training': (
            args.push_to_hub and strategy != "end"
        ),
        "enable_jit_checkpoint=True occupies the name of the checkpoint; use save=OnPreemption() instead": (
            getattr(args, "enable_jit_checkpoint", False)
        ),
        "DeepSpeed keeps its shards to itself": trainer.is_deepspeed_enabled,
    }
    found = [text for text, wrong in problems.items() if wrong]
    if found:
        raise ConfigError(f"this Trainer's checkpoints cannot be taken over: {'; '.join(found)}")
