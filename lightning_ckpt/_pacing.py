"""When a run saves by itself: by the save policy, at the end, at a preemption.

Lightning's handlers of signals, and its SLURM handler, save wherever they interrupt a step, and requeue at
once. Here their signals are preemptions as any: the job is requeued when its last checkpoint is committed and
the root free.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from torch.utils.data import IterableDataset

from ckpt_core.cadence import preemptions
from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import shadow
from ckpt_core.names import run_name, step_name
from ckpt_core.policies import Counts
from ckpt_core.saving import SaveHandle
from ckpt_core.state import load_rng_state, rng_state
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import integer, plain_integer, require
from lightning_ckpt._committed import Announcements
from lightning_ckpt._fit import Fit
from lightning_ckpt._state import LightningState

if TYPE_CHECKING:
    from lightning_ckpt._session import Session

T = TypeVar("T")
_logger = logger_of(__name__)
JOB: Final = "slurm_job"
"""The annotation that names the job of a checkpoint."""
_SECONDS: Final = 60
_LAST_STEP = "last step"
_BEST = "best"
_UNKNOWN: Final = -1
_warned_of: Final = set[str]()
"""The roots for which this process has warned of a fit that continues from nothing."""


@final
class Pacing:
    """Saves the run's own checkpoints while it trains.

    Concurrency: the thread that trains; every method on every rank alike, for most may save.

    Attributes:
        is_to_requeue: whether SLURM is to start this job again once the root is free.
    """

    def __init__(self, fit: Fit, session: Session) -> None:
        self._fit = fit
        self._trainer = trainer = fit.trainer
        self._settings = settings = session.settings
        self._root = str(settings.root)
        self._session = session
        policy = settings.options.save
        self._counts_needed = bool(settings.options.counts - {"total_steps"})
        self._new_tokens = 0
        self._requeue_signal = requeue_signal(trainer)
        names = {name for each in preemptions(policy) for name in each.signals}
        self._signals = SignalTakeover(trainer._signal_connector, names, self._requeue_signal)
        self.is_to_requeue = False
        self._manager = self._signals.made_by(lambda: session.at(self._root))
        self._listens = bool(preemptions(self._manager.options.save))
        self._looks = self._cut_short = False
        self._before: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._announcements = Announcements(trainer, settings)
        self._unlogged = {each.metric for each in settings.bests}
        self._ranked: dict[int, tuple[CheckpointInfo, SaveHandle | None]] = {}
        self._begun_at = self._seen_step = -1
        self._stepped = self._left = self._evaluated = False
        self._total_steps: int | None = None
        self._saved_step: int | None = None
        self._deferred: str | None = None

    @property
    def preempted(self) -> bool:
        return self._manager.preempted

    def begin(self) -> None:
        # What a resumed run makes up for may be a validation that is worth a save of the same step.
        self._begun_at = self._trainer.global_step
        self._total_steps = _total_steps(self._trainer)
        self._seen_step = -1 if self._fit.makes_up else self._begun_at
        self._saved_step = origin = self._session.take_up(self._root)
        if origin is None or self._settings.bests:
            committed = self._session.once(self._manager.checkpoints)
            if origin is None and committed:
                if self._trainer.is_global_zero:
                    _warn_of_abandoned(self._root, committed)
                self._manager.start_afresh()
            earlier = [i for i in committed if origin is not None and i.step <= origin]
            self._ranked = {i.step: (i, None) for i in earlier if i.damaged is None}
        self._manager.due(**self._counts())
        if self.preempted:
            self._stop()

    # Between steps, called by `Fit`.

    def after_batch(self) -> None:
        """Leave before a validation that is due if a preemption was announced."""
        self._announcements.make()
        step, fit_loop = self._trainer.global_step, self._trainer.fit_loop
        self._stepped = step != self._seen_step and not fit_loop._should_accumulate()
        if not self._stepped:
            return
        self._seen_step = step
        self._evaluated = False
        self._fit.measured.note(self._trainer._logger_connector._callback_metrics, step)
        if fit_loop.epoch_loop._should_check_val_fx(fit_loop._data_fetcher):
            self._manager.due()
            if self.preempted:
                self._leave_before_validation()

    def before_validation(self) -> None:
        """Prepare for a validation; look where all ranks can leave it at the same batch."""
        self._measure()
        trainer = self._trainer
        whole = not trainer.fit_loop._should_accumulate()
        if whole and trainer.global_step != self._saved_step:
            self._fit.validation_is_due = True
            self._note_step()
            self._fit.validation_is_due = False
        self._looks = self._listens and whole
        if self._looks:
            self._before = rng_state(), dict(trainer._logger_connector._callback_metrics)
            sizes = _sizes(trainer.fit_loop.epoch_loop.val_loop)
            self._looks = self._session.same(sizes) and _UNKNOWN not in sizes

    def after_validation_batch(self) -> None:
        """Leave the validation if a preemption that stops training was announced."""
        trainer = self._trainer
        if not self._looks or trainer.fit_loop.epoch_loop.val_loop.batch_progress.is_last_batch:
            return
        self._manager.due()
        if self.preempted:
            _logger.warning("preempted: the validation after step %d is cut short", trainer.global_step)
            # Lightning's own word for results that do not count: early stopping and the like pass them over.
            trainer.sanity_checking = self._cut_short = True
            trainer.lightning_module._current_fx_name = None  # Lightning leaves that of a hook that raises
            raise StopIteration

    def after_validation(self) -> None:
        """Note what was measured; go back to before a validation that was cut short."""
        if self._cut_short:
            rng, self._trainer._logger_connector._callback_metrics = self._before
            load_rng_state(rng)
            self._leave_before_validation()
        self._looks = False
        self._note_evaluation()

    def _leave_before_validation(self) -> None:
        """Save, and leave the validation of this step to the resume."""
        self._fit.validation_is_due = True
        reason = self._reason(self._trainer.global_step)
        if reason is not None:
            self._save(reason)
        self._leave_if_preempted()

    def after_step(self) -> None:
        """Save if it is time: after an optimizer step, never while accumulating."""
        if self._stepped and self._fit.epoch_is_over:
            self._note_step()  # the hooks of its end may fail
        elif self._stepped:
            self._save_if_due()
            self._leave_if_preempted()

    def before_epoch_end(self) -> None:
        """Finish staged copies, for averaging callbacks; after a preemption end here."""
        self._session.settle()
        if self._left:
            raise StopIteration

    def after_epoch(self) -> None:
        """Save if it is time, at the end of an epoch that has not been left early."""
        self._note_evaluation()
        self._total_steps = _total_steps(self._trainer)
        if self._fit.epoch_is_over and self._stepped:
            self._save_if_due()
            self._session.settle()
            if self.preempted:
                self._stop()

    # At the end, called by `Session`.

    def failed(self, error: BaseException) -> None:
        self._manager.save_last_step(error)

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
            self.is_to_requeue = bool(
                self._session.coordinator.all_reduce_max([int(self._signals.was_noted)])[0]
            )

    # Saves.

    def before_save_by_path(self, root: str) -> None:
        """Decide on this step first, for a save to the same root would count as its save.

        A `ModelCheckpoint` saves in hooks of the batch, and deletes its checkpoints by a rule of its own.
        """
        step = self._trainer.global_step
        if not self._fit.in_hand:
            self._add_up()
        if root == self._root and step > 0:
            self._deferred = self._deferred or self._reason(step)

    def _save_if_due(self) -> None:
        step = self._seen_step
        reason = self._reason(step) or self._deferred
        if reason is not None:
            self._save(reason)
        elif self._evaluated and not self.preempted and self._is_among_best():
            self._save(_BEST)
        self._note_step()

    def _note_step(self) -> None:
        """Note the present step for `on_exception`; once more after its validation."""
        if self._settings.options.on_exception is not None:
            self._add_up()
            step, metrics = self._trainer.global_step, self._measure()
            noted = {"metrics": metrics, "annotations": job_note()}
            self._manager.note_step(step, self._state(), again=True, **noted)

    def _reason(self, step: int) -> str | None:
        reason = self._manager.due(step, total_steps=self._total_steps, **self._counts())
        if step in {self._saved_step, self._begun_at}:
            return None
        if reason is None and self._settings.save_last and self._fit.ends_at(step):
            return _LAST_STEP
        return reason

    def _save(self, reason: str) -> None:
        step = self._trainer.global_step
        self._add_up()
        if reason in {_LAST_STEP, _BEST}:
            self._manager.wait()  # so that it is not skipped
        self._deferred = None
        self._fit.left = self.preempted
        # Saved already, perhaps by the run before, but without the metric that it is to be kept for.
        again = step == self._saved_step
        name = self._session.once(lambda: run_name(step_name(step), token_hex(4))) if again else None
        metrics = self._measure()
        handle = self._session.write(
            self._root, step, self._state(), name=name, metrics=metrics, reason=reason
        )
        if handle is not None:
            self._saved_step = step
            if self._settings.bests:
                info = CheckpointInfo(step=step, name=handle.name, created=handle.created, metrics=metrics)
                self._ranked[step] = info, handle
            self._announcements.saved(handle)

    def _state(self) -> LightningState:
        return LightningState(self._trainer, fit=self._fit, contents=self._settings.contents)

    def _leave_if_preempted(self) -> None:
        """End training here, without what Lightning would do next."""
        if self.preempted:
            self._stop()
            self._left = True
            raise StopIteration

    def _stop(self) -> None:
        self._session.settle()
        if not self._trainer.should_stop:
            _logger.warning("preempted: training stops after step %d", self._trainer.global_step)
        self._fit.stop()

    # Counts and metrics.

    def note_tokens(self, batch: Any) -> None:
        found = self._settings.tokens
        if isinstance(found, int):
            self._new_tokens += found
        elif found is not None:
            tokens = plain_integer(found(batch))
            require("the function given as tokens=", integer("the number of a batch", tokens, minimum=0))
            self._new_tokens += tokens

    def _counts(self) -> Counts:
        """Return the epochs and tokens of all ranks; nothing for a policy that needs none."""
        if not self._counts_needed:
            return {}
        self._add_up()
        progress = self._trainer.fit_loop.epoch_progress.current
        # Of an epoch's last batch it is decided before Lightning counts the epoch.
        epochs = progress.started if self._fit.epoch_is_over else progress.processed
        return {"epochs": epochs, "tokens": self._fit.tokens}

    def _add_up(self) -> None:
        """Add up the tokens of all ranks; those that ranks share count once.

        Collective where a function counts, for then ranks may differ.
        """
        trainer, new = self._trainer, self._new_tokens
        self._new_tokens = 0
        ranks = int(trainer.world_size)
        sampler: dict[str, Any] = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replicas = int(sampler.get("num_replicas", ranks))  # fewer under tensor parallelism
        if ranks > 1 and callable(self._settings.tokens):
            of_ranks = [new if rank == trainer.global_rank else 0 for rank in range(ranks)]
            self._fit.tokens += sum(self._session.coordinator.all_reduce_max(of_ranks)) * replicas // ranks
        else:
            self._fit.tokens += new * replicas

    def _measure(self) -> dict[str, float]:
        """Note what was measured until now; return the metrics of the present step."""
        step = self._trainer.global_step
        self._fit.measured.note(self._trainer.callback_metrics, step)
        return self._fit.measured.at(step)

    def _is_among_best(self) -> bool:
        """Return whether retention would keep the present step for an unsaved metric.

        Collective: only the coordinator's answer counts, for its metrics are stored.
        """
        if not self._settings.bests:
            return False
        step, metrics = self._trainer.global_step, self._measure()

        def wanted() -> bool:
            # What retention has removed since then was not among the best.
            whole = {i.step: i for i, handle in self._ranked.values() if handle is None or not handle.error}
            present, handle = self._ranked.get(step, (None, None))
            known = {} if present is None or handle is None else present.metrics
            others = [info for at, info in whole.items() if at != step]
            candidate = CheckpointInfo(step=step, name="", created=0.0, metrics=metrics)
            return step > 0 and any(
                metrics.get(policy.metric) != known.get(policy.metric)
                and step in policy.keep([*others, candidate], 0.0)
                for policy in self._settings.bests
            )

        return self._session.once(wanted)

    def _note_evaluation(self) -> None:
        """Note what was measured; warn, once, of ranking metrics that are not logged."""
        self._evaluated = True
        self._measure()
        if not self._unlogged:
            return
        with_epoch = {
            name
            for meta in (each.meta for each in self._trainer.fit_loop.epoch_loop._results.values())
            if meta.on_epoch
            for name in (meta.name, meta.forked_name(on_step=False))
        }
        logged = self._trainer.callback_metrics.keys()
        missing = sorted(self._unlogged - with_epoch - logged)
        self._unlogged &= with_epoch
        if missing and self._trainer.is_global_zero:
            hints = [match for name in missing for match in difflib.get_close_matches(name, logged, n=1)]
            _logger.warning(
                "keep= ranks checkpoints by %s, which has not been logged. Logged are: %s.%s Until it is, no "
                "checkpoint is the best, and none is kept for it: correct keep=, or log it with self.log()",
                ", ".join(map(repr, missing)),
                ", ".join(sorted(logged)) or "none",
                f" Did you mean {', '.join(map(repr, hints))}?" if hints else "",
            )


def _sizes(loop: Any) -> tuple[int, int, int]:
    """Return what determines the number of batches of a validation."""
    batches, unsized = loop.max_batches, (_UNKNOWN, _UNKNOWN, _UNKNOWN)
    for loader in loop._combined_loader.flattened:
        if isinstance(getattr(loader, "dataset", None), IterableDataset) or not hasattr(loader, "__len__"):
            return unsized
    return (sum(batches), max(batches), min(batches)) if batches and math.inf not in batches else unsized


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


@final
class SignalTakeover:
    """Keeps the core's signal handlers ahead of Lightning's until the end of a fit.

    Lightning's SIGTERM handler waits for a collective: ranks that are signalled one after another, or in the
    middle of a step, hang in it. Under SLURM its SIGUSR1 handler saves wherever the signal arrives. At its
    end Lightning puts back the handlers that it has found, which are ours: so those before follow.

    Args:
        noted: one of them, to be noted for `was_noted`; None for none.
    """

    def __init__(self, connector: Any, names: Iterable[str], noted: str | None = None) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        self._connector = connector
        self._before = {each: _handler(each) for each in map(signal.Signals.__getitem__, names) if on_main}
        self._ours: dict[signal.Signals, Any] = {}
        self._noted = noted
        self.was_noted = False

    def made_by(self, make: Callable[[], T]) -> T:
        """Call `make`; keep the handlers that it installs ahead of Lightning's."""
        if self._noted is not None:  # the core's handler calls the one before it
            _install({each: self._note for each in self._before if each.name == self._noted})
        made = make()
        self._ours = {number: _handler(number) for number in self._before}
        if self._ours:
            shadow(self._connector, {"register_signal_handlers": self._register, "teardown": self._teardown})
        return made

    def _note(self, *_: Any) -> None:
        self.was_noted = True

    def _register(self) -> None:
        type(self._connector).register_signal_handlers(self._connector)
        _install(self._ours)

    def _teardown(self) -> None:
        for name in ("register_signal_handlers", "teardown"):
            vars(self._connector).pop(name, None)
        self._connector.teardown()
        _install(self._before)


