"""Retention as the Trainer means it, and evaluations worth a save; pure values."""
# ruff: noqa: ARG002 - the base class documents `keep`, and this one needs no `now`

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from transformers import TrainingArguments

from ckpt_core import KeepBest
from ckpt_core.policies import leaves
from ckpt_core.retention import RetentionPolicy
from ckpt_core.types import CheckpointInfo


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
        newest = sorted((info.step for info in history), reverse=True)
        kept = {*newest[:1], *self._best(history)}
        for step in newest:
            if len(kept) >= self.limit:
                break
            kept.add(step)
        return frozenset(kept)

    def _best(self, history: Sequence[CheckpointInfo]) -> list[int]:
        if self.metric is None:
            return []
        sign = 1 if self.mode == "min" else -1
        scores = [(sign * info.metrics.get(self.metric, math.nan), info.step) for info in history]
        return [step for _, step in sorted(score for score in scores if not math.isnan(score[0]))[:1]]


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


def wanted_best(keep: RetentionPolicy | None, args: TrainingArguments) -> list[KeepBest]:
    """Return policies for metrics whose best is kept, or loaded at the end."""
    metric, mode = best_of(args)
    loaded = [KeepBest(metric, mode=mode)] if metric is not None and args.load_best_model_at_end else []
    return [*_members(keep), *loaded]


def _members(keep: RetentionPolicy | None) -> Iterator[KeepBest]:
    for policy in leaves(keep):
        match policy:
            case KeepBest():
                yield policy
            case KeepAsTrainer(metric=str(metric), mode=mode):
                yield KeepBest(metric, mode=mode)
            case _:
                pass


def is_new_best(wanted: Sequence[KeepBest], history: Sequence[Mapping[str, Any]], step: int) -> bool:
    """Return whether a policy would keep what was measured at this step."""
    return any(_is_among_best(policy, history, step) for policy in wanted)


def _is_among_best(policy: KeepBest, history: Sequence[Mapping[str, Any]], step: int) -> bool:
    sign = 1 if policy.mode == "min" else -1
    # A run that was resumed may have evaluated a step twice: the later value counts.
    scores = {
        entry["step"]: sign * value
        for entry in history
        if isinstance(value := entry.get(policy.metric), int | float)
    }
    now = scores.pop(step, math.nan)
    better = [score for score in scores.values() if math.isfinite(score) and score <= now]
    return not math.isnan(now) and len(better) < policy.n


def metrics_at(history: Sequence[Mapping[str, Any]], step: int) -> dict[str, float]:
    """Return the numbers that were logged for this step, and for no other."""
    return {
        name: float(value)
        for entry in history
        if entry.get("step") == step
        for name, value in entry.items()
        if name != "step" and type(value) in {int, float}
    }
