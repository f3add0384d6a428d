"""`ls`: list the checkpoints of a root, or the runs of a directory."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from ckpt_core.cli._arguments import Commands, open_root
from ckpt_core.cli._outcome import Outcome, Table, metrics_text, moment_text, time_text
from ckpt_core.cli._tier_columns import TierColumns, tier_columns
from ckpt_core.commit import Catalog, look_around, replaced
from ckpt_core.errors import PartialCheckpointError
from ckpt_core.hosting import root_of
from ckpt_core.journal import Record, read_events, read_history
from ckpt_core.options import bytes_text
from ckpt_core.reporting import why_kept
from ckpt_core.storage import open_storage
from ckpt_core.types import CheckpointInfo

_MOST_METRICS = 3


def add(commands: Commands, shared: ArgumentParser) -> None:
    """Add the command to those of `ckpt`."""
    command = commands.add_parser("ls", parents=[shared], help="list the committed checkpoints of a root")
    command.add_argument("root", metavar="ROOT", help="path or URL of a run")
    command.add_argument("--tiers", action="store_true", help="ask every place that tiers.json names, too")
    command.add_argument(
        "--tier",
        action="append",
        default=[],
        metavar="URL",
        help="ask this place, with the storage options given; may be repeated",
    )
    command.set_defaults(command=run)


def run(arguments: Namespace) -> Outcome:
    """List the committed checkpoints of a root, and whatever else is there."""
    storage = open_root(arguments.root, arguments.storage_options)
    catalog, survey = Catalog(storage), Catalog(storage).survey()
    tiers, problem = tier_columns(storage, survey, arguments)
    infos, stock_aside = survey.everything, replaced(storage)
    events: list[Record] = []
    with suppress(OSError):  # a journal that cannot be read is no reason to list nothing
        events = read_events(storage)
    why = why_kept(events)
    around = look_around(storage, known=[*survey.unreadable, *(info.name for info in infos)])
    children = [] if infos else [_run_facts(name, arguments) for name in around.runs]
    torn, quarantined = sorted({*catalog.torn(), *around.unmarked}), catalog.quarantined()
    summary = f"{len(infos)} committed in {storage.url}, {bytes_text(sum(i.size_bytes for i in infos))}"
    if children:
        summary = f"{len(children):,} runs in {storage.url}, give one of them as the root"
    return Outcome(
        fields={
            "root": storage.url,
            "checkpoints": [
                asdict(info) | {"created_utc": moment_text(info.created), "kept_as": _kept_as(info, why)}
                for info in infos
            ],
            "unreadable": [
                {"name": name, "problem": str(error)} for name, error in survey.unreadable.items()
            ],
            "torn": torn,
            "quarantined": quarantined,
            "replaced": stock_aside,
            "stock": around.stock,
            "runs": around.runs,
            "children": children,
            "unlisted": around.unlisted,
            **({} if tiers is None else {"tiers": tiers.fields}),
        },
        parts=[
            *_info_table(infos, tiers, why),
            *_run_table(children),
            summary,
            *([] if tiers is None else tiers.lines),
            *([f"further tiers are not known: {problem}"] if problem else []),
            *(f"marked as damaged: {i.name}: {i.damaged}" for i in infos if i.damaged is not None),
            *(f"marked as bad: {i.name}: {i.bad}" for i in infos if i.bad is not None),
            *(f"abandoned: {i.name}" for i in infos if i.abandoned),
            *(_unreadable(name, error) for name, error in survey.unreadable.items()),
            *(f"torn or being written: {name}" for name in torn if name not in around.unmarked),
            *(f"torn, or lost its marker: {name}" for name in around.unmarked),
            *(f"damaged and moved aside: {name}" for name in quarantined),
            *(f"not ours and moved aside: {name}" for name in stock_aside),
            *(f"written by stock DCP, see `ckpt verify`: {name}" for name in around.stock),
            *(f"holds checkpoints of its own: {name}" for name in around.runs if not children),
            *(f"may not be listed by this user: {name}" for name in around.unlisted),
        ],
    )


def _run_facts(name: str, arguments: Namespace) -> dict[str, Any]:
    """Return the newest checkpoint of a run below a directory, and how the run ended."""
    storage = open_storage(f"{root_of(arguments.root).rstrip('/')}/{name}", arguments.storage_options)
    survey = Catalog(storage).survey()
    newest = max(survey.everything, key=lambda info: info.created, default=None)
    last = next((each for each in reversed(read_history(storage)) if each["kind"] == "run"), None)
    ended = None if last is None else last.get("event")
    damaged = sum(info.damaged is not None for info in survey.everything) + len(survey.unreadable)
    return {
        "name": name,
        "step": None if newest is None else newest.step,
        "created": None if newest is None else newest.created,
        "checkpoints": len(survey.everything),
        "size_bytes": sum(info.size_bytes for info in survey.everything),
        "last_event": ended,
        "damaged": damaged,
    }


def _run_table(children: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Return the table of runs below a directory; none without any."""
    rows = [
        (
            each["name"],
            _state_text(each),
            "?" if each["created"] is None else time_text(each["created"]),
            "?" if each["step"] is None else f"{each['step']:,}",
            f"{each['checkpoints']:,}",
            bytes_text(each["size_bytes"]),
        )
        for each in children
    ]
    columns = ("RUN", "STATE", "NEWEST (UTC)", "STEP", "CHECKPOINTS", "SIZE")
    return [Table(columns=columns, rows=rows, figures=3)] if rows else []


def _state_text(each: Mapping[str, Any]) -> str:
    damaged = f", {each['damaged']:,} damaged" if each["damaged"] else ""
    words = {
        "end": "ended",
        "preempted": "preempted",
        "unclean": "died",
        "start": "no end",
        "resume": "no end",
    }
    return f"{words.get(each['last_event'] or '', '?')}{damaged}"


def _unreadable(name: str, error: Exception) -> str:
    if isinstance(error, PartialCheckpointError):
        return f"{error}: {name}"
    return f"marker cannot be read: {name}: {error}"


def _kept_as(info: CheckpointInfo, why: Mapping[int, Sequence[str]]) -> list[str]:
    """Return why a checkpoint stays: as of the last prune, and by what is set now."""
    remarks = {
        f"pinned: {info.pinned}": info.pinned is not None,
        "marked as damaged": info.damaged is not None,
        "marked as bad": info.bad is not None,
        "abandoned": info.abandoned,
    }
    by_policy = why.get(info.step, ()) if info.usable and not info.abandoned else ()
    found = [reason for reason in by_policy if reason != "KeepAll()" and not reason.startswith("pinned: ")]
    return [*found, *(remark for remark, holds in remarks.items() if holds)]


def _info_table(
    infos: Sequence[CheckpointInfo], tiers: TierColumns | None, why: Mapping[int, Sequence[str]]
) -> list[Table]:
    """Return the table of checkpoints; none without any."""
    shown = infos if tiers is None else tiers.united.infos
    columns = [] if tiers is None else tiers.columns
    rules = " ".join({reason for reasons in why.values() for reason in reasons})
    table = Table(
        columns=(
            *("STEP", "NAME", "COMMITTED (UTC)", "SIZE", "RANKS", "METRICS", "KEPT AS"),
            *(column.label for column in columns),
        ),
        rows=[
            (
                str(info.step),
                info.name,
                time_text(info.created),
                bytes_text(info.size_bytes),
                str(info.world_size),
                metrics_text(info.metrics, most=_MOST_METRICS, first=rules),
                ", ".join(_kept_as(info, why)),
                *(column.state(info) for column in columns),
            )
            for info in shown
        ],
    )
    return [table] if shown else []
