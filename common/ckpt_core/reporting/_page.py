"""A report as one HTML page without network or scripts; its pictures lie in it."""

from __future__ import annotations

from base64 import b64encode
from datetime import UTC, datetime
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment

from ckpt_core.disclosure import printable
from ckpt_core.reporting._facts import Report, committed, times_in
from ckpt_core.reporting._sections import headline, parts_of, sections

if TYPE_CHECKING:
    from collections.abc import Iterable

_INK: Final = "#7d838b"
"""Of axes and texts of pictures: to be read on light and on dark paper."""
_COLOURS: Final = ("#3b7cc4", "#d99a2b", "#8fb4dc", "#c0452c", _INK)
_OF_ENDS: Final = {"end": _COLOURS[0], "preempted": _COLOURS[1], "unclean": _COLOURS[3]}
_TEMPLATE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Checkpoints of {{ root }}</title>
<style>
:root{color-scheme:light dark;--soft:#6a6f76;--rule:#e2e4e8}
@media (prefers-color-scheme:dark){:root{--soft:#9aa0a8;--rule:#33373d}}
body{margin:0 auto;max-width:1010px;padding:40px 24px;font:15px/1.5 system-ui,sans-serif;
overflow-wrap:anywhere}
h1{font-size:24px;margin:0}
h2{font-size:16px;margin:44px 0 8px;padding-top:12px;border-top:1px solid var(--rule)}
p{margin:0 0 8px;max-width:76ch}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:20px}
dt,th,.soft{color:var(--soft);font-size:13px}
dd{margin:0;font-size:24px}
div.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{padding:4px 18px 4px 0;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
.n{text-align:right;white-space:nowrap}
img{width:100%}
</style></head>
<body>
<h1>{{ root }}</h1>
<p class="soft">Checkpoints of this root, as of {{ made }} UTC{{ note }}</p>
<dl>{% for name, text in headline %}<div><dt>{{ name }}</dt><dd>{{ text }}</dd></div>{% endfor %}</dl>
{% for each in sections %}<section id="{{ each.key }}"><h2>{{ each.title }}</h2>
{% for line in each.lines %}<p>{{ line }}</p>
{% endfor %}{% if each.key in pictures %}<img alt="{{ each.title }}"
 src="data:image/png;base64,{{ pictures[each.key] }}">
{% endif %}{% if each.rows %}<div class="wide"><table>
<thead>{{ row(each, each.columns, "th") }}</thead>
<tbody>{% for cells in each.rows %}{{ row(each, cells, "td") }}{% endfor %}</tbody>
</table></div>
{% endif %}</section>
{% endfor %}</body></html>
"""
_ROW: Final = """{% macro row(each, cells, tag) %}<tr>{% for cell in cells %}<{{ tag }}
{%- if loop.index0 >= each.figures %} class="n"{% endif %}>{{ cell }}</{{ tag }}>{% endfor %}</tr>
{% endmacro %}"""


def page(report: Report) -> str:
    """Return a report as HTML. Every text in it is escaped, wherever it comes from."""
    environment = Environment(
        autoescape=True, finalize=lambda each: printable(each) if type(each) is str else each
    )
    try:
        pictures, note = _pictures(report), ""
    except ImportError:
        pictures, note = {}, "; for pictures install ckpt-suite[report]"
    return environment.from_string(_ROW + _TEMPLATE).render(
        root=report.root,
        made=datetime.fromtimestamp(report.made, UTC).strftime("%Y-%m-%d %H:%M"),
        note=note,
        headline=headline(report),
        sections=sections(report),
        pictures=pictures,
    )


def _pictures(report: Report) -> dict[str, str]:
    """Draw the pictures of sections that have something to show: PNG, in base64."""
    from matplotlib.figure import Figure

    found: dict[str, str] = {}
    for key, height, draw in (
        ("goodput", 1.0, _draw_balance),
        ("runs", 2.2, _draw_time_line),
        ("costs", 4.5, _draw_costs),
    ):
        figure, content = Figure(figsize=(10, height), layout="constrained"), BytesIO()
        if draw(report, figure):
            for axes in figure.axes:
                axes.tick_params(colors=_INK, labelsize=8)
                axes.spines[:].set_visible(False)
                axes.set_facecolor("none")
            figure.savefig(content, format="png", dpi=110, transparent=True)
            found[key] = b64encode(content.getvalue()).decode()
    return found


def _draw_balance(report: Report, figure: Any) -> bool:
    """Draw where time went."""
    axes, left = figure.subplots(), 0.0
    parts = parts_of(report.balance)
    whole = sum(seconds for _, seconds in parts)
    if whole <= 0:
        return False
    for (name, seconds), colour in zip(parts, _COLOURS, strict=True):
        share = 100 * seconds / whole
        axes.barh(0, share, left=left, color=colour, label=f"{name} {share:.3g} %")
        left += share
    axes.set_yticks([])
    axes.set_xlim(0, 100)
    axes.legend(
        ncols=5, fontsize=8, frameon=False, labelcolor=_INK, loc="upper center", bbox_to_anchor=(0.5, -0.2)
    )
    return True


def _draw_time_line(report: Report, figure: Any) -> bool:
    """Draw runs, saves, loads, failures and lost work over time."""
    axes, lanes = figure.subplots(), ("lost work", "failures", "loads", "saves", "runs")
    died: list[float] = []
    for run in report.runs:
        if run["begin"] is None or run["until"] is None:
            continue
        thick = {"linewidth": 8, "solid_capstyle": "butt"}
        axes.plot(
            _moments((run["begin"], run["until"])), [4, 4], color=_OF_ENDS.get(run["end"], _INK), **thick
        )
        if run["lost_seconds"]:
            lost = _moments((run["until"] - run["lost_seconds"], run["until"]))
            axes.plot(lost, [0, 0], color=_COLOURS[3], **thick)
        died += [run["until"]] * (run["end"] == "unclean")
    events = report.events
    failed = [each for kind in ("save", "load", "upload") for each in events[kind]]
    failed = [each for each in failed if each.get("outcome") == "failed"]
    loads = [each for each in events["load"] if each.get("outcome") == "done"]
    times = [[*times_in(report, failed), *died], times_in(report, loads), times_in(report, committed(events))]
    for lane, found in enumerate(times, start=1):
        colour = _COLOURS[3 if lane == 1 else 0]
        axes.plot(_moments(found), [lane] * len(found), "|", markersize=11, color=colour)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(-0.6, 4.6)
    _as_dates(axes)
    return bool(axes.lines[len(times) :] or any(times))


def _draw_costs(report: Report, figure: Any) -> bool:
    """Draw stall, time to durable and size of saves: over time, and distributed."""
    rows = (("stall_seconds", "stall, s"), ("durable_seconds", "durable, s"), ("size_bytes", "size, GiB"))
    done = [each for each in committed(report.events) if times_in(report, [each])]
    drawn = False
    for (name, label), (over_time, spread) in zip(
        rows, figure.subplots(3, 2, width_ratios=(3, 1)), strict=True
    ):
        points = [each for each in done if each.get(name) is not None]
        values = [float(each[name]) / (2**30 if name == "size_bytes" else 1) for each in points]
        over_time.plot(_moments(times_in(report, points)), values, ".", markersize=3, color=_COLOURS[0])
        over_time.set_ylim(bottom=0)
        over_time.set_title(label, loc="left", color=_INK, fontsize=9)
        _as_dates(over_time)
        spread.ticklabel_format(useOffset=False)
        spread.hist(values, bins=32, color=_COLOURS[0])
        drawn = drawn or len(values) > 1
    return drawn


def _moments(times: Iterable[float]) -> list[Any]:
    return [datetime.fromtimestamp(time, UTC) for time in times]


def _as_dates(axes: Any) -> None:
    """Show milliseconds, seconds, minutes or dates, as the span of an axis needs."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter

    locator: Any = AutoDateLocator(minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
