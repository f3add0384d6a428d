"""`plan`: what checkpoints of a training will cost, before it runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Final

from ckpt_core.cli._arguments import json_or_yaml
from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.errors import ConfigError
from ckpt_core.options import policy_from
from ckpt_core.planning import CostPlan, PlanTerms, find_model, option_of
from ckpt_core.reporting import seconds_text
from ckpt_core.validation import duration, parse_size, require, seconds_of

_KEEPS: Final = ("{latest: 1}", "{latest: 3}", "{latest: 3, every_seconds: 86400}", "{all: true}")
_TERMS: Final = [each for each in fields(PlanTerms) if each.metadata]


def options() -> Iterator[tuple[str, Mapping[str, Any]]]:
    for each in _TERMS:
        term = each.metadata
        settings: dict[str, Any] = {"choices": term["choices"]} if term["choices"] else {"metavar": "N"}
        if term["kind"] == "switch":
            settings = {"action": "store_true", "default": None}
        if term["alone"]:
            settings |= {"nargs": "?", "const": term["alone"]}
        source = f": {term['source']}" if term["source"] else ""
        default = f" ({each.default}{source})" if each.default is not None else ""
        yield option_of(each.name), settings | {"help": f"{term['text']}{default}".replace("%", "%%")}


def run(arguments: argparse.Namespace) -> Outcome:
    known = {
        each.name: _value(option_of(each.name), text, each.metadata["kind"])
        for each in _TERMS
        if (text := getattr(arguments, each.name)) is not None
    }
    keep = {text: policy_from(json_or_yaml(text, "--keep"), "keep") for text in arguments.keep or _KEEPS}
    plan = CostPlan(PlanTerms(model=find_model(arguments.model), keep=keep, **known))
    record = plan.record()
    return Outcome(fields=record, parts=_parts(plan, record))


def _value(option: str, text: Any, kind: str) -> Any:
    """Parse an option: rates are in GB/s, times in seconds, or have their unit."""
    if kind in {"word", "switch"}:
        return text
    try:
        number: Any = int(text) if kind == "count" else float(text)
    except ValueError:
        if kind == "count":
            raise ConfigError(f"{option} must be a whole number, not {text!r}") from None
        number = text
    if kind in {"size", "rate"}:
        gigabytes = kind == "rate" and number is not text
        return parse_size(option, number * 1e9 if gigabytes else text, rate=kind == "rate")
    if kind == "time" or number is text:
        require("plan", duration(option, number))
        return float(seconds_of(number))
    return number


def _parts(plan: CostPlan, record: dict[str, Any]) -> list[str | Table]:
    model, layout, times, month = (record[name] for name in ("model", "layout", "times", "month"))
    parameters, step = model["parameters"], plan.terms.step_seconds
    sizes = [(each["name"], each["size_bytes"], each["detail"]) for each in record["components"]]
    sizes.append(("checkpoint", plan.size_bytes, ""))
    rate = f"{_size(plan.write_rate)}/s, {_size(plan.write_rate / layout['writers'])}/s for each writer"
    shown = {"recommended": 1.0, "half of it": 0.5, "twice": 2.0}
    intervals = {name: factor * plan.recommended for name, factor in shown.items()}
    intervals |= {"planned": plan.interval} if plan.terms.save is not None else {}
    return [
        f"{model['name']}: {parameters:,} parameters ({model['source']})",
        f"{layout['ranks']:,} ranks on {layout['nodes']:,} nodes, {layout['strategy']} over "
        f"{layout['sharded_over']:,}, tp {layout['tp']}, pp {layout['pp']}; storage: "
        f"{record['storage']['name']}",
        "",
        Table(
            columns=("COMPONENT", "SIZE", "BYTES PER PARAMETER", "WHAT"),
            rows=[(name, _size(size), f"{size / parameters:.3g}", what) for name, size, what in sizes],
        ),
        f"each rank holds {_size(plan.held_bytes)}; {layout['writers']:,} ranks write "
        f"{_size(plan.written_bytes)} each",
        "",
        Table(
            columns=("TIME OF A SAVE", "", "WHAT"),
            rows=[
                ("stall", seconds_text(plan.stall), f"training is blocked ({times['mode']})"),
                ("durable", seconds_text(plan.durable), f"from the decision to the commit, at {rate}"),
                ("cost", seconds_text(plan.cost), "training time lost, with slowdown"),
                ("restore", seconds_text(plan.restore), "a load after a failure"),
            ],
        ),
        "",
        Table(
            columns=("INTERVAL", "", "STEPS", "OVERHEAD", "GOODPUT"),
            rows=[
                (name, seconds_text(each), f"{each / step:,.0f}", _share(loss), _share(1 - loss))
                for name, each in intervals.items()
                for loss in [plan.overhead_at(each)]
            ],
        ),
        "",
        f"in {plan.terms.days:g} days: {plan.saves:,} saves, one in {seconds_text(plan.interval)}, "
        f"{_size(month['written_bytes'])} written; {month['failures']:,.1f} failures, one in "
        f"{seconds_text(plan.mtbf)}",
        f"GPUs: {_dollars(month['idle_gpu_dollars'])} while they stall ({_share(month['stalled_share'])} "
        f"of the time), {_dollars(month['lost_gpu_dollars'])} for all that is lost "
        f"({_share(month['overhead'])})",
        Table(
            columns=("KEEP", "CHECKPOINTS", "MOST", "ON AVERAGE", "STORAGE", "REQUESTS", "EGRESS"),
            rows=[
                (
                    each["keep"],
                    f"{each['checkpoints_at_end']:,}",
                    *(_size(each[name]) for name in ("peak_bytes", "mean_bytes")),
                    *(_dollars(each[f"{name}_dollars"]) for name in ("storage", "request", "egress")),
                )
                for each in record["retention"]
            ],
        ),
        *_comparison(plan, record),
        "",
        "assumed:",
        Table(
            columns=("WHAT", "VALUE", "SOURCE", "OPTION"),
            rows=[tuple(each.values()) for each in record["assumptions"]],
        ),
    ]


def _comparison(plan: CostPlan, record: dict[str, Any]) -> list[str | Table]:
    """Return what the time planned costs with compression and without."""
    if record["compression"] is None:
        return []
    before = record["compression"]["without"]
    rows = [
        ("a save is durable after", seconds_text, before["durable_seconds"], plan.durable),
        *((name, text, before[key], record["month"][key]) for key, (name, text) in _COMPARED.items()),
        *(
            (f"storage, keep {each['keep']}", _dollars, old, each["storage_dollars"])
            for old, each in zip(before["storage_dollars"], record["retention"], strict=True)
        ),
    ]
    codecs = ", ".join(f"{name} {codec}" for name, codec in plan.codecs.items()) or "ratio as given"
    return [
        "",
        f"compressed to {_size(plan.stored_bytes)}, {record['compression']['ratio']:.3g} : 1 ({codecs})",
        Table(
            columns=(f"IN {plan.terms.days:g} DAYS", "PLAIN", "COMPRESSED", "LESS"),
            rows=[(name, text(old), text(new), text(old - new)) for name, text, old, new in rows],
        ),
    ]


def _size(size: float) -> str:
    """Format bytes in powers of 1000, as prices and rates are."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.2f} PB"


def _share(share: float) -> str:
    return f"{100 * share:.4g} %" if share > 0.9 else f"{100 * share:.3g} %"


def _dollars(dollars: float) -> str:
    return f"${dollars:,.0f}" if dollars >= 100 else f"${dollars:,.2f}"


_COMPARED: Final[Mapping[str, tuple[str, Callable[[float], str]]]] = {
    "written_bytes": ("bytes written", _size),
    "idle_gpu_dollars": ("GPUs while they stall", _dollars),
    "lost_gpu_dollars": ("GPUs for all that is lost", _dollars),
}
