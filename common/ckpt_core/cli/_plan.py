"""`plan`: what checkpoints of a training will cost, before it runs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from ckpt_core.cli._arguments import Commands, refuse_file_of_a_root
from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.errors import ConfigError
from ckpt_core.options import parse_size, parse_yaml, policy_from
from ckpt_core.planning import (
    DTYPE_BYTES,
    OPTIMIZERS,
    SAVE_MODES,
    STORAGES,
    STRATEGIES,
    CostPlan,
    ModelShape,
    PlannedUpload,
    PlanNumbers,
    PlanTerms,
    RankLayout,
    RetentionCost,
    StorageProfile,
    TrainedState,
    UploadCost,
    dollars_text,
    draw_plan,
    dtype_word,
    find_model,
    find_storage,
    make_plan,
    option_of,
    plan_record,
    rate_of,
    seconds_from,
    seconds_text,
    share_text,
    size_text,
    with_experts,
    with_storage,
    with_unit,
)

_OPTIMUM: Final = "optimal"
_KEEPS: Final = ("{latest: 1}", "{latest: 3}", "{latest: 3, every_seconds: 86400}", "{all: true}")
_UPLOAD: Final = ("to", "every", "keep", "bandwidth")
_MEASURED: Final = ("stall_seconds", "durable_seconds", "restore_seconds")
_RATES: Final = {"staging_rate"}
_SECONDS: Final = {"call_seconds", "step_seconds", "restart_seconds"}


def add(commands: Commands, shared: argparse.ArgumentParser) -> None:
    """Add the command and its options."""
    command = commands.add_parser(
        "plan",
        parents=[shared],
        help="plan what checkpoints will cost: bytes, stall, interval, overhead, money",
        description="Plans the checkpoints of a training that need not run yet: bytes by component and by "
        "rank, times of a save and a restore, the interval that loses least, expected goodput, and bytes and "
        "money in a month of 30 days. All that is assumed is printed, with its source and its option.",
    )
    command.add_argument(
        "model",
        metavar="MODEL",
        help="number of parameters (70B), a config.json of Hugging Face or its directory, or "
        "package.module:function, whose model is built on the meta device",
    )
    _add_state(command)
    _add_layout(command)
    _add_storage(command)
    _add_policies(command)
    numbers = command.add_argument_group("numbers that are assumed")
    for each in fields(PlanNumbers):
        meta = each.metadata
        shown = (
            f"{meta['name']} ({with_unit(getattr(PlanNumbers(), each.name), meta['unit'])}: {meta['source']})"
        )
        numbers.add_argument(option_of(each.name), metavar="N", help=shown.replace("%", "%%"))
    command.set_defaults(command=run, place="")


def _add_state(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("state")
    dtypes = tuple(DTYPE_BYTES)
    group.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="whose state is saved (adamw)"
    )
    group.add_argument("--weights", choices=dtypes, help="dtype of the weights (of the config, else bf16)")
    group.add_argument("--master", choices=dtypes, help="dtype of a second copy of the weights (none)")
    group.add_argument("--moments", choices=dtypes, default="fp32", help="dtype of the moments (fp32)")
    group.add_argument("--gradients", choices=dtypes, help="dtype of gradients that are saved, too (none)")
    group.add_argument("--optimizer-bytes", metavar="N", help="bytes per parameter, instead of the moments")
    group.add_argument(
        "--size", metavar="BYTES", help='of a checkpoint, such as "782 GB", instead of all this'
    )


def _add_layout(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("ranks")
    group.add_argument("--ranks", type=int, default=8, metavar="N", help="processes, one per GPU (8)")
    group.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="ranks on one node (8)")
    group.add_argument("--layout", choices=STRATEGIES, default="fsdp", help="of data parallel ranks (fsdp)")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="tensor parallel degree (1)")
    group.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (1)")
    group.add_argument("--ep", type=int, default=1, metavar="N", help="expert parallel degree (1)")
    group.add_argument(
        "--expert-parameters", metavar="N", help="of MODEL, if that is a number: those of its experts (0)"
    )
    group.add_argument("--shards", type=int, metavar="N", help="of hsdp (the ranks of a node)")
    group.add_argument(
        "--one-replica",
        action="store_true",
        help="of ranks with equal bytes only one writes, as in other libraries; ours divide them",
    )


def _add_storage(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("storage")
    group.add_argument(
        "--storage",
        default="s3",
        metavar="NAME",
        help=f"one of {', '.join(STORAGES)}, or the URL of a bucket (s3)",
    )
    group.add_argument("--write-gbps", metavar="RATE", help='GB/s, or text such as "5 GiB/s"')
    group.add_argument("--read-gbps", metavar="RATE", help="the same")
    group.add_argument("--rate-of", choices=("node", "rank", "job"), help="what these rates are of")
    group.add_argument("--commit-seconds", type=float, metavar="S", help="from the last byte to the commit")
    group.add_argument("--gb-month", type=float, metavar="$", help="for a GB kept a month")
    group.add_argument("--put-price", type=float, metavar="$", help="for 1,000 writing requests")
    group.add_argument("--get-price", type=float, metavar="$", help="for 1,000 reading requests")
    group.add_argument("--part-bytes", metavar="SIZE", help="of one request")
    group.add_argument("--egress", type=float, metavar="$", help="for a GB read by a restore")


def _uploads(arguments: argparse.Namespace) -> list[PlannedUpload]:
    """Return the tiers of `--upload`, each a place or a mapping.

    Raises:
        ConfigError: one is none.
    """
    return [_upload(text) for text in arguments.upload]


def _upload(text: str) -> PlannedUpload:
    value: Any = _policy("--upload", text) if text.lstrip().startswith("{") else {"to": text}
    if not isinstance(value, dict) or "to" not in value:
        raise ConfigError(f"--upload {text!r}: needs `to`, and takes {', '.join(_UPLOAD)}, as in the options")
    if more := sorted(map(str, value.keys() - _UPLOAD)):
        raise ConfigError(f"--upload {text!r}: knows no {', '.join(more)}; it takes {', '.join(_UPLOAD)}")
    keep = value.get("keep", {"all": True})
    return PlannedUpload(
        name=str(value["to"]),
        storage=find_storage(str(value["to"])),
        every=value.get("every", 1),
        keep=policy_from(keep, "keep"),
        keep_text=json.dumps(keep).replace('"', ""),
        bandwidth=parse_size("--upload bandwidth", value.get("bandwidth"), rate=True),
    )


def _add_policies(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("saves and failures")
    group.add_argument(
        "--save",
        default=_OPTIMUM,
        metavar="WHEN",
        help=f"{_OPTIMUM}, a time from start to start such as 30m, or a policy as in options: "
        f"'{{every_steps: 500}}' ({_OPTIMUM})",
    )
    group.add_argument(
        "--keep",
        action="append",
        metavar="POLICY",
        help="retention policy as in options: '{latest: 3, every: 1000}'; may be repeated, to compare",
    )
    group.add_argument(
        "--upload",
        action="append",
        default=[],
        metavar="TIER",
        help="a further tier, as in options, with a storage or a URL: "
        "'{to: s3, every: 10, keep: {latest: 3}, bandwidth: 500 MB/s}'; may be repeated",
    )
    group.add_argument(
        "--replicas", type=int, choices=(1, 2), default=1, help="files that hold the same bytes (1)"
    )
    group.add_argument("--mode", choices=SAVE_MODES, default="blocking", help="how a save stalls (blocking)")
    group.add_argument("--mtbf", metavar="TIME", help="between failures of the job, such as 6h")
    for name in _MEASURED:
        group.add_argument(option_of(name), metavar="TIME", help="measured, instead of computed")
    group.add_argument("--picture", metavar="FILE", help="draw the plan; needs matplotlib")


def run(arguments: argparse.Namespace) -> Outcome:
    """Plan, and show the plan."""
    model = find_model(arguments.model)
    if arguments.expert_parameters is not None:
        model = with_experts(model, find_model(arguments.expert_parameters).parameters)
    numbers = _numbers(arguments)
    terms = PlanTerms(
        model=model,
        state=_state(arguments, model),
        layout=RankLayout(
            ranks=arguments.ranks,
            gpus_per_node=arguments.gpus_per_node,
            strategy=arguments.layout,
            tp=arguments.tp,
            pp=arguments.pp,
            ep=arguments.ep,
            shards=arguments.shards,
            one_replica=arguments.one_replica,
        ),
        storage=_storage(arguments),
        numbers=PlanNumbers(**numbers),
        mode=arguments.mode,
        mtbf=None if arguments.mtbf is None else seconds_from("--mtbf", arguments.mtbf),
        save=_save(arguments.save),
        keep={text: policy_from(_policy("--keep", text), "keep") for text in arguments.keep or _KEEPS},
        uploads=_uploads(arguments),
        replicas=arguments.replicas,
        measured=_measured(arguments),
        given=frozenset(numbers),
    )
    plan = make_plan(terms)
    if arguments.picture is not None:
        picture = Path(arguments.picture).expanduser()
        refuse_file_of_a_root("--picture", picture)
        draw_plan(plan, picture)
    return Outcome(fields=plan_record(plan), parts=_parts(plan, arguments.picture))


def _state(arguments: argparse.Namespace, model: ModelShape) -> TrainedState:
    weights = arguments.weights or (model.dtype and dtype_word(model.dtype)) or "bf16"
    return TrainedState(
        optimizer=arguments.optimizer,
        weights=weights,
        master=arguments.master,
        moments=arguments.moments,
        gradients=arguments.gradients,
    )


def _storage(arguments: argparse.Namespace) -> StorageProfile:
    changes: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("rate_of", "commit_seconds", "gb_month", "put_price", "get_price", "egress")
    }
    for option, name in (("write_gbps", "write"), ("read_gbps", "read")):
        text = getattr(arguments, option)
        changes[name] = None if text is None else rate_of(option_of(option), text)
    changes["part_bytes"] = parse_size("--part-bytes", arguments.part_bytes)
    return with_storage(find_storage(arguments.storage), changes)


def _numbers(arguments: argparse.Namespace) -> dict[str, float]:
    """Return the numbers that were given."""
    given = {each.name: getattr(arguments, each.name) for each in fields(PlanNumbers)}
    return {name: _number(name, text) for name, text in given.items() if text is not None}


def _number(name: str, text: str) -> float:
    if name in _RATES:
        return rate_of(option_of(name), text)
    if name in _SECONDS and text.strip("0. "):
        return seconds_from(option_of(name), text)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{option_of(name)} must be a number, not {text!r}") from None


def _measured(arguments: argparse.Namespace) -> dict[str, float]:
    known = {name: getattr(arguments, name) for name in _MEASURED}
    found = {name: seconds_from(option_of(name), text) for name, text in known.items() if text is not None}
    if arguments.size is not None:
        found["size_bytes"] = float(parse_size("--size", arguments.size) or 0)
    if arguments.optimizer_bytes is not None:
        found["optimizer_bytes"] = _number("optimizer_bytes", arguments.optimizer_bytes)
    return found


def _save(text: str) -> Any:
    """Return seconds, a policy, or None for the optimum."""
    if text == _OPTIMUM:
        return None
    if not text.lstrip().startswith(("{", "[")):
        return seconds_from("--save", text)
    return policy_from(_policy("--save", text), "save")


def _policy(option: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return parse_yaml(text, option)


def _parts(plan: CostPlan, picture: str | None) -> list[str | Table]:
    terms = plan.terms
    model, layout = terms.model, terms.layout
    parts: list[str | Table] = [
        f"{model.name}: {model.parameters:,} parameters ({model.source})",
        f"{layout.words}; storage: {terms.storage.name}",
        "",
        _component_table(plan),
        f"each rank holds {size_text(plan.held_bytes)}; {layout.writers:,} ranks write "
        f"{size_text(plan.written_bytes)} each",
        "",
        _time_table(plan),
        "",
        _interval_table(plan),
        "",
        *_month_lines(plan),
        Table(
            columns=("KEEP", "CHECKPOINTS", "MOST", "ON AVERAGE", "STORAGE", "REQUESTS", "EGRESS"),
            rows=[_retention_row(each) for each in plan.retention],
        ),
        *_upload_tables(plan.uploads),
        "",
        "assumed:",
        Table(
            columns=("WHAT", "VALUE", "SOURCE", "OPTION"),
            rows=[tuple(each) for each in plan.assumptions],
        ),
    ]
    return [*parts, f"picture: {picture}"] if picture is not None else parts


def _component_table(plan: CostPlan) -> Table:
    parameters = plan.terms.model.parameters
    total = plan.size_bytes
    rows = [
        (each.name, size_text(each.size_bytes), f"{each.size_bytes / parameters:.3g}", each.detail)
        for each in plan.components
    ]
    computed = sum(each.size_bytes for each in plan.components)
    detail = "" if total == computed else "as given"
    return Table(
        columns=("COMPONENT", "SIZE", "BYTES PER PARAMETER", "WHAT"),
        rows=[*rows, ("checkpoint", size_text(total), f"{plan.bytes_per_parameter:.3g}", detail)],
    )


def _time_table(plan: CostPlan) -> Table:
    times, writers = plan.times, plan.terms.layout.writers
    rate = f"{size_text(times.write_rate)}/s, {size_text(times.write_rate / writers)}/s for each writer"
    return Table(
        columns=("TIME OF A SAVE", "", "WHAT"),
        rows=[
            ("stall", seconds_text(times.stall), f"training is blocked ({plan.terms.mode})"),
            ("durable", seconds_text(times.durable), f"from the decision to the commit, at {rate}"),
            ("cost", seconds_text(times.cost), "training time lost, with slowdown"),
            ("restore", seconds_text(times.restore), "a load after a failure"),
        ],
    )


def _interval_table(plan: CostPlan) -> Table:
    step = plan.terms.numbers.step_seconds

    def row(name: str, interval: float) -> tuple[str, ...]:
        loss = plan.overhead_at(interval)
        steps = f"{interval / step:,.0f}"
        return name, seconds_text(interval), steps, share_text(loss), share_text(1 - loss)

    best, planned = plan.recommended, plan.month.interval
    rows = [row("recommended", best), row("half of it", best / 2), row("twice", 2 * best)]
    rows += [row("planned", planned)] if plan.terms.save is not None else []
    return Table(columns=("INTERVAL", "", "STEPS", "OVERHEAD", "GOODPUT"), rows=rows)


def _month_lines(plan: CostPlan) -> Sequence[str]:
    month = plan.month
    return (
        f"in 30 days: {month.count:,} saves, one in {seconds_text(month.interval)}, "
        f"{size_text(month.written_bytes)} written; {month.failures:,.1f} failures, one in "
        f"{seconds_text(plan.mtbf)}",
        f"GPUs: {dollars_text(month.idle_dollars)} while they stall ({share_text(month.stalled)} of the "
        f"time), {dollars_text(month.lost_dollars)} for all that is lost ({share_text(month.overhead)})",
    )


def _upload_tables(uploads: Sequence[UploadCost]) -> Sequence[str | Table]:
    if not uploads:
        return ()
    times = Table(
        columns=("UPLOAD TO", "EVERY", "TAKES", "THERE AFTER", "RATE", "OPTIMAL(TIER=UPLOAD)", "OVERHEAD"),
        rows=[
            (
                each.upload.name,
                f"{each.upload.every:,}",
                seconds_text(each.times.upload),
                seconds_text(each.times.uploaded),
                f"{size_text(each.times.rate)}/s",
                seconds_text(each.losses.interval),
                share_text(each.overhead),
            )
            for each in uploads
        ],
    )
    kept = Table(
        columns=("UPLOADS", "KEEP", "CHECKPOINTS", "MOST", "ON AVERAGE", "STORAGE", "REQUESTS", "EGRESS"),
        rows=[(f"{each.count:,} to {each.upload.name}", *_retention_row(each.retention)) for each in uploads],
    )
    note = "overhead: if every failure leaves this tier only, at the interval planned"
    return ("", times, note, "", kept)


def _retention_row(cost: RetentionCost) -> tuple[str, ...]:
    return (
        cost.kept.policy,
        f"{cost.kept.at_end:,}",
        size_text(cost.peak_bytes),
        size_text(cost.mean_bytes),
        dollars_text(cost.storage_dollars),
        dollars_text(cost.request_dollars),
        dollars_text(cost.egress_dollars),
    )
