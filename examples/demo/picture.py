"""Draw the loss curves with kill and resume, and the timeline of the saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from examples.demo.evidence import Evidence, PhaseEvidence
from examples.demo.plan import Plan

INK, GREY, LIGHT = "#22313f", "#8a97a3", "#dfe5ea"
BLUE, ORANGE, RED, GREEN, VIOLET = "#2f6fb0", "#e08a1e", "#c8321f", "#2f9560", "#8156a8"
PALE = "#f6d5d0"
LANES = {
    "save.stall": ("training stands", RED),
    "save.write": ("write", BLUE),
    "save.commit": ("commit", GREEN),
}
LOADS = {"load.verify": ("verify", "#b9a3d6"), "load.read": ("load", VIOLET)}
STYLE: dict[Any, Any] = {"font.size": 9, "axes.edgecolor": GREY, "text.color": INK, "axes.labelcolor": INK}
GAP_SHARE = 0.06


def draw(evidences: Sequence[Evidence], plan: Plan, path: Path, *, equal: bool) -> None:
    """Write the picture of all frameworks to `path`."""
    mpl.use("Agg")
    with mpl.rc_context(STYLE):
        height = 3.3 * len(evidences) + 0.7
        figure = Figure(figsize=(14, height), dpi=150, layout="constrained")
        axes = figure.subplots(len(evidences), 2, squeeze=False, width_ratios=(1, 1.45))
        for row, evidence in zip(axes, evidences, strict=True):
            _draw_losses(row[0], evidence, plan)
            _draw_time_line(row[1], evidence)
        title = f"Killed in the middle of a save, resumed: {'equal bit by bit' if equal else 'NOT EQUAL'}"
        figure.suptitle(title, fontsize=13, weight="bold", x=0.01, ha="left", color=INK if equal else RED)
        _draw_legend(figure)
        figure.savefig(path, facecolor="white")


def _tidy(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, weight="bold")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, length=3)


def _draw_losses(axes: Axes, evidence: Evidence, plan: Plan) -> None:
    _tidy(axes, f"{evidence.framework}: loss of every step, mean over ranks")
    curve = evidence.uninterrupted.mean_losses()
    axes.plot(
        *zip(*curve, strict=True), color=LIGHT, linewidth=7, solid_capstyle="round", label="uninterrupted"
    )
    killed, resumed = evidence.killed.mean_losses(), evidence.resumed.mean_losses()
    axes.plot(*zip(*killed, strict=True), color=ORANGE, linewidth=1.6, label="killed")
    axes.plot(*zip(*resumed, strict=True), color=BLUE, linewidth=1.6, linestyle=(0, (4, 2)), label="resumed")
    resharded = [curve[-1], *evidence.resharded.mean_losses()]
    axes.plot(*zip(*resharded, strict=True), color=VIOLET, linewidth=1.3, linestyle=":", label="on 1 rank")
    _mark(axes, killed[-1], "SIGKILL", marker="X", color=RED, offset=(8, 16))
    at_resume = dict(curve)[plan.resume_step]
    _mark(
        axes,
        (plan.resume_step, at_resume),
        f"resumed from {plan.resume_step}",
        marker="o",
        color=BLUE,
        offset=(-6, 26),
    )
    for boundary in range(plan.steps_per_epoch, plan.steps, plan.steps_per_epoch):
        axes.axvline(boundary + 0.5, color=LIGHT, linewidth=1, zorder=0)
        axes.annotate(
            "next epoch", (boundary + 0.7, 0.02), xycoords=("data", "axes fraction"), color=GREY, fontsize=7.5
        )
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="upper right", fontsize=8.5)


def _mark(
    axes: Axes, point: tuple[float, float], text: str, *, marker: str, color: str, offset: tuple[int, int]
) -> None:
    axes.plot(*point, marker=marker, color=color, markersize=8, markeredgecolor="white", zorder=5)
    axes.annotate(
        text, point, xytext=offset, textcoords="offset points", color=color, weight="bold", fontsize=8.5,
        arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.8},
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stretch:
    """A phase, `begin` to `end` in its own time, at `at` on the common time axis."""

    phase: PhaseEvidence
    begin: float
    end: float
    at: float

    def x(self, time: float) -> float:
        return self.at + time - self.begin

    @property
    def right(self) -> float:
        return self.x(self.end)


def _stretches(evidence: Evidence) -> tuple[_Stretch, _Stretch]:
    first = [loss.time for losses in evidence.killed.losses.values() for loss in losses]
    killed = _Stretch(phase=evidence.killed, begin=min(first), end=evidence.kill.time, at=0.0)
    times = [span.start for span in evidence.resumed.spans]
    times += [span.end for span in evidence.resumed.spans if span.end is not None]
    times += [loss.time for losses in evidence.resumed.losses.values() for loss in losses]
    begin, end = min(times), max(times)
    gap = GAP_SHARE * (killed.right + end - begin)
    return killed, _Stretch(phase=evidence.resumed, begin=begin, end=end, at=killed.right + gap)


def _draw_time_line(axes: Axes, evidence: Evidence) -> None:
    _tidy(axes, f"{evidence.framework}: what each rank does, second by second")
    killed, resumed = _stretches(evidence)
    ranks = sorted(evidence.uninterrupted.losses)
    for stretch in (killed, resumed):
        for rank in ranks:
            _draw_rank(axes, stretch, rank)
    _draw_kill(axes, killed, resumed)
    axes.set_yticks(
        [_lane(rank, lane) for rank in ranks for lane in range(len(LANES) + 1)],
        [name for _ in ranks for name in ("steps", "stall", "write", "commit")],
        fontsize=7.5,
    )
    for rank in ranks:
        axes.text(
            -0.105, _lane(rank, 1.5), f"rank {rank}", transform=axes.get_yaxis_transform(), rotation=90,
            va="center", ha="center", weight="bold",
        )  # fmt: skip
    axes.set_ylim(_lane(ranks[-1], len(LANES)) + 1.2, -1.4)
    axes.set_xlim(-0.01 * resumed.right, 1.01 * resumed.right)
    axes.set_xlabel("seconds of training (start-up of the processes left out)")
    axes.tick_params(axis="y", length=0)


def _lane(rank: int, lane: float) -> float:
    return rank * (len(LANES) + 1.8) + lane


def _draw_rank(axes: Axes, stretch: _Stretch, rank: int) -> None:
    steps = [stretch.x(loss.time) for loss in stretch.phase.losses[rank]]
    axes.plot(steps, [_lane(rank, 0)] * len(steps), "|", color=INK, markersize=6, markeredgewidth=1)
    for span in stretch.phase.spans:
        if span.rank != rank or span.name not in LANES | LOADS:
            continue
        _, color = (LANES | LOADS)[span.name]
        lane = 1 if span.name in LOADS else 1 + list(LANES).index(span.name)
        end = stretch.end if span.end is None else span.end
        # Thin bars vanish in print, so that each is drawn at least a hair wide.
        width = max(end - span.start, 0.03)
        bar = axes.barh(_lane(rank, lane), width, left=stretch.x(span.start), height=0.7, color=color)
        if span.end is None:
            bar.patches[0].set(hatch="////", facecolor=PALE, edgecolor=RED)


def _draw_kill(axes: Axes, killed: _Stretch, resumed: _Stretch) -> None:
    axes.axvspan(killed.right, resumed.at, color="#f3f5f7", zorder=0)
    axes.axvline(killed.right, color=RED, linewidth=1.6)
    axes.text(killed.right, -0.95, "SIGKILL ", color=RED, weight="bold", ha="right", fontsize=8.5)
    axes.axvline(resumed.at, color=BLUE, linewidth=1.6)
    axes.text(resumed.at, -0.95, " resume", color=BLUE, weight="bold", ha="left", fontsize=8.5)
    torn = [span for span in killed.phase.spans if span.name == "save.write" and span.end is None]
    for span in torn:
        text = f"save of step {span.step} in flight "
        axes.text(killed.right, _lane(span.rank, 3.8), text, ha="right", va="center", color=RED, fontsize=8)


def _draw_legend(figure: Figure) -> None:
    patches = [Patch(color=color, label=label) for label, color in (LANES | LOADS).values()]
    patches.append(Patch(facecolor=PALE, edgecolor=RED, hatch="////", label="torn"))
    figure.legend(handles=patches, frameon=False, ncols=len(patches), loc="upper right", fontsize=9)
