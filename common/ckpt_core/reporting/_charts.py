"""The charts of a report as inline SVG, of bounded size however old the root is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from statistics import median
from typing import Any, Final

from ckpt_core.options import bytes_text
from ckpt_core.reporting._figures import at_least, moment, seconds_text, share_text
from ckpt_core.reporting._report_values import A_DAY, Report, clock_of
from ckpt_core.reporting._sections import parts_of

_WIDTH: Final = 960
_LEFT: Final = 76
_RIGHT: Final = 12
_BINS: Final = 290
"""Marks of a chart at most: three pixels each."""
_BARS: Final = 32
_LANES: Final = ("runs", "saves", "loads", "failures", "lost work")
_LANE: Final = 26


def chart(key: str, report: Report) -> str:
    """Return the charts of a section; "" if it has none."""
    match key:
        case "goodput":
            return _balance_bar(report)
        case "runs":
            return _time_line(report)
        case "costs":
            return _over_time(report) + _distributions(report)
        case _:
            return ""


def _svg(height: float, label: str, content: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">{content}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _rect(at: tuple[float, float], size: tuple[float, float], kind: str, title: str = "") -> str:
    (x, y), (width, height) = at, size
    inner = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{max(width, 1):.1f}" height="{height:.1f}">'
        f"{inner}</rect>"
    )


def _balance_bar(report: Report) -> str:
    parts = parts_of(report.balance)
    whole = sum(seconds for _, seconds in parts)
    if whole <= 0:
        return ""
    x, drawn = 0.0, ""
    for number, (name, seconds) in enumerate(parts):
        width = _WIDTH * seconds / whole
        if seconds:
            drawn += _rect((x, 0), (width, 22), f"p{number}", f"{name}: {share_text(seconds / whole)}")
        x += width
    x = 0.0
    for number, (name, seconds) in enumerate(parts):
        text = f"{name} {share_text(seconds / whole)}"
        drawn += _rect((x, 34), (9, 9), f"p{number}") + _text(x + 14, 43, text)
        x += 34 + 6.6 * len(text)
    return _svg(50, "where time went", drawn)


class _TimeAxis:
    """From Unix times to pixels.

    Args:
        times: what is to be shown.
    """

    def __init__(self, times: Sequence[float]) -> None:
        self.first, self.last = min(times), max(times)
        self._span = max(self.last - self.first, 0.001)
        self._scale = (_WIDTH - _LEFT - _RIGHT) / self._span

    def x(self, time: float) -> float:
        """Return the place of a time."""
        return _LEFT + (time - self.first) * self._scale

    def bins(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, list[float]]]:
        """Put what lies within a few pixels of each other together."""
        found: dict[int, list[float]] = {}
        step = (_WIDTH - _LEFT - _RIGHT) / _BINS
        for time, value in points:
            found.setdefault(int((self.x(time) - _LEFT) / step), []).append(value)
        return [(_LEFT + (place + 0.5) * step, values) for place, values in sorted(found.items())]

    def ticks(self, y: float) -> str:
        """Draw the times below a chart: dates, or down to milliseconds if it is short."""
        places = (("start", self.first), ("middle", (self.first + self.last) / 2), ("end", self.last))
        return "".join(_text(self.x(time), y, moment(time, self._span), anchor) for anchor, time in places)


def _times(report: Report) -> list[float]:
    of_runs = [time for run in report.runs for time in (run.begin, run.until) if time is not None]
    events = [t for kind in ("save", "load") for each in report.events[kind] if (t := _clock(report, each))]
    return [*of_runs, *events]


def _clock(report: Report, each: dict[str, Any]) -> float | None:
    """Return the time of an event; None if its clock cannot have been right."""
    time = clock_of(each)
    return time if time is not None and time <= report.made + A_DAY else None


def _time_line(report: Report) -> str:
    if not (times := _times(report)):
        return ""
    axis = _TimeAxis(times)
    drawn = "".join(_text(_LEFT - 10, row * _LANE + 17, lane, "end") for row, lane in enumerate(_LANES))
    drawn += "".join(
        f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        for y in range(_LANE, _LANE * (len(_LANES) + 1), _LANE)
    )
    drawn += _bands(report, axis)
    for row, kind, wanted in (
        (1, "save", ("committed",)),
        (2, "load", ("done",)),
    ):
        points = [
            (t, 0.0) for e in report.events[kind] if e.get("outcome") in wanted and (t := _clock(report, e))
        ]
        drawn += _ticks(axis, points, row, kind)
    failed = [
        (t, 0.0)
        for kind in ("save", "load", "upload")
        for e in report.events[kind]
        if e.get("outcome") == "failed" and (t := _clock(report, e))
    ]
    drawn += _ticks(
        axis, failed + [(r.until, 0.0) for r in report.runs if r.until and r.end == "unclean"], 3, "bad"
    )
    height = _LANE * len(_LANES) + 20
    return _svg(
        height, "time line of runs, saves, loads, failures and lost work", drawn + axis.ticks(height - 3)
    )


def _bands(report: Report, axis: _TimeAxis) -> str:
    """Draw runs and what each lost; of runs on the same pixels the worst shows."""
    bands: dict[tuple[int, int], tuple[int, str]] = {}
    lost: dict[tuple[int, int], str] = {}
    worst = ("end", "", "preempted", "unclean")
    for run in report.runs:
        if run.begin is None or run.until is None:
            continue
        place = int(axis.x(run.begin)), max(int(axis.x(run.until)) - int(axis.x(run.begin)), 1)
        rank = worst.index(run.end) if run.end in worst else 1
        training = at_least(seconds_text(run.seconds), exact=run.exact or run.seconds is None)
        title = f"{run.run[:12]}: {run.end or 'no end known'}, {training} of training"
        bands[place] = max(bands.get(place, (-1, "")), (rank, title))
        if run.lost_seconds:
            begin = max(axis.first, run.until - run.lost_seconds)
            width = max(int(axis.x(run.until) - axis.x(begin)), 1)
            text = f"{seconds_text(run.lost_seconds)}, {run.lost_steps:,} steps"
            lost[int(axis.x(begin)), width] = at_least(text, exact=run.exact)
    kinds = ("ended", "open", "preempted", "unclean")
    drawn = [_rect((x, 6), (w, 14), kinds[rank], title) for (x, w), (rank, title) in _thinned(bands)]
    drawn += [_rect((x, 4 * _LANE + 6), (w, 14), "bad", title) for (x, w), title in _thinned(lost)]
    return "".join(drawn)


def _thinned(bands: dict[tuple[int, int], Any]) -> list[tuple[tuple[int, int], Any]]:
    """Keep one band for each pixel at which bands begin: the longest."""
    found: dict[int, tuple[tuple[int, int], Any]] = {}
    for place, what in bands.items():
        if place[0] not in found or found[place[0]][0][1] < place[1]:
            found[place[0]] = (place, what)
    return list(found.values())


def _ticks(axis: _TimeAxis, points: Sequence[tuple[float, float]], row: int, kind: str) -> str:
    return "".join(
        _rect((x - 1, row * _LANE + 6), (2, 14), kind, f"{len(values):,}") for x, values in axis.bins(points)
    )


def _over_time(report: Report) -> str:
    drawn = ""
    for name, label, text in (
        ("stall_seconds", "stall", seconds_text),
        ("durable_seconds", "durable", seconds_text),
        ("size_bytes", "size", bytes_text),
    ):
        points = [
            (t, float(each[name]))
            for each in report.events["save"]
            if each.get(name) is not None
            and each.get("outcome") == "committed"
            and (t := _clock(report, each))
        ]
        drawn += _points(points, label, text) if len(points) > 1 else ""
    return drawn


def _points(points: Sequence[tuple[float, float]], label: str, text: Callable[[float], str]) -> str:
    """Draw the median, and the range, of what lies close together."""
    axis, height = _TimeAxis([time for time, _ in points]), 110
    top = max(value for _, value in points) or 1.0

    def y(value: float) -> float:
        return 16 + (height - 34) * (1 - value / top)

    drawn = _text(0, 12, label) + _text(_LEFT - 10, y(top) + 10, text(top), "end")
    drawn += _text(_LEFT - 10, y(0), "0", "end")
    drawn += f'<line class="rule" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(0):.1f}" y2="{y(0):.1f}"/>'
    for x, values in axis.bins(points):
        title = f"{text(median(values))}, {len(values):,} saves"
        low, high = y(min(values)), y(max(values))
        if len(values) > 1:
            drawn += f'<line class="range" x1="{x:.1f}" x2="{x:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
        middle = y(median(values))
        drawn += f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="1.8"><title>{escape(title)}</title></circle>'
    return _svg(height, f"{label} of saves over time", drawn + axis.ticks(height - 3))


def _distributions(report: Report) -> str:
    drawn = ""
    for name, label in (("stall_seconds", "stall"), ("durable_seconds", "durable")):
        values = [
            float(each[name])
            for each in report.events["save"]
            if each.get(name) and each.get("outcome") == "committed"
        ]
        drawn += _histogram(values, label) if len(values) > 1 else ""
    return drawn


def _histogram(values: Sequence[float], label: str) -> str:
    """Draw how many saves took how long, on a logarithmic scale."""
    low, high = math.log(min(values)), math.log(max(values))
    if high - low < 1e-9:
        return ""
    counts = [0] * _BARS
    for value in values:
        counts[min(_BARS - 1, int((math.log(value) - low) / (high - low) * _BARS))] += 1
    height, width = 84, (_WIDTH - _LEFT - _RIGHT) / _BARS
    drawn = _text(0, 12, label) + _text(_LEFT - 10, 22, f"{max(counts):,}", "end")
    for place, count in enumerate(counts):
        tall = (height - 34) * count / max(counts)
        begin = math.exp(low + place * (high - low) / _BARS)
        end = math.exp(low + (place + 1) * (high - low) / _BARS)
        title = f"{count:,} saves, {seconds_text(begin)} to {seconds_text(end)}"
        if count:
            drawn += _rect((_LEFT + place * width + 1, height - 18 - tall), (width - 2, tall), "save", title)
    places = (("start", min(values)), ("middle", math.exp((low + high) / 2)), ("end", max(values)))
    for number, (anchor, value) in enumerate(places):
        x = _LEFT + number * (_WIDTH - _LEFT - _RIGHT) / 2
        drawn += _text(x, height - 3, seconds_text(value), anchor)
    return _svg(height, f"distribution of {label}", drawn)
