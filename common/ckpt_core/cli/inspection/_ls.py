"""`ls`: list the checkpoints of a root and its tiers, or the runs of a directory."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, final

from ckpt_core.cli._arguments import open_root, options_for
from ckpt_core.cli._outcome import Outcome, Table, metrics_text, moment_text
from ckpt_core.commit import Catalog, Owner, Survey, look_around, replaced
from ckpt_core.crew import run_all
from ckpt_core.disclosure import public_url
from ckpt_core.errors import CheckpointError, PartialCheckpointError
from ckpt_core.hosting import root_of
from ckpt_core.journal import Record, read_events, read_history
from ckpt_core.names import WRITER
from ckpt_core.options import bytes_text
from ckpt_core.reporting import moment
from ckpt_core.storage import Storage, open_storage
from ckpt_core.tiers import TierRecord, read_tiers, unite
from ckpt_core.types import CheckpointInfo

_MOST_METRICS: Final = 3
_PATIENCE_SECONDS: Final = 60.0
"""A tier that does not answer must not keep the others from being listed; a request has a third of it."""
_MOST_TIERS: Final = 16
_ENDS: Final = {
    "end": "ended",
    "preempted": "preempted",
    "unclean": "died",
    "start": "no end",
    "resume": "no end",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    """One tier, or the root, which has no record; without a survey if not asked."""

    label: str
    record: TierRecord | None = None
    survey: Survey | None = None
    problem: str = ""
    running: bool = True

    def state(self, info: CheckpointInfo) -> str:
        """Return the state of a checkpoint in this tier, "?" if it is not known."""
        there = () if self.survey is None else self.survey.everything
        found = next((each for each in there if each.save_id == info.save_id), None)
        if found is not None:
            return "committed" if found.damaged is None else "damaged"
        if self.survey is not None and info.name in self.survey.unreadable:
            return "damaged"
        begun = None if self.record is None else self.record.uploading
        if begun is not None and begun.name == info.name:
            word = "uploading" if self.running else "waiting"
            return f"{word} {100 * begun.done_bytes // max(begun.size_bytes, 1)} %"
        if self.record is not None and info.name in self.record.due:
            return "waiting"
        return "?" if self.survey is None else "missing"


def run(arguments: Namespace) -> Outcome:
    storage = open_root(arguments.root, arguments.storage_options)
    catalog, survey = Catalog(storage), Catalog(storage).survey()
    tiers, problem = _tiers(storage, survey, arguments)
    united = unite([each.survey for each in tiers if each.survey is not None]).infos
    infos, aside = survey.everything, replaced(storage)
    events: list[Record] = []
    with suppress(OSError):  # a journal that cannot be read is no reason to list nothing
        events = read_events(storage)
    why = _why_kept(events, storage.url)
    around = look_around(storage, known=[*survey.unreadable, *(info.name for info in infos)])
    children = [] if infos else [_run_facts(name, arguments) for name in around.runs]
    torn = sorted({*catalog.torn(), *around.unmarked})
    summary = f"{len(infos)} committed in {storage.url}, {bytes_text(sum(i.size_bytes for i in infos))}"
    if children:
        summary = f"{len(children):,} runs in {storage.url}, give one of them as the root"
    return Outcome(
        fields={
            "root": storage.url,
            "checkpoints": [
                asdict(info)
                | {"created_utc": moment_text(info.created), "kept_as": _kept_as(info, why)}
                | {"holds": _holds(info)}
                for info in infos
            ],
            "unreadable": [
                {"name": name, "problem": str(error)} for name, error in survey.unreadable.items()
            ],
            "torn": torn,
            "replaced": aside,
            "stock": around.stock,
            "runs": around.runs,
            "children": children,
            "unlisted": around.unlisted,
            **({"tiers": list(_tier_fields(tiers[1:], united))} if tiers else {}),
        },
        parts=[
            *_info_table(united if tiers else infos, tiers, why),
            *_run_table(children),
            summary,
            *_tier_lines(storage.url, tiers[1:]),
            *([f"further tiers are not known: {problem}"] if problem else []),
            *(f"marked as damaged: {i.name}: {i.damaged}" for i in infos if i.damaged is not None),
            *(f"marked as bad: {i.name}: {i.bad}" for i in infos if i.bad is not None),
            *(f"abandoned: {i.name}" for i in infos if i.abandoned),
            *(
                f"{error}: {name}"
                if isinstance(error, PartialCheckpointError)
                else f"marker cannot be read: {name}: {error}"
                for name, error in survey.unreadable.items()
            ),
            *(f"torn or being written: {name}" for name in torn if name not in around.unmarked),
            *(f"torn, or lost its marker: {name}" for name in around.unmarked),
            *(f"moved aside: {name}" for name in aside),
            *(f"written by stock DCP, see `ckpt verify`: {name}" for name in around.stock),
            *(f"holds checkpoints of its own: {name}" for name in around.runs if not children),
            *(f"may not be listed by this user: {name}" for name in around.unlisted),
        ],
    )


def _why_kept(events: Sequence[Record], url: str) -> dict[int, list[str]]:
    """Return why each step stayed at the last prune of a root, or of a tier."""
    place = url if any(each.get("tier") == url for each in events) else "root"
    pruned = [each for each in events if each["kind"] == "retention" and (each["tier"] or "root") == place]
    kept: dict[str, list[int]] = pruned[-1]["kept"] or {} if pruned else {}
    steps = set[int]().union(*kept.values())
    return {step: [reason for reason, those in kept.items() if step in those] for step in steps}


def _run_facts(name: str, arguments: Namespace) -> dict[str, Any]:
    """Return the newest checkpoint of a run below a directory, and how the run ended."""
    storage = open_storage(f"{root_of(arguments.root).rstrip('/')}/{name}", arguments.storage_options)
    survey = Catalog(storage).survey()
    newest = max(survey.everything, key=lambda info: info.created, default=None)
    last = next((each for each in reversed(read_history(storage)) if each["kind"] == "run"), None)
    ended = None if last is None else last.get("event")
    return {
        "name": name,
        "step": None if newest is None else newest.step,
        "created": None if newest is None else newest.created,
        "checkpoints": len(survey.everything),
        "size_bytes": sum(info.size_bytes for info in survey.everything),
        "last_event": ended,
        "damaged": sum(info.damaged is not None for info in survey.everything) + len(survey.unreadable),
    }


def _run_table(children: Sequence[Mapping[str, Any]]) -> list[Table]:
    rows = [
        (
            each["name"],
            _ENDS.get(each["last_event"], "?")
            + (f", {each['damaged']:,} damaged" if each["damaged"] else ""),
            moment(each["created"]),
            "?" if each["step"] is None else f"{each['step']:,}",
            f"{each['checkpoints']:,}",
            bytes_text(each["size_bytes"]),
        )
        for each in children
    ]
    columns = ("RUN", "STATE", "NEWEST (UTC)", "STEP", "CHECKPOINTS", "SIZE")
    return [Table(columns=columns, rows=rows, figures=3)] if rows else []


def _holds(info: CheckpointInfo) -> str:
    return "resumable" if info.weights_of is None else "weights"


def _kept_as(info: CheckpointInfo, why: Mapping[int, Sequence[str]]) -> list[str]:
    """Return why a checkpoint stays: as of the last prune, and by what is set now."""
    remarks = {
        f"pinned: {info.pinned}": info.pinned is not None,
        "marked as damaged": info.damaged is not None,
        "marked as bad": info.bad is not None,
        "abandoned": info.abandoned,
    }
    by_policy = why.get(info.step, ()) if not info.marked and not info.abandoned else ()
    found = [reason for reason in by_policy if reason != "KeepAll()" and not reason.startswith("pinned: ")]
    return [*found, *(remark for remark, holds in remarks.items() if holds)]


def _info_table(
    infos: Sequence[CheckpointInfo], tiers: Sequence[_Column], why: Mapping[int, Sequence[str]]
) -> list[Table]:
    rules = " ".join({reason for reasons in why.values() for reason in reasons})
    columns = ("STEP", "NAME", "COMMITTED (UTC)", "SIZE", "HOLDS", "RANKS", "METRICS", "KEPT AS")
    rows = [
        (
            str(info.step),
            info.name,
            moment(info.created),
            bytes_text(info.size_bytes),
            _holds(info),
            str(info.world_size),
            metrics_text(info.metrics, most=_MOST_METRICS, first=rules),
            ", ".join(_kept_as(info, why)),
            *(column.state(info) for column in tiers),
        )
        for info in infos
    ]
    return [Table(columns=(*columns, *(each.label for each in tiers)), rows=rows)] if rows else []


def _tiers(storage: Storage, survey: Survey, arguments: Namespace) -> tuple[list[_Column], str]:
    """List a root and its tiers, nothing without any; and why they are not known.

    The writer of the root chose them. So none is asked unless the user says so, and only what the user names
    gets options.
    """
    try:
        records, problem = read_tiers(storage), ""
    except (CheckpointError, OSError) as error:
        records, problem = [], str(error)
    named = {
        public_url(url if "://" in url else str(Path(url).absolute())).rstrip("/"): url
        for url in arguments.tier
    }
    urls = {record.url.rstrip("/") for record in records}
    records += [TierRecord(url=url) for url in named if url not in urls]
    if not records:
        return [], problem
    owner = Owner.of(storage)  # no lock is taken: to look must not stop a job from starting
    running = not owner.has_ended if owner and owner.pid else storage.lock_holder(WRITER) is not None
    columns = [_Column(label=each.url, record=each, running=running) for each in records]

    def look(number: int) -> None:
        url = named.get(records[number].url.rstrip("/"))
        if url is None and (not arguments.tiers or number >= _MOST_TIERS):
            return
        options = {} if url is None else options_for(url, arguments)
        place = root_of(url or records[number].url)
        try:
            tier = open_storage(place, options, deadline_seconds=_PATIENCE_SECONDS)
            columns[number] = replace(columns[number], survey=Catalog(tier).survey())
        except (CheckpointError, OSError) as error:
            columns[number] = replace(columns[number], problem=str(error))

    run_all(look, range(len(columns)), _MOST_TIERS, name="ckpt-tier")
    return [_Column(label=storage.url, survey=survey), *columns], problem


def _tier_fields(tiers: Sequence[_Column], infos: Sequence[CheckpointInfo]) -> Iterator[dict[str, Any]]:
    for column in tiers:
        record = column.record or TierRecord(url=column.label)
        yield {
            "url": column.label,
            "every": record.every,
            "due": list(record.due),
            "uploading": None if record.uploading is None else asdict(record.uploading),
            "problem": column.problem or None,
            "checkpoints": [
                {
                    "step": i.step,
                    "name": i.name,
                    "save_id": i.save_id,
                    "state": None if state == "?" else state,
                }
                for i, state in zip(infos, map(column.state, infos), strict=True)
            ],
        }


def _tier_lines(root: str, tiers: Sequence[_Column]) -> list[str]:
    waiting = [t for t in tiers if not t.running and t.record and (t.record.due or t.record.uploading)]
    unasked = [each for each in tiers if each.survey is None and not each.problem]
    return [
        *(f"cannot be reached: {each.label}: {each.problem}" for each in tiers if each.problem),
        *(
            f"waiting, and no job uploads: {each.label}: the next run does, or "
            f"`ckpt upload {root} --to {each.label}`"
            for each in waiting
        ),
        *(
            f"not asked: {each.label}: `ckpt ls {root} --tier {each.label}`, or --tiers for all"
            for each in unasked
        ),
    ]
