"""A report in words and tables: for a terminal, and as one HTML page."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Final, TypeAlias, final

from ckpt_core.disclosure import printable
from ckpt_core.journal import MOST_STEPS, Record
from ckpt_core.options import bytes_text
from ckpt_core.reporting import _facts as facts
from ckpt_core.reporting._facts import Report, moment, seconds_text, share_text

Row: TypeAlias = tuple[str, ...]
_A_DAY: Final = 86_400.0  # the unit of times in matplotlib
_MOST_ROWS: Final = 20
_MOST_RULES: Final = 40
_MOST_REASONS: Final = 5
_MOST_SHOWN: Final = 6
_STATES: Final = ("damaged", "bad", "abandoned", "pinned", "weights_of")
_ENDS: Final = {"end": "ended", "preempted": "preempted", "unclean": "unclean", "": "no end known"}


@final
@dataclass(frozen=True, slots=True)
class Section:
    """Sentences and a table of a report; columns from `figures` on go right."""

    title: str
    lines: Sequence[str] = ()
    columns: Row = ()
    rows: Sequence[Row] = ()
    figures: int = 1


def sections(report: Report) -> list[Section]:
    """Put a report in words and tables; what has nothing to say is left out."""
    infos, failed = report.checkpoints, facts.failed(report.events)
    states = Counter(name for info in infos for name in _STATES if getattr(info, name) not in (None, False))
    size = bytes_text(sum(info.size_bytes for info in infos))
    found = [
        Section("Advice", report.advice),
        _goodput(report),
        Section(
            "Runs",
            [_counted(_ENDS[run["end"]] for run in report.runs)],
            ("RUN", "END", "FROM (UTC)", "LAST SIGN (UTC)", "STEPS", "TRAINING", "LOST STEPS", "LOST"),
            [_run_row(run) for run in report.runs[: -_MOST_ROWS - 1 : -1]],
            figures=2,
        ),
        Section(
            "What saves cost",
            _why_saved(report.events["save"]),
            ("MEASURE", "SAVES", "LEAST", "MEDIAN", "95 %", "MOST", "IN ALL"),
            [_spread_row(*each) for each in report.spreads.items()],
        ),
        Section(
            "What failed",
            [_counted(f"{each['kind']} {each['outcome']}" for each in failed)],
            ("TIME (UTC)", "WHAT", "STEP", "OUTCOME", "WHY"),
            [_failure_row(each) for each in failed[: -_MOST_ROWS - 1 : -1]],
            figures=9,
        ),
        _retention(report.events),
        Section(
            "In the root now",
            [f"{len(infos):,} checkpoints, {size}", *(f"{n:,} {name}" for name, n in states.items())],
        ),
        Section("Not known", report.unknown),
    ]
    return [each for each in found if any(each.lines) or each.rows]


def _counted(texts: Iterable[str]) -> str:
    """Count what a table shows the newest of."""
    counts = Counter(texts)
    more = f"; the newest {_MOST_ROWS}:" if counts.total() > _MOST_ROWS else ""
    return ", ".join(f"{count:,} {text}" for text, count in counts.most_common()) + more


def _goodput(report: Report) -> Section:
    parts, down = facts.parts_of(report.balance), report.balance["down"]
    if report.goodput is None:
        return Section("Goodput")
    whole = sum(seconds for _, seconds in parts)
    rows = [(name, seconds_text(seconds), share_text(seconds / whole)) for name, seconds in parts]
    rows += [("beside these: down after a kill", seconds_text(down), "")] if down else []
    line = f"Of {seconds_text(whole)} measured, {_goodput_text(report)} was training that counts."
    return Section("Goodput", [line], ("PART", "TIME", "SHARE"), rows)


def _goodput_text(report: Report) -> str:
    known = report.balance["exact"] or report.goodput is None
    return f"{'' if known else 'at most '}{share_text(report.goodput)}"


def _run_row(run: Record) -> Row:
    steps = "?" if run["first_step"] is None else f"{run['first_step']:,} - {run['last_step']:,}"
    figures = seconds_text(run["seconds"]), f"{run['lost_steps']:,}", seconds_text(run["lost_seconds"])
    return (
        *(run["run"][:12], _ENDS[run["end"]], moment(run["begin"]), moment(run["until"]), steps),
        *(each if run["exact"] or each == "?" else f"at least {each}" for each in figures),
    )


def _why_saved(saves: Sequence[Record]) -> list[str]:
    # A reason without the numbers of the moment.
    reasons = Counter(
        f"{each['outcome'] or 'of no known outcome'}: "
        f"{(each['reason'] or 'no reason recorded').partition(':')[0]}"
        for each in saves
    )
    return [f"{count:,} saves {reason}" for reason, count in reasons.most_common(_MOST_REASONS)]


def _spread_row(name: str, spread: dict[str, float]) -> Row:
    count, *figures = spread.values()
    text = bytes_text if name == "size_bytes" else seconds_text
    return name.rpartition("_")[0], f"{count:,}", *map(text, figures)


def _failure_row(each: Record) -> Row:
    step = "?" if each["step"] is None else f"{each['step']:,}"
    return moment(each["time"]), each["kind"], step, str(each["outcome"]), each["error"] or ""


def _retention(events: dict[str, list[Record]]) -> Section:
    deleted: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in events["prune"]:
        entry = deleted[each["tier"] or "root", each["why"] or "no reason recorded"]
        entry[0] += len(each["names"] or ())
        entry[1] += each["size_bytes"] or 0
    ordered = sorted(deleted.items(), key=lambda item: -item[1][1])
    rows = [(tier, "deleted", why, f"{n:,}", bytes_text(size)) for (tier, why), (n, size) in ordered]
    last = {each["tier"] or "root": each for each in events["retention"]}
    for tier, each in last.items():
        for why, steps in (each["kept"] or {}).items():
            count = f"{len(steps):,}" if len(steps) < MOST_STEPS else f"{MOST_STEPS} or more"
            shown = " ".join(f"{step:,}" for step in steps[-_MOST_SHOWN:])
            rows.append((tier, "kept", why, count, f"{'… ' * (len(steps) > _MOST_SHOWN)}{shown}"))
    return Section(
        "What retention did",
        [f"Kept in {tier} by its last prune, {moment(each['time'])}." for tier, each in last.items()],
        ("TIER", "WHAT", "WHY", "CHECKPOINTS", "SIZE OR STEPS"),
        rows[:_MOST_RULES],
        figures=3,
    )


_TEMPLATE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Checkpoints of {{ root }}</title>
<style>
:root{color-scheme:light dark;--soft:#6a6f76;--rule:#e2e4e8}
@media (prefers-color-scheme:dark){:root{--soft:#9aa0a8;--rule:#33373d}}
body{margin:0 auto;max-width:1010px;padding:40px 24px;font:15px/1.5 system-ui;overflow-wrap:anywhere}
h2{font-size:16px;margin:44px 0 8px;padding-top:12px;border-top:1px solid var(--rule)}
dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:20px}
dt,th,.soft{color:var(--soft);font-size:13px}
dd{margin:0;font-size:24px}
table{border-collapse:collapse;display:block;overflow-x:auto;font-variant-numeric:tabular-nums}
th,td{padding:4px 18px 4px 0;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top}
.n{text-align:right;white-space:nowrap}
img{width:100%}
</style></head>
<body>
<h1>{{ root }}</h1>
<p class="soft">Checkpoints of this root, as of {{ made }} UTC{{ note }}</p>
<dl>{% for name, text in headline %}<div><dt>{{ name }}</dt><dd>{{ text }}</dd></div>{% endfor %}</dl>
{% for each in sections %}<section><h2>{{ each.title }}</h2>
{% for line in each.lines %}<p>{{ line }}</p>
{% endfor %}{% if each.rows %}<table>
{% for cells in [each.columns] + each.rows %}{% set tag = "th" if loop.first else "td" %}<tr>
{%- for cell in cells %}<{{ tag }}{{ ' class=n' if loop.index0 >= each.figures }}>{{ cell }}</{{ tag }}>
{%- endfor %}</tr>
{% endfor %}</table>
{% endif %}</section>
{% if loop.first and picture %}<img alt="Runs, events and costs of saves over time"
 src="data:image/png;base64,{{ picture }}">
{% endif %}{% endfor %}</body></html>
"""


