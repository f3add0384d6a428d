"""A report in words and tables: for a terminal, and as one HTML page."""

from __future__ import annotations

from base64 import b64encode
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from typing import Any, Final, TypeVar, final

from ckpt_core.disclosure import printable
from ckpt_core.journal import MOST_STEPS
from ckpt_core.options import bytes_text
from ckpt_core.reporting._facts import Report, committed, goodput, moment, seconds_text, share_text, times_in

T = TypeVar("T")
_MOST_ROWS: Final = 20
_MOST_RULES: Final = 40
_MOST_SHOWN: Final = 6
_ENDS: Final = {"end": "ended", "preempted": "preempted", "unclean": "unclean", "": "no end known"}


@final
@dataclass(frozen=True, slots=True)
class Section:
    """One part of a report: sentences, and a table; columns from `figures` on go right."""

    key: str
    title: str
    lines: Sequence[str] = ()
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    figures: int = 1


def sections(report: Report) -> list[Section]:
    """Put a report in words and tables; what has nothing to say is left out."""
    found = [
        Section("advice", "Advice", report.advice),
        *(make(report) for make in (_goodput, _runs, _costs, _cadence, _failures, _retention, _checkpoints)),
        Section("unknown", "Not known", report.unknown),
    ]
    return [each for each in found if each.lines or each.rows]


