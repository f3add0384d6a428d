"""The manager of a Trainer's checkpoints while it trains, and which of them stay."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, final

from transformers import Trainer, TrainingArguments

from accelerate_ckpt._roots import Settings
from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError, KeepAll, KeepBest
from ckpt_core.commit import Occupant
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import CheckpointPath, ManagersByRoot, RunRoot, kind_of, root_of
from ckpt_core.names import MARKER, run_name
from ckpt_core.policies import RetentionPolicy
from ckpt_core.state import StateSource, TrainState
from ckpt_core.storage import Storage, open_storage
from ckpt_core.telemetry import Sink
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class KeepAsTrainer(RetentionPolicy):
    """Keeps newest and best, then the next newest, as `save_total_limit` does.

    The best is the one that the Trainer takes for it: of equals the older.
    """

    limit: int
    metric: str | None = None
    mode: Literal["min", "max"] = "min"

    def keep(self, history: Sequence[CheckpointInfo], now: float) -> frozenset[int]:
        del now
        newest = sorted((info.step for info in history), reverse=True)
        sign = 1 if self.mode == "min" else -1
        scores = [(sign * info.metrics.get(self.metric or "", math.nan), info.step) for info in history]
        best = sorted(score for score in scores if not math.isnan(score[0]))
        first = {*newest[:1], *(step for _, step in best[:1])}
        others = [step for step in newest if step not in first]
        return frozenset(first).union(others[: max(0, self.limit - len(first))])


def retention(keep: RetentionPolicy | None, args: TrainingArguments) -> RetentionPolicy | None:
    """Return the policy: `keep`, else `save_total_limit`; always with the best."""
    metric, mode = best_of(args)
    limit = args.save_total_limit
    if keep is not None:
        return keep if metric is None else keep | KeepAsTrainer(limit=1, metric=metric, mode=mode)
    return KeepAsTrainer(limit=limit, metric=metric, mode=mode) if limit and limit > 0 else None


def best_of(args: TrainingArguments) -> tuple[str | None, Literal["min", "max"]]:
    """Return the metric of the best model, as it is logged, and its direction."""
    if args.metric_for_best_model is None:
        return None, "min"
    name = args.metric_for_best_model.removeprefix("eval_")
    return f"eval_{name}", "max" if args.greater_is_better else "min"


def is_new_best(wanted: Sequence[KeepBest], history: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Return whether a policy would keep what was measured at this step."""
    for policy in wanted:
        sign = 1 if policy.mode == "min" else -1
        # A run that was resumed may have evaluated a step twice: the later value counts.
        scores = {
            entry["step"]: sign * value
            for entry in history
            if isinstance(value := entry.get(policy.metric), int | float)
        }
        now = scores.pop(step, math.nan)
        better = [score for score in scores.values() if math.isfinite(score) and score <= now]
        if not math.isnan(now) and len(better) < policy.n:
            return True
    return False


