"""The pictures. matplotlib is imported when one is asked for, and only then."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.contenders import Kind
from benchmarks.report import Bars, Lines
from benchmarks.timing import short

_COLOURS: dict[Kind, str] = {"ours": "#1f77b4", "stock": "#9aa0a6", "other": "#c9b38c", "limit": "#2f2f2f"}
_MEANING: dict[Kind, str] = {
    "ours": "ckpt-suite",
    "stock": "comes with torch",
    "other": "other packages",
    "limit": "limit of this machine",
}


class PictureError(Exception):
    """A picture was asked for and cannot be drawn."""


def require_matplotlib() -> None:
    """Fail before anything is measured rather than after.

    Raises:
        PictureError: it is not installed.
    """
    if find_spec("matplotlib") is None:
        raise PictureError("--picture needs matplotlib: pip install --group bench")


def draw(path: Path, title: str, panels: Sequence[Bars | Lines], caption: Sequence[str]) -> None:
    """Draw panels side by side and write the file; its ending says in which format."""
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = max([len(panel.bars) for panel in panels if isinstance(panel, Bars)], default=8)
    text = [line for each in caption for line in textwrap.wrap(each, 40 + 62 * len(panels))]
    height = 0.42 * rows + 1.9 + 0.17 * len(text)
    figure = Figure(figsize=(3.2 + 4.6 * len(panels), height), layout="constrained")
    all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for index, (axes, panel) in enumerate(zip(all_axes, panels, strict=True)):
        if isinstance(panel, Bars):
            _draw_bars(axes, panel, labels=index == 0)
        else:
            _draw_lines(axes, panel)
    # The legend is put over lines that are left free for it below the caption.
    text += [""] * (2 if _legend(figure, panels) else 0)
    figure.suptitle(textwrap.fill(title, 60 * len(panels)), fontsize=11, x=0.01, ha="left", weight="bold")
    figure.supxlabel("\n".join(text), fontsize=7.5, x=0.01, ha="left", color="#444444")
    figure.savefig(path, dpi=150)


def _draw_bars(axes: Any, panel: Bars, *, labels: bool) -> None:
    known = [bar.spread for bar in panel.bars if bar.spread is not None]
    highest = max([spread.high for spread in known], default=1.0)
    lowest = min([spread.low for spread in known if spread.low > 0], default=highest / 10)
    if panel.log:
        axes.set_xscale("log")
        axes.set_xlim(lowest / 2, highest * 6)
    else:
        axes.set_xlim(min(0, *(spread.low for spread in known)) if known else 0, highest * 1.3)
    for row, bar in enumerate(panel.bars):
        if bar.spread is None:
            # In axes' units across: a log scale has no 0 to put it at.
            axes.text(
                0.01,
                row,
                bar.note,
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize=7,
                color="#777777",
            )
            continue
        median, low, high = bar.spread.median, bar.spread.low, bar.spread.high
        axes.barh(row, median, height=0.62, color=_COLOURS[bar.kind])
        axes.errorbar(
            median, row, xerr=[[median - low], [high - median]], color="#d62728", capsize=2.5, linewidth=1
        )
        axes.annotate(
            short(median), (high, row), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_yticks(range(len(panel.bars)), [bar.label for bar in panel.bars] if labels else [])
    axes.set_ylim(len(panel.bars) - 0.4, -0.6)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.axis + (", log scale" if panel.log else ""))
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_lines(axes: Any, panel: Lines) -> None:
    few = len(panel.x) < 20
    for index, (name, values) in enumerate(panel.curves.items()):
        # Curves may lie upon each other: those below show between the dashes of those above.
        style = {"marker": ".", "linestyle": ("-", "--", "-.", ":")[index % 4]} if few else {}
        axes.plot(panel.x, values, label=name, linewidth=1.2, **style)
    if panel.log:
        axes.set_yscale("log")
        axes.set_xscale("log")
        axes.set_xticks(list(panel.x), [f"{value:,g}" for value in panel.x])
        axes.xaxis.minorticks_off()
        axes.set_ylim(*_decades(panel))
    else:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize=10)
    axes.set_xlabel(panel.x_axis)
    axes.set_ylabel(panel.y_axis + (", log scale" if panel.log else ""))
    axes.legend(fontsize=7, frameon=False)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def _decades(panel: Lines) -> tuple[float, float]:
    """Whole powers of ten around all values."""
    known = [value for values in panel.curves.values() for value in values if value > 0]
    exponents = [math.log10(value) for value in known] or [0.0, 1.0]
    return 10 ** math.floor(min(exponents)), 10 ** math.ceil(max(exponents) + 0.01)


def _legend(figure: Any, panels: Sequence[Bars | Lines]) -> bool:
    from matplotlib.patches import Patch

    bars = [bar for panel in panels if isinstance(panel, Bars) for bar in panel.bars]
    kinds: dict[Kind, None] = {bar.kind: None for bar in bars}
    if len(kinds) < 2:
        return False
    handles = [Patch(color=_COLOURS[kind], label=_MEANING[kind]) for kind in kinds]
    figure.legend(handles=handles, loc="lower left", ncols=len(kinds), fontsize=8, frameon=False)
    return True