def page(report: Report) -> str:
    """Return a report as HTML. Every text in it is escaped, wherever it comes from."""
    from jinja2 import Environment  # not where only texts are formatted

    plain = Environment(autoescape=True, finalize=lambda each: printable(each) if type(each) is str else each)
    picture, note = BytesIO(), ""
    try:
        if (figure := _drawn(report)) is not None:
            figure.savefig(picture, format="png", dpi=110, transparent=True)
    except ImportError:
        note = "; for a picture install ckpt-suite[report]"
    balance, found = report.balance, {name: each["median"] for name, each in report.spreads.items()}
    return plain.from_string(_TEMPLATE).render(
        root=report.root,
        made=moment(report.made)[:16],
        note=note,
        headline=[
            ("goodput", _goodput_text(report)),
            ("saves", f"{len(facts.committed(report.events['save'])):,}"),
            ("stall, median", seconds_text(found.get("stall_seconds"))),
            ("durable, median", seconds_text(found.get("durable_seconds"))),
            ("lost work", f"{'' if balance['exact'] else 'at least '}{seconds_text(balance['lost'])}"),
            ("in the root", bytes_text(sum(each.size_bytes for each in report.checkpoints))),
        ],
        sections=sections(report),
        picture=b64encode(picture.getvalue()).decode(),
    )


