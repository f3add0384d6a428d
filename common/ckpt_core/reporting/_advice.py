"""Advice in sentences, each with the numbers that it rests on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ckpt_core.options import bytes_text
from ckpt_core.reporting._figures import seconds_text, share_text
from ckpt_core.reporting._report_values import Optimum, Report

_WORTH: Final = 0.001
"""A gain below a thousandth of the time is not worth a change."""
_UNEVEN: Final = 3.0
_MOST_STALL: Final = 0.01


def advice(report: Report) -> list[str]:
    """Return what would save time or space, and what is well as it is."""
    found = [*_on_interval(report.optimum), *_on_stalls(report), *_on_failures(report), *_on_space(report)]
    return found or ["Too little was measured for advice: let the job save a few times with its journal on."]


def _every(seconds: float, steps: float | None) -> str:
    return (
        seconds_text(seconds)
        if steps is None
        else f"{max(1, round(steps)):,} steps ({seconds_text(seconds)})"
    )


def _on_interval(found: Optimum | None) -> Iterator[str]:
    if found is None:
        return
    now, best = _every(found.interval, found.interval_steps), _every(found.best_interval, found.best_steps)
    basis = f"a save takes {seconds_text(found.cost)} of training, one failure in {seconds_text(found.mtbf)}"
    gain = found.overhead - found.best_overhead
    if gain < _WORTH:
        yield (
            f"Saves every {now} lose {share_text(found.overhead)} of the time, expected; the optimum, every "
            f"{best}, {share_text(found.best_overhead)}: {basis}. There is nothing to gain."
        )
        return
    yield (
        f"Saves every {now} lose {share_text(found.overhead)} of the time, expected; the optimum is every "
        f"{best}, with {share_text(found.best_overhead)}: {basis}. Use save=Optimal(), which finds it on the "
        f"running job: it gains {share_text(gain)}."
    )


def _on_stalls(report: Report) -> Iterator[str]:
    stall, durable = report.spreads.get("stall_seconds"), report.spreads.get("durable_seconds")
    if stall is not None and stall.p95 > _UNEVEN * stall.median and stall.p95 > 1:
        yield (
            f"Stalls are uneven: {seconds_text(stall.median)} in the median, {seconds_text(stall.p95)} in "
            "one of twenty. A save waits where an earlier one is still in flight: save less often, or use "
            "faster storage."
        )
    covered = report.balance.covered
    if stall is not None and covered and report.balance.stall / covered > _MOST_STALL:
        yield (
            f"Saves that block take {share_text(report.balance.stall / covered)} of training: "
            'staging="overlapped" copies the state while training continues.'
        )
    if durable is not None and report.optimum is not None and durable.median > report.optimum.interval:
        yield (
            f"A save is durable after {seconds_text(durable.median)}, longer than the "
            f"{seconds_text(report.optimum.interval)} between saves: storage limits how often to save."
        )


def _on_failures(report: Report) -> Iterator[str]:
    dead = [run for run in report.runs if run.end == "unclean"]
    if dead:
        yield (
            f"{len(dead):,} of {len(report.runs):,} runs ended unclean and lost at least "
            f"{seconds_text(sum(run.lost_seconds for run in dead))} of training "
            f"({sum(run.lost_steps for run in dead):,} steps)."
        )
    failed = [each for each in report.events["save"] if each.get("outcome") == "failed"]
    if failed:
        yield (
            f"{len(failed):,} of {len(report.events['save']):,} saves failed; the last one at step "
            f"{failed[-1].get('step')}: {failed[-1].get('error') or 'no reason is known'}."
        )


def _on_space(report: Report) -> Iterator[str]:
    idle = [each for each in report.checkpoints if each.abandoned or not each.usable]
    idle = [each for each in idle if each.pinned is None]
    if idle:
        size = bytes_text(sum(each.size_bytes for each in idle))
        yield (
            f"{len(idle):,} checkpoints that no resume takes hold {size}: "
            "`ckpt prune` deletes them with --abandoned, --bad or --damaged."
        )
