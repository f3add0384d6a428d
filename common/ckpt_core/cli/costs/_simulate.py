"""`simulate`: what a save policy costs, over many runs with failures."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ckpt_core.cadence import FailureRate, expected_overhead, optimal_interval
from ckpt_core.cli._arguments import Commands
from ckpt_core.cli._outcome import Outcome, Table
from ckpt_core.cli._progress_line import ProgressLine
from ckpt_core.errors import ConfigError
from ckpt_core.journal import failure_rate
from ckpt_core.options import parse_yaml, policy_from
from ckpt_core.validation import duration, seconds_of

if TYPE_CHECKING:  # needs numpy, which takes a tenth of a second to import
    from ckpt_core.simulation import FailureTrace, LearnedRate, SimulatedJob, Study

_TRACES: Final = ("exponential", "weibull", "llama3")
_DEFAULT_SAVE: Final = "optimal: true"
_JOB: Final = {
    "work": ("30d", "training time without a save or a failure"),
    "step": ("1s", "time of one step"),
    "stall": ("0s", "time for which a save blocks training"),
    "slowdown": ("0s", "further training time that one save costs while it is in flight"),
    "durable": (
        None,
        "time from the decision to save until the root has the checkpoint (default: the stall)",
    ),
    "uploaded": (None, "time until the upload tier has it"),
    "down": ("0s", "time from a failure until the job runs again"),
    "restore": ("0s", "time to load a checkpoint"),
    "restore-upload": (None, "time to load it from the upload tier (default: the same)"),
}


def add(commands: Commands, shared: argparse.ArgumentParser) -> None:
    """Add the command's parser."""
    command = commands.add_parser(
        "simulate",
        parents=[shared],
        help="try save policies on a job that fails, before it runs",
        description="Runs a job through failures many times, with the real save policies, and shows where "
        "the time goes. Durations are seconds, or such as 90s, 5m, 6h, 2d. All policies meet "
        "the same failures.",
    )
    command.add_argument(
        "--save",
        action="append",
        default=[],
        metavar="POLICY",
        help="when to save, in YAML or JSON as in the options, e.g. 'every_seconds: 600'; may be repeated "
        f"to compare several ('{_DEFAULT_SAVE}')",
    )
    command.add_argument("--keep", metavar="POLICY", help="what to keep, likewise, e.g. 'latest: 3'")
    failures = command.add_argument_group("failures")
    failures.add_argument(
        "--trace",
        default="exponential",
        metavar="TRACE",
        help=f"one of {', '.join(_TRACES)}, or a CSV file with a column `time` (of each failure: ISO 8601 or "
        "Unix seconds) or `seconds` (from each to the next)",
    )
    failures.add_argument("--mtbf", type=_seconds, help="mean time between failures of the whole job")
    failures.add_argument("--shape", type=float, default=0.7, help="of the Weibull distribution (0.7)")
    failures.add_argument("--devices", type=int, help="accelerators of the job, for llama3 and --learn")
    failures.add_argument(
        "--learn",
        action="store_true",
        help="let policies learn the rate of failures, as a root does; else they know it from the start",
    )
    failures.add_argument(
        "--node-loss",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of failures after which only the upload tier is left (0)",
    )
    _add_job(command)
    command.add_argument("--runs", type=int, default=100, help="how many (100)")
    command.add_argument("--seed", type=int, default=0, help="of the random numbers (0)")
    command.set_defaults(command=run, place="")


def _add_job(command: argparse.ArgumentParser) -> None:
    job = command.add_argument_group("the job")
    job.add_argument(
        "--spread",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="stall, slowdown and durable are medians, which two of three saves miss by this factor at most; "
        "what each costs is drawn from a logarithmic normal distribution (1: all cost the same)",
    )
    for name, (default, text) in _JOB.items():
        shown = text if default is None else f"{text} ({default})"
        job.add_argument(f"--{name}", type=_seconds, default=default, help=shown)
    job.add_argument("--tokens-per-step", type=int, help="for `every_tokens`")
    job.add_argument("--steps-per-epoch", type=int, help="for `every_epochs`")


def run(arguments: Namespace) -> Outcome:
    """Simulate each policy on the same failures."""
    from ckpt_core.simulation import Scenario, simulate

    policies = {text: _policy(text, "save") for text in arguments.save or [_DEFAULT_SAVE]}
    keep = None if arguments.keep is None else _policy(arguments.keep, "keep")
    job, trace = _job(arguments), _trace(arguments)
    scenario = Scenario(job=job, trace=trace, learned=_learned(arguments, trace))
    found: dict[str, Study] = {}
    with ProgressLine("simulating", len(policies) * arguments.runs, unit="runs") as progress:
        for text, policy in policies.items():
            found[text] = simulate(
                policy,
                scenario,
                runs=arguments.runs,
                seed=arguments.seed,
                keep=keep,
                done=lambda: progress.add(1),
            )
    formula = _formula(job, trace)
    return Outcome(
        fields={
            "mtbf_seconds": trace.mtbf,
            "runs": arguments.runs,
            "seed": arguments.seed,
            "formula": formula,
            "policies": [{"save": text, **_fields(study)} for text, study in found.items()],
        },
        parts=[
            f"{arguments.runs} runs of {job.work / 3600:.6g} h of training, "
            f"one failure in {trace.mtbf / 3600:.4g} h",
            _table(found),
            f"By the formula {formula['interval_seconds']:.4g} s between saves cost least: goodput "
            f"{100 * formula['goodput']:.2f} %",
        ],
    )