_INK: Final = "#7d838b"
"""Of axes and texts of the picture: to be read on light and on dark paper."""
_BLUE: Final = "#3b7cc4"
_RED: Final = "#c0452c"
_CHARTS: Final = {"stall_seconds": "stall, s", "durable_seconds": "durable, s", "size_bytes": "size, GiB"}


def _drawn(report: Report) -> Any:
    """Draw runs, events and costs of saves over time; None without any time."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.figure import Figure

    runs = [run for run in report.runs if run["begin"] is not None]
    if not runs:
        return None
    saves = facts.timely(facts.committed(report.events["save"]), report.made)
    loads, failed = (
        facts.timely(e, report.made) for e in (report.events["load"], facts.failed(report.events))
    )
    dead, lost = (
        [run for run in runs if run["end"] == "unclean"],
        [run for run in runs if run["lost_seconds"]],
    )
    lanes: list[tuple[str, str, str, list[float]]] = [
        *(("runs", "-", _RED if run in dead else _BLUE, [run["begin"], run["until"]]) for run in runs),
        ("saves", "|", _BLUE, [each["time"] for each in saves]),
        ("loads", "|", _BLUE, [each["time"] for each in loads]),
        ("failures", "|", _RED, [*(each["time"] for each in failed), *(run["until"] for run in dead)]),
        *(("lost work", "-", _RED, [run["until"] - run["lost_seconds"], run["until"]]) for run in lost),
    ]
    charts = [name for name in _CHARTS if name in report.spreads]
    heights = [2, *(1 for _ in charts)]
    figure = Figure(figsize=(10, 1.2 * sum(heights)), layout="constrained")
    first, *others = figure.subplots(len(heights), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for lane, style, colour, found in lanes:
        days, names = [time / _A_DAY for time in found], [lane] * len(found)
        first.plot(days, names, style, color=colour, lw=8, ms=11, solid_capstyle="butt")
    first.margins(y=0.2)
    first.invert_yaxis()
    for axes, name in zip(others, charts, strict=True):
        unit = 2**30 if name == "size_bytes" else 1
        points = [(each["time"] / _A_DAY, each[name] / unit) for each in saves if each[name] is not None]
        axes.plot([day for day, _ in points], [value for _, value in points], ".", ms=3, color=_BLUE)
        axes.set_ylim(bottom=0)
        axes.set_title(_CHARTS[name], loc="left", color=_INK, fontsize=9)
    for axes in figure.axes:
        axes.tick_params(colors=_INK, labelsize=8)
        axes.spines[:].set_visible(False)
        axes.set_facecolor("none")
    # Milliseconds, seconds, minutes or dates, as the span needs.
    locator: Any = AutoDateLocator(minticks=3, maxticks=7)  # type: ignore[no-untyped-call]
    figure.axes[-1].xaxis.set_major_locator(locator)
    figure.axes[-1].xaxis.set_major_formatter(ConciseDateFormatter(locator))  # type: ignore[no-untyped-call]
    return figure
