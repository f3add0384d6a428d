"""The picture of a plan: what a checkpoint is made of, and what intervals cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ckpt_core.errors import ConfigError
from ckpt_core.planning._cost_plan import CostPlan

_POINTS: Final = 120
_REACH: Final = 30.0
_GB: Final = 1e9


def draw_plan(plan: CostPlan, path: Path) -> None:
    """Draw a plan into a file; its suffix says the format.

    Raises:
        ConfigError: matplotlib is not installed, or cannot write this file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--picture needs matplotlib: `pip install matplotlib`") from error
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    parts, curve = figure.subplots(1, 2, width_ratios=(1, 2))
    _draw_components(plan, parts)
    _draw_overhead(plan, curve)
    figure.suptitle(f"{plan.terms.model.name}: {plan.size_bytes / _GB:,.1f} GB, {plan.terms.layout.words}")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--picture {path}: cannot be written: {error}") from error


def _draw_components(plan: CostPlan, axes: Any) -> None:
    base = 0.0
    for component in plan.components:
        size = component.size_bytes / _GB
        axes.bar(0, size, bottom=base, width=0.6, label=f"{component.name}: {size:,.1f} GB")
        base += size
    axes.set_xlim(-0.6, 0.6)
    axes.set_xticks([])
    axes.set_ylabel("GB per checkpoint")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize="small", frameon=False)


def _draw_overhead(plan: CostPlan, axes: Any) -> None:
    least, most = (
        max(plan.times.durable, plan.recommended / _REACH),
        max(plan.recommended * _REACH, plan.month.interval * 1.2),
    )
    ratio = (most / least) ** (1 / (_POINTS - 1))
    intervals = [least * ratio**number for number in range(_POINTS)]
    losses = [100 * plan.overhead_at(each) for each in intervals]
    axes.plot([each / 60 for each in intervals], losses, color="tab:blue")
    points = [(plan.recommended, "recommended", "tab:green")]
    points += [(plan.month.interval, "planned", "tab:orange")] if plan.terms.save is not None else []
    for interval, name, colour in points:
        loss = 100 * plan.overhead_at(interval)
        label = f"{name}: every {interval / 60:,.1f} min, {loss:.2f} % lost"
        axes.plot([interval / 60], [loss], "o", color=colour, label=label)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda minutes, _: f"{minutes:g}")
    highest = max(6 * plan.overhead_at(plan.recommended), 1.5 * plan.month.overhead)
    axes.set_ylim(0, 100 * min(1.0, highest))
    axes.set_xlabel("minutes between saves")
    axes.set_ylabel("% of the time lost, with failures")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(loc="upper center")