def _job(arguments: Namespace) -> SimulatedJob:
    from ckpt_core.simulation import SimulatedJob

    return SimulatedJob(
        work=arguments.work,
        step=arguments.step,
        stall=arguments.stall,
        slowdown=arguments.slowdown,
        durable=arguments.stall if arguments.durable is None else arguments.durable,
        uploaded=arguments.uploaded,
        node_loss=arguments.node_loss,
        spread=arguments.spread,
        down=arguments.down,
        restore=arguments.restore,
        restore_upload=arguments.restore_upload,
        tokens_per_step=arguments.tokens_per_step,
        steps_per_epoch=arguments.steps_per_epoch,
    )


def _trace(arguments: Namespace) -> FailureTrace:
    """Return the failures that the arguments name.

    Raises:
        ConfigError: they name none, or leave out what those need.
    """
    from ckpt_core.simulation import (
        LLAMA_3_DEVICE_SECONDS,
        ExponentialFailures,
        WeibullFailures,
        failures_from_csv,
    )

    name, mtbf, devices = arguments.trace, arguments.mtbf, arguments.devices
    if name == "llama3":
        if devices is None or devices < 1:
            raise ConfigError("--trace llama3 needs --devices, from 1 on: one failure in 50,700 h of each")
        return ExponentialFailures(LLAMA_3_DEVICE_SECONDS / devices)
    if name not in _TRACES:
        return failures_from_csv(Path(name))
    if mtbf is None:
        raise ConfigError(f"--trace {name} needs --mtbf, e.g. --mtbf 6h")
    return ExponentialFailures(mtbf) if name == "exponential" else WeibullFailures(mtbf, arguments.shape)


def _learned(arguments: Namespace, trace: FailureTrace) -> LearnedRate:
    """Return what policies believe about the rate of failures.

    Raises:
        ConfigError: it is to be learned, and depends on an unknown number of devices.
    """
    devices = arguments.devices
    if not arguments.learn:
        rate = FailureRate(trace.mtbf, "of the trace")
        return lambda _failures, _seconds: rate
    if devices is None or devices < 1:
        raise ConfigError("--learn needs --devices, from 1 on: what is believed at first is a rate of each")
    return lambda failures, seconds: failure_rate(
        [{"kind": "summary", "failures": failures, "seconds": seconds, "device_seconds": devices * seconds}],
        devices,
    )


def _formula(job: SimulatedJob, trace: FailureTrace) -> dict[str, float]:
    cost = job.stall + job.slowdown
    interval = optimal_interval(cost=cost, durable=job.durable, mtbf=trace.mtbf)
    overhead = expected_overhead(
        interval, cost=cost, durable=job.durable, mtbf=trace.mtbf, restart=job.down + job.restore
    )
    return {"interval_seconds": interval, "goodput": 1 - overhead}


def _fields(study: Study) -> dict[str, Any]:
    from ckpt_core.simulation import PARTS

    return {
        "goodput": study.goodput,
        "goodput_95": list(study.interval),
        "shares": {part: study.share(part) for part in PARTS if part != "useful"},
        "saves": study.mean("saves"),
        "failures": study.mean("failures"),
        "wall_seconds": study.mean("wall"),
        "most_kept": study.most_kept,
    }


def _table(found: dict[str, Study]) -> Table:
    columns = (
        "SAVE",
        "GOODPUT %",
        "95 %",
        "STALL",
        "SLOWDOWN",
        "LOST",
        "RESTORE",
        "DOWN",
        "SAVES",
        "FAILURES",
    )
    rows: list[tuple[str, ...]] = []
    counted = any(study.most_kept is not None for study in found.values())
    for text, study in found.items():
        shares = [
            f"{100 * study.share(part):.3f}" for part in ("stall", "slowdown", "lost", "restore", "down")
        ]
        margin = 50 * (study.interval[1] - study.interval[0])
        numbers = [f"{100 * study.goodput:.2f}", f"±{margin:.2f}", *shares]
        numbers += [f"{study.mean('saves'):.0f}", f"{study.mean('failures'):.1f}"]
        rows.append((text, *numbers, *([str(study.most_kept)] if counted else [])))
    return Table(columns=(*columns, *(["KEPT"] if counted else [])), rows=rows)


def _policy(text: str, kind: str) -> Any:
    """Read a policy; JSON needs no YAML."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = parse_yaml(text, f"--{kind}")
    return policy_from(value, kind)


def _seconds(text: str) -> float:
    """Parse an argument that is a duration, 0 included."""
    try:
        value = float(text)
    except ValueError:
        value = seconds_of(text)
    if duration("it", value, minimum=0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, nor such as 90s, 5m, 6h, 2d")
    return float(value)