def parts_of(balance: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Return where time went, in seconds; together it is all that is known of it."""
    useful = balance["covered"] - balance["stall"] - balance["slowdown"] - balance["lost"]
    return [
        ("training that counts", max(0.0, useful)),
        ("stall", balance["stall"]),
        ("slowdown", balance["slowdown"]),
        ("lost work" if balance["exact"] else "lost work, at least", balance["lost"]),
        ("loads", balance["loading"]),
    ]


def why_kept(events: Sequence[Mapping[str, Any]], url: str) -> dict[int, list[str]]:
    """Return the reasons for which each step stayed in a root at its last prune.

    `events` are records of the journal, the oldest first; of the root itself, or of one whose tier it is.
    """
    place = url if any(_tier(each) == url for each in events) else "root"
    pruned = [each for each in events if each.get("kind") == "retention" and _tier(each) == place]
    kept: dict[str, list[int]] = pruned[-1].get("kept") or {} if pruned else {}
    steps = set[int]().union(*kept.values())
    return {step: [reason for reason, those in kept.items() if step in those] for step in steps}


def _goodput_text(balance: Mapping[str, Any]) -> str:
    known = balance["exact"] or goodput(balance) is None
    return f"{'' if known else 'at most '}{share_text(goodput(balance))}"


def _at_least(text: str, *, exact: bool) -> str:
    return text if exact else f"at least {text}"


def _newest(things: Sequence[T]) -> Sequence[T]:
    return things[-_MOST_ROWS:][::-1]


def _more(things: Sequence[object]) -> str:
    return f"; the newest {_MOST_ROWS}:" if len(things) > _MOST_ROWS else ""


def _counted(texts: Iterable[Any]) -> str:
    return ", ".join(f"{count:,} {text}" for text, count in Counter(texts).most_common())


def _goodput(report: Report) -> Section:
    balance = report.balance
    parts = parts_of(balance)
    whole = sum(seconds for _, seconds in parts)
    if whole <= 0:
        return Section("goodput", "Goodput")
    lines = [f"Of {seconds_text(whole)} measured, {_goodput_text(balance)} was training that counts."]
    if not balance["exact"]:
        lines.append("A run that was killed may have trained on after its last sign: that work is lost, too.")
    if balance["down"]:
        lines.append(
            f"From the last signs of killed runs to the next starts went {seconds_text(balance['down'])}; "
            "that is in no other figure."
        )
    rows = [(name, seconds_text(part), share_text(part / whole)) for name, part in parts]
    return Section("goodput", "Goodput", lines, ("PART", "TIME", "SHARE"), rows)


def _runs(report: Report) -> Section:
    runs = report.runs
    rows = [
        (
            run["run"][:12],
            str(_ENDS.get(run["end"], run["end"])),
            moment(run["begin"]),
            moment(run["until"]),
            "?" if run["first_step"] is None else f"{run['first_step']:,} - {run['last_step']:,}",
            _at_least(seconds_text(run["seconds"]), exact=run["exact"] or run["seconds"] is None),
            _at_least(f"{run['lost_steps']:,}", exact=run["exact"]),
            _at_least(seconds_text(run["lost_seconds"]), exact=run["exact"]),
        )
        for run in _newest(runs)
    ]
    lines = [_counted(_ENDS.get(run["end"], run["end"]) for run in runs) + _more(runs)] if runs else []
    columns = ("RUN", "END", "FROM (UTC)", "LAST SIGN (UTC)", "STEPS", "TRAINING", "LOST STEPS", "LOST")
    return Section("runs", "Runs", lines, columns, rows, figures=2)


def _costs(report: Report) -> Section:
    rows = []
    for name, spread in report.spreads.items():
        text = bytes_text if name == "size_bytes" else seconds_text
        count, *figures = spread.values()
        rows.append((name.rpartition("_")[0], f"{count:,}", *map(text, figures)))
    saves = report.events["save"]
    lines = [_counted(each.get("outcome") for each in saves)] if saves else []
    columns = ("MEASURE", "SAVES", "LEAST", "MEDIAN", "95 %", "MOST", "IN ALL")
    return Section("costs", "What saves cost", lines, columns, rows)


def _cadence(report: Report) -> Section:
    lines = []
    if (found := report.optimum) is not None:
        text = {name: seconds_text(value) for name, value in found.items() if isinstance(value, int | float)}
        lines = [
            f"Failures: one in {text['mtbf']} ({found['mtbf_source']}).",
            f"A save takes {text['cost']} of training and is durable after {text['durable']}; a load takes "
            f"{text['restart']}.",
            f"Measured interval: {text['interval']}, expected loss {share_text(found['overhead'])}. "
            f"Optimum: {text['best_interval']}, {share_text(found['best_overhead'])}.",
        ]
    # A reason without the numbers of the moment.
    reasons = Counter(
        str(each.get("reason") or "no reason recorded").partition(":")[0] for each in report.events["save"]
    )
    lines += [f"{count:,} saves: {reason}" for reason, count in reasons.most_common(5)]
    rows = [
        (
            moment(each["time"]),
            str(each.get("rule") or ""),
            seconds_text(each.get("interval_seconds")),
            seconds_text(each.get("mtbf_seconds")),
            str(each.get("mtbf_source") or ""),
        )
        for each in _newest(report.events["cadence"])
    ]
    columns = ("DECIDED (UTC)", "RULE", "INTERVAL", "MTBF", "FROM")
    return Section("cadence", "When to save", lines, columns, rows, figures=9)


def _failures(report: Report) -> Section:
    of_kind = [each for kind in ("save", "load", "upload") for each in report.events[kind]]
    found = [each for each in of_kind if each.get("outcome") not in {"committed", "done"}]
    found.sort(key=lambda each: each["time"])
    rows = [
        (
            moment(each["time"]),
            each["kind"],
            "?" if each.get("step") is None else f"{each['step']:,}",
            str(each.get("outcome")),
            str(each.get("error") or ""),
        )
        for each in _newest(found)
    ]
    lines = [f"{len(found):,} in all{_more(found)}"] if found else []
    columns = ("TIME (UTC)", "WHAT", "STEP", "OUTCOME", "WHY")
    return Section("failures", "What failed", lines, columns, rows, figures=9)


def _retention(report: Report) -> Section:
    why: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for each in report.events["prune"]:
        entry = why[_tier(each), str(each.get("why") or "no reason recorded")]
        entry[0] += len(each.get("names") or ())
        entry[1] += each.get("size_bytes") or 0
    ordered = sorted(why.items(), key=lambda item: -item[1][1])
    rows = [(tier, "deleted", reason, f"{n:,}", bytes_text(size)) for (tier, reason), (n, size) in ordered]
    counts = [sum(column) for column in zip(*why.values(), strict=True)]
    lines = [f"{counts[0]:,} deleted, {bytes_text(counts[1])}."] if counts else []
    for tier, each in {_tier(each): each for each in report.events["retention"]}.items():
        lines.append(f"Kept in {tier} at its last prune, {moment(each['time'])}: by the rules below.")
        for reason, steps in (each.get("kept") or {}).items():
            count = f"{len(steps):,}" if len(steps) < MOST_STEPS else f"{MOST_STEPS} or more"
            shown = " ".join(f"{step:,}" for step in steps[-_MOST_SHOWN:])
            rows.append((tier, "kept", reason, count, f"{'… ' * (len(steps) > _MOST_SHOWN)}{shown}"))
    columns = ("TIER", "WHAT", "WHY", "CHECKPOINTS", "SIZE OR STEPS")
    return Section("retention", "What retention did", lines, columns, rows[:_MOST_RULES], figures=3)


def _tier(each: Mapping[str, Any]) -> str:
    return str(each.get("tier") or "root")


def _checkpoints(report: Report) -> Section:
    infos = sorted(report.checkpoints, key=lambda info: info.created)
    states = {
        "damaged": [i for i in infos if i.damaged is not None],
        "bad": [i for i in infos if i.bad is not None],
        "abandoned": [i for i in infos if i.abandoned],
        "pinned": [i for i in infos if i.pinned is not None],
        "weights": [i for i in infos if i.weights_of is not None],
    }
    counted = "".join(f", {len(named):,} {state}" for state, named in states.items() if named)
    size = bytes_text(sum(info.size_bytes for info in infos))
    why = why_kept([*report.events["upload"], *report.events["retention"]], report.root)
    rows = [
        (
            info.name,
            next((state for state, named in states.items() if info in named), ""),
            "" if info.abandoned or info.marked else ", ".join(why.get(info.step, ())),
            moment(info.created),
            f"{info.step:,}",
            f"{info.world_size:,}",
            bytes_text(info.size_bytes),
        )
        for info in _newest(infos)
    ]
    lines = [f"{len(infos):,} checkpoints, {size}{counted}{_more(infos)}"]
    columns = ("CHECKPOINT", "STATE", "KEPT AS", "COMMITTED (UTC)", "STEP", "RANKS", "SIZE")
    return Section("checkpoints", "In the root now", lines, columns, rows, figures=4)


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
    from jinja2 import Environment  # not for `ckpt ls`, which only asks why a checkpoint is kept

    plain = Environment(autoescape=True, finalize=lambda each: printable(each) if type(each) is str else each)
    try:
        pictures, note = _pictures(report), ""
    except ImportError:
        pictures, note = {}, "; for pictures install ckpt-suite[report]"
    balance, found = report.balance, {name: each["median"] for name, each in report.spreads.items()}
    return plain.from_string(_ROW + _TEMPLATE).render(
        root=report.root,
        made=moment(report.made)[:16],
        note=note,
        headline=[
            ("goodput", _goodput_text(balance)),
            ("saves", f"{len(committed(report.events)):,}"),
            ("stall, median", seconds_text(found.get("stall_seconds"))),
            ("durable, median", seconds_text(found.get("durable_seconds"))),
            ("lost work", _at_least(seconds_text(balance["lost"]), exact=balance["exact"])),
            ("in the root", bytes_text(sum(each.size_bytes for each in report.checkpoints))),
        ],
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
