"""What a fit counts and measures: epochs, tokens, metrics, and the best of them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from ckpt_core.cadence import Counts
from ckpt_core.disclosure import logger_of
from ckpt_core.retention import KeepBest
from ckpt_core.saving import SaveHandle
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import function, imported, integer, plain_integer, require

if TYPE_CHECKING:
    from lightning_ckpt.loops._running import Running

_logger = logger_of(__name__)

TokensInBatch: TypeAlias = Callable[[Any], int]
"""Returns the number of tokens in a batch of this rank."""


def tokens_in_batch(given: int | TokensInBatch | str | None) -> int | TokensInBatch | None:
    """Return the option `tokens=`, validated."""
    if given is None or (isinstance(given, int) and integer("tokens", given, minimum=1) is None):
        return given
    number = isinstance(given, int | float)
    require("tokens", integer("tokens", given, minimum=1) if number else function("tokens", given))
    return imported("tokens", given)  # type: ignore[arg-type]


@final
class TrainingCounts:
    """Counts epochs and tokens of a fit, for policies that save by them.

    Concurrency: the thread that trains; where a function counts, `now` and `add_up` are collective, for ranks
    may differ.

    Args:
        running: what a save adds, the tokens of all ranks among it.
        in_batch: tokens in a batch of one rank; None for none.
        all_reduce_max: combines numbers of every rank.
        needed: whether the save policy counts anything.
    """

    def __init__(
        self,
        running: Running,
        in_batch: int | TokensInBatch | None,
        all_reduce_max: Callable[[Sequence[int]], Sequence[int]],
        *,
        needed: bool,
    ) -> None:
        self._running = running
        self._trainer = running.loops.trainer
        self._in_batch = in_batch
        self._all_reduce_max = all_reduce_max
        self._needed = needed
        self._pending = 0

    def note(self, batch: Any) -> None:
        found = self._in_batch
        if found is not None:
            self._pending += found if isinstance(found, int) else _checked(found(batch))

    def now(self) -> Counts:
        """Return the counts of all ranks; nothing for a policy that needs none."""
        if not self._needed:
            return {}
        self.add_up()
        progress = self._trainer.fit_loop.epoch_progress.current
        # Of an epoch's last batch it is decided before Lightning counts the epoch.
        epochs = progress.started if self._running.loops.epoch_is_over else progress.processed
        return {"epochs": epochs, "tokens": self._running.tokens}

    def add_up(self) -> None:
        """Add up the tokens of all ranks, for a decision or a save."""
        self._running.tokens += self._of_all_ranks()

    def _of_all_ranks(self) -> int:
        """Return the tokens since the last call; those that ranks share count once."""
        pending, self._pending = self._pending, 0
        ranks = int(self._trainer.world_size)
        sampler: dict[str, Any] = getattr(self._trainer.strategy, "distributed_sampler_kwargs", None) or {}
        replicas = int(sampler.get("num_replicas", ranks))  # fewer under tensor parallelism
        if ranks == 1 or self._in_batch is None or isinstance(self._in_batch, int):
            return pending * replicas
        own = [0] * ranks
        own[self._trainer.global_rank] = pending
        return sum(self._all_reduce_max(own)) * replicas // ranks


def _checked(tokens: Any) -> int:
    """Return what a function counted, as an int."""
    plain = plain_integer(tokens)
    require("the function given as tokens=", integer("the number of a batch", plain, minimum=0))
    return int(plain)


@final
class Evaluations:
    """The measurements of a fit, ranked among its checkpoints, also those in flight.

    Concurrency: the thread that trains; `among_best` is collective: only the coordinator's answer counts, for
    its metrics are stored.
    """

    def __init__(
        self,
        trainer: Any,
        policies: Sequence[KeepBest],
        measured: Measured,
        once: Callable[[Callable[[], bool]], bool],
    ) -> None:
        self._trainer = trainer
        self._policies = policies
        self._once = once
        self._measured = measured
        self._ranked: dict[int, tuple[CheckpointInfo, SaveHandle | None]] = {}
        self._saved: CheckpointInfo | None = None
        self._unlogged = policies

    def begin(self, history: Sequence[CheckpointInfo]) -> None:
        self._ranked = {info.step: (info, None) for info in history if info.damaged is None}

    def note_step(self, step: int) -> None:
        """Note what `step` has logged; cheap enough for each."""
        self._measured.note(self._trainer._logger_connector._callback_metrics, step)

    def note(self) -> dict[str, float]:
        """Note what was measured until now; return the metrics of the present step."""
        step = self._trainer.global_step
        self._measured.note(self._trainer.callback_metrics, step)
        return self._measured.at(step)

    def among_best(self) -> bool:
        """Return whether retention would keep the present step for an unsaved metric."""
        if not self._policies:
            return False
        step, metrics = self._trainer.global_step, self.note()

        def wanted() -> bool:
            known = self._saved.metrics if self._saved is not None and self._saved.step == step else {}
            others = [info for at, info in self._whole().items() if at != step]
            candidate = CheckpointInfo(step=step, name="", created=0.0, metrics=metrics)
            return step > 0 and any(
                metrics.get(policy.metric) != known.get(policy.metric)
                and step in policy.keep([*others, candidate], 0.0)
                for policy in self._policies
            )

        return self._once(wanted)

    def saved(self, handle: SaveHandle, metrics: Mapping[str, float]) -> None:
        self._saved = CheckpointInfo(
            step=handle.step, name=handle.name, created=handle.created, metrics=metrics
        )
        self._ranked[handle.step] = self._saved, handle
        whole = self._whole()
        if all(each is None or each.done() for _, each in self._ranked.values()):
            best = frozenset[int]().union(*(each.keep([*whole.values()], 0.0) for each in self._policies))
            whole = {step: info for step, info in whole.items() if step in best}
        self._ranked = {step: self._ranked[step] for step in whole}

    def _whole(self) -> dict[int, CheckpointInfo]:
        """Return those whose save has not failed."""
        found = self._ranked.items()
        return {step: info for step, (info, handle) in found if handle is None or handle.error is None}

    def complain(self) -> None:
        """Warn, once, of ranking metrics that are not logged."""
        if not self._unlogged:
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