def metrics_at(history: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
    """Return the numbers that were logged for this step, and for no other."""
    return {
        name: float(value)
        for entry in history
        if entry.get("step") == step
        for name, value in entry.items()
        if name != "step" and type(value) in {int, float}
    }


@final
class TrainerSession:
    """Gives every training a manager of its own. Every method is collective.

    A manager that saves by a policy catches signals. Between trainings they would have no effect, and another
    Trainer of this process may want the directory: then there is a manager that catches and claims nothing.

    Attributes:
        root: of the run's own checkpoints.
        best: what the checkpoint that was resumed from calls the best.
        preempted: whether a preemption has ended the last training.
        saved_step: the last step that was saved since the training began.
    """

    def __init__(self, trainer: Trainer, settings: Settings, sinks: Sequence[Sink]) -> None:
        self._trainer = trainer
        self.settings = settings
        self._sinks = settings.with_numbers(sinks, self._log)
        self.output = trainer.args.output_dir or "."
        given = self.output if settings.root is None else settings.root
        deadline = settings.options.deadline_seconds
        place = given if isinstance(given, Storage) else root_of(given)
        self.root = RunRoot.of(
            open_storage(place, settings.options.storage_options, deadline_seconds=deadline)
        )
        self.managers = ManagersByRoot(self._made, deadline_seconds=deadline)
        self._closed, self._tells, self._begun_at = False, True, 0
        self._begun = False
        self._there = frozenset[str]()
        self.best: str | None = None
        self.preempted = False
        self.saved_step: int | None = None
        self._options = self._options_now(saves=False)
        self.manager = self.managers.at(self.root.path)

    @contextmanager
    def training(self) -> Generator[CheckpointManager]:
        """Claim the output directory and catch signals until the training ends."""
        if self._closed:
            raise ConfigError("the checkpoints of this Trainer are closed: call enable_trainer() again")
        self.preempted, self.best, self._tells = False, None, True
        self._replace(saves=True)
        try:
            yield self.manager
        except BaseException as error:
            # Other ranks may not come here: wait for the save in flight, and for no rank.
            self.manager.__exit__(type(error), error, error.__traceback__)
            raise
        self.manager.wait()
        self.manager.due()
        self.preempted = self.manager.preempted
        self._replace(saves=False)

    def begin(self, step: int) -> None:
        """Begin, or begin again; from an earlier step than was saved, on a new lineage."""
        if not self._begun and not step:
            trainer: Any = self._trainer
            self.manager.initialise(TrainState(model=trainer.model_wrapped, contents=self.settings.contents))
        self.manager.has_weights()
        self._begun, self._options = True, replace(self._options, init_from=None)
        if self.saved_step is not None and step < self.saved_step:
            self._open()
        self.saved_step, self._begun_at = None, step
        if not self.manager.storage.supports_rename:
            # Once, for a request to a bucket at each save would be waited for by the training.
            self._there = frozenset(self.managers.once(lambda: sorted(self.manager.storage.directories(""))))

    def load(
        self,
        checkpoint: str,
        state: StateSource,
        *,
        items: Sequence[str] | None = None,
        change: Mapping[str, Any] | None = None,
    ) -> bool:
        """Load, and return whether it is a checkpoint of the run's own root."""
        place = CheckpointPath.of(checkpoint)
        manager, own = self.managers.at(place.root), place.root == self.root.path
        manager.load(state, name=place.name, items=items, override=change if own else None)
        if not own:
            self.manager.begin_from(manager)
        return own

    def storage_at(self, root: str) -> Storage:
        """Return the storage of a root, spelled as by `root_of`. Collective."""
        return self.managers.at(root).storage

    def path_of(self, name: str) -> str:
        """Return the path of a checkpoint as the Trainer itself would write it."""
        if self.settings.root is None:
            return os.path.join(self.output, name)  # noqa: PTH118 - may be a URL
        return f"{self.manager.storage.url}/{name}"

    def name_of(self, step: int) -> str:
        """Return the name for a save of `step`; collective in a bucket that has it.

        There nothing is replaced: what has the name already, of a training before or of this step, stays.
        """
        name, storage, again = f"checkpoint-{step}", self.manager.storage, step == self.saved_step
        if not storage.supports_rename:
            if not again and name not in self._there:
                return name
            taken = {Occupant.COMMITTED, Occupant.STOCK}
            return self.managers.once(
                lambda: (
                    run_name(name, secrets.token_hex(4)) if again or kind_of(storage, name) in taken else name
                )
            )
        tells = self._tells and self.managers.coordinator.is_coordinator
        if tells and step > self._begun_at and not again and storage.exists(f"{name}/{MARKER}"):
            self._tells = False
            _logger.warning(
                "%s/%s is of a training before, and is replaced when step %d of this one is complete, as by "
                "the stock Trainer, and so are later ones; to keep those, train into another output_dir",
                storage.url,
                name,
                step,
            )
        return name

    def best_left(self, found: str | None) -> str | None:
        """Return the best checkpoint that one rank has found, or that is still there."""
        if (best := self.best) is None:
            return self.managers.once(lambda: found)
        place = CheckpointPath.of(best)
        storage = self.storage_at(place.root)
        return self.managers.once(
            lambda: found or (best if kind_of(storage, place.name) is Occupant.COMMITTED else None)
        )

    def close(self) -> None:
        """Wait for the save in flight and release the output directory; idempotent."""
        self._closed = True
        self.managers.close()

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        """Give numbers to the callbacks that report, and not to `log_history`."""
        trainer = self._trainer
        if not trainer.args.report_to:
            return
        due = trainer.control.should_log
        logs = {**numbers, "checkpoint/step": float(step)}
        trainer.callback_handler.on_log(trainer.args, trainer.state, trainer.control, logs)
        trainer.control.should_log = due

    def _replace(self, *, saves: bool) -> None:
        # While it trains, `args` are changed.
        self._options = self._options_now(saves=saves)
        self._open()

    def _open(self) -> None:
        self.managers.close_managers()
        self.manager, self.saved_step = self.managers.at(self.root.path), None

    def _made(self, root: str, coordinator: Coordinator) -> CheckpointManager:
        options = self._options
        if root != self.root.path:
            options = replace(options, save=None, keep=None, upload=None, export=None, init_from=None)
        manager = CheckpointManager(
            self.root.opens(root), options=options, coordinator=coordinator, sinks=self._sinks
        )
        manager.same_options.add(**self.settings.of_host)
        return manager

    def _options_now(self, *, saves: bool) -> CheckpointOptions:
        options = self.settings.options
        keep = retention(options.keep, self._trainer.args)
        # `save_total_limit` is about what an earlier run has left in the output directory, too.
        prunes = keep is not None and not self.settings.given & {"keep", "abandoned"}
        metric, mode = best_of(self._trainer.args)
        if keep is None and metric is not None and options.exports:
            keep = KeepAll() | KeepBest(metric, mode=mode)  # what the best is that is exported
        return replace(
            options,
            keep=keep,
            abandoned="prune" if prunes else options.abandoned,
            save=options.save if saves else None,
            init_from=options.init_from if saves and not self._begun else None,
        )