def _handler(number: signal.Signals) -> Any:
    # None is a handler that C code installed, which Python cannot put back.
    return signal.getsignal(number) or signal.SIG_DFL


def _install(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def requeue_signal(trainer: Any) -> str | None:
    """Return the signal at which a Trainer is to requeue its job, or None."""
    environment = trainer._accelerator_connector.cluster_environment
    names = {cls.__name__ for cls in type(environment).__mro__}
    if "SLURMEnvironment" not in names or not environment.auto_requeue:
        return None
    return None if environment.requeue_signal is None else signal.Signals(environment.requeue_signal).name


def job_note() -> Mapping[str, Any]:
    """Return what identifies the SLURM job that saves, if there is one."""
    job = _job()
    return {} if job is None else {JOB: job}


def continues(saved: Mapping[str, Any]) -> bool:
    """Return whether SLURM has started again the very job that made these annotations."""
    restarts = os.environ.get("SLURM_RESTART_COUNT", "0")
    return restarts.isdigit() and int(restarts) > 0 and _job() is not None and saved.get(JOB) == _job()


def requeue() -> None:
    """Requeue this process's job; on one rank. A failure is logged."""
    job = _job()
    command = ["scontrol", "requeue", str(job)]
    try:
        subprocess.run(command, check=True, timeout=_SECONDS, capture_output=True)  # noqa: S603 - no shell
    except (OSError, subprocess.SubprocessError) as error:
        _logger.error(  # noqa: TRY400 - the message is all there is to say
            "the job was not requeued: %r. Its last checkpoint is committed; requeue it with `%s`",
            error, " ".join(command),
        )  # fmt: skip
    else:
        _logger.warning("SLURM job %s is requeued; it continues from its last checkpoint", job)


def _job() -> str | None:
    array, task = (os.environ.get(name) for name in ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))
    return f"{array}_{task}" if array and task else os.environ.get("SLURM_JOB_ID")
