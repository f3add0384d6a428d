"""Metrics that retention ranks by, and evaluations worth a checkpoint."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import torch

from ckpt_core.disclosure import logger_of
from ckpt_core.retention import KeepBest
from ckpt_core.saving import SaveHandle
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)


@final
class Ranking:
    """The ranked checkpoints of a run's present line, with those on their way.

    Concurrency: the thread that trains. Only the coordinator's answer counts: its metrics are stored.
    """

    def __init__(self, policies: Sequence[KeepBest], history: Sequence[CheckpointInfo]) -> None:
        self._policies = policies
        self._ranked: dict[int, tuple[CheckpointInfo, SaveHandle | None]] = {
            info.step: (info, None) for info in history if info.damaged is None
        }
        self._saved: CheckpointInfo | None = None

    def wants(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a policy would keep `step` for a metric not saved with it."""
        self._forget_failed()
        known = self._saved.metrics if self._saved is not None and self._saved.step == step else {}
        others = [info for info, _ in self._ranked.values() if info.step != step]
        candidate = CheckpointInfo(step=step, name="", created=0.0, metrics=metrics)
        return any(
            metrics.get(policy.metric) != known.get(policy.metric)
            and step in policy.keep([*others, candidate], 0.0)
            for policy in self._policies
        )

    def saved(self, handle: SaveHandle, metrics: Mapping[str, float]) -> None:
        """Count a checkpoint in flight, unless its save fails."""
        self._saved = CheckpointInfo(
            step=handle.step, name=handle.name, created=handle.created, metrics=metrics
        )
        self._ranked[handle.step] = self._saved, handle
        self._forget_failed()
        if all(handle is None or handle.done() for _, handle in self._ranked.values()):
            infos = [info for info, _ in self._ranked.values()]
            best = frozenset[int]().union(*(policy.keep(infos, 0.0) for policy in self._policies))
            self._ranked = {step: each for step, each in self._ranked.items() if step in best}

    def _forget_failed(self) -> None:
        self._ranked = {step: each for step, each in self._ranked.items() if not _failed(each[1])}


def _failed(handle: SaveHandle | None) -> bool:
    return handle is not None and handle.error is not None


@final
class Evaluations:
    """The measurements of a fit, as far as its checkpoints are concerned.

    Concurrency: the thread that trains; `among_best` is collective.

    Attributes:
        cut_short: whether the last validation was left early, so that its results do not count.
    """

    def __init__(
        self,
        trainer: Any,
        policies: Sequence[KeepBest],
        measured: Measured,
        once: Callable[[Callable[[], bool]], bool],
    ) -> None:
        self.cut_short = False
        self._trainer = trainer
        self._policies = policies
        self._once = once
        self._measured = measured
        self._ranking = Ranking(policies, ())
        self._unlogged = policies

    def begin(self, history: Sequence[CheckpointInfo]) -> None:
        """Rank what is measured from now on against these checkpoints."""
        self._ranking = Ranking(self._policies, history)

    def note_step(self, step: int) -> None:
        """Note what `step` has logged; cheap enough for each."""
        self._measured.note(self._trainer._logger_connector._callback_metrics, step)

    def note(self) -> dict[str, float]:
        """Note what was measured until now; return the metrics of the present step."""
        step = self._trainer.global_step
        if not self.cut_short:
            self._measured.note(self._trainer.callback_metrics, step)
        return self._measured.at(step)

    def among_best(self) -> bool:
        """Return whether retention would keep the present step for an unsaved metric."""
        if not self._policies or self.cut_short:
            return False
        step, metrics = self._trainer.global_step, self.note()
        return self._once(lambda: step > 0 and self._ranking.wants(step, metrics))

    def saved(self, handle: SaveHandle, metrics: Mapping[str, float]) -> None:
        """Note a save in flight with these metrics."""
        self._ranking.saved(handle, metrics)

    def complain(self) -> None:
        """Warn, once, of ranking metrics that are not logged."""
        if self.cut_short or not self._unlogged:
            return
        judged = [policy for policy in self._unlogged if not self._comes_with_epoch(policy.metric)]
        self._unlogged = [policy for policy in self._unlogged if policy not in judged]
        logged = self._trainer.callback_metrics.keys()
        missing = sorted({policy.metric for policy in judged if policy.metric not in logged})
        if missing and self._trainer.is_global_zero:
            _logger.warning("%s", _complaint(missing, logged))

    def _comes_with_epoch(self, metric: str) -> bool:
        """Return whether training steps log the metric for the whole epoch."""
        results = self._trainer.fit_loop.epoch_loop._results.values()
        return any(
            each.meta.on_epoch and metric in {each.meta.name, each.meta.forked_name(on_step=False)}
            for each in results
        )


@final
class Measured:
    """Tracks the step at which each of Lightning's callback metrics was measured.

    Lightning keeps the last value of every metric for the whole fit. A checkpoint that took them as they
    are would claim the validation loss of other weights, and be ranked by it.

    Concurrency: the thread that trains.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._steps: dict[str, int] = {}

    def note(self, metrics: Mapping[str, Any], step: int) -> None:
        """Note what was measured since the last note, at `step`."""
        for name, value in metrics.items():
            if not _same(self._values.get(name), value):
                self._values[name] = value
                self._steps[name] = step

    def resume(self, steps: Mapping[str, int], metrics: Mapping[str, Any]) -> None:
        """Take over what was measured before a save, with the metrics loaded from it."""
        self._values = {name: metrics[name] for name in steps if name in metrics}
        self._steps = {name: steps[name] for name in self._values}

    @property
    def steps(self) -> Mapping[str, int]:
        """The step at which each metric was measured last."""
        return self._steps

    def at(self, step: int) -> dict[str, float]:
        """Return the scalar metrics that were measured at `step`."""
        names = sorted(name for name, measured in self._steps.items() if measured == step)
        values = ((name, self._values[name]) for name in names)
        return {name: float(value) for name, value in values if torch.as_tensor(value).numel() == 1}


def _complaint(missing: Sequence[str], logged: Collection[str]) -> str:
    hints = [match for name in missing for match in difflib.get_close_matches(name, logged, n=1)]
    meant = f" Did you mean {', '.join(map(repr, hints))}?" if hints else ""
    return (
        f"keep= ranks checkpoints by {', '.join(map(repr, missing))}, which has not been logged. "
        f"Logged are: {', '.join(sorted(logged)) or 'none'}.{meant} Until it is, no checkpoint is the best, "
        "and none is kept for it: correct keep=, or log it with self.log()"
    )


def _same(known: Any, value: Any) -> bool:
    """Return whether both are the result of one measurement.

    Equal values may come from two.

    Every access to Lightning's metrics gives a new view of the result. The memory of a known one is not freed
    meanwhile, so that no other result can have its address.
    """
    if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
        return known.data_ptr() == value.data_ptr()
    return known is value
