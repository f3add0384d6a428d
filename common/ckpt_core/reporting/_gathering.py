"""From the journal and the manifests of a root to what a report knows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

from ckpt_core.commit import Catalog, Survey
from ckpt_core.disclosure import public_url
from ckpt_core.journal import Record, read_events, read_history
from ckpt_core.reporting._advice import advice
from ckpt_core.reporting._optimum_of_root import optimum_of
from ckpt_core.reporting._report_values import A_DAY, Balance, Report, RunFacts, Spread, clock_of
from ckpt_core.storage import Storage

_KINDS: Final = ("save", "load", "upload", "prune", "retention", "cadence")
_MEASURES: Final = ("stall_seconds", "slowdown_seconds", "durable_seconds", "uploaded_seconds", "size_bytes")
_ENDS: Final = frozenset({"end", "preempted", "unclean"})


def report_of(storage: Storage, now: float) -> Report:
    """Report on a root, as far as its journal and its manifests know it.

    Args:
        storage: the root.
        now: Unix time, which the report bears.

    Raises:
        OSError: storage failed.
    """
    history, found = read_history(storage), read_events(storage)
    survey = Catalog(storage).survey()
    return assemble(public_url(storage.url), now, history, found, survey=survey)


def assemble(
    root: str, now: float, history: Sequence[Record], found: Sequence[Record], *, survey: Survey
) -> Report:
    """Make a report of records and of the checkpoints there."""
    events = {kind: [each for each in found if each["kind"] == kind] for kind in _KINDS}
    runs = _runs([*history, *found])
    older = next((each for each in history if each["kind"] == "summary"), None)
    spreads = {name: spread for name in _MEASURES if (spread := Spread.of(_values(_done(events), name)))}
    report = Report(
        root=root,
        made=now,
        runs=runs,
        events=events,
        older=older,
        checkpoints=survey.everything,
        unreadable=sorted(survey.unreadable),
        spreads=spreads,
        balance=_balance(runs, events),
        optimum=optimum_of(history, events, runs),
        unknown=(),
        advice=(),
    )
    report = replace(report, unknown=_unknown(report))
    return replace(report, advice=advice(report))


def _done(events: Mapping[str, Sequence[Record]]) -> list[Record]:
    """Return the saves that were committed."""
    return [each for each in events["save"] if each.get("outcome") == "committed"]


def _values(records: Iterable[Record], name: str) -> list[float]:
    return [float(each[name]) for each in records if each.get(name) is not None]


def _runs(records: Sequence[Record]) -> list[RunFacts]:
    """Return the runs, the earliest first."""
    of_run: dict[str, dict[str, Record]] = {}
    for each in records:
        if each["kind"] != "summary" and each["run"]:
            of_run.setdefault(each["run"], {})[json.dumps(each, sort_keys=True)] = (
                each  # both files have some
            )
    runs = [_run(run, list(own.values())) for run, own in of_run.items()]
    return sorted(runs, key=lambda run: (run.begin or 0.0, run.run))


def _run(run: str, records: Sequence[Record]) -> RunFacts:
    events = [each for each in records if each["kind"] == "run"]
    # The next run writes that one died: that is no sign of life.
    alive = [each for each in records if each.get("event") != "unclean"]
    times = sorted(t for each in alive if (t := clock_of(each)) is not None)
    ends = [each for each in events if each.get("event") in _ENDS]
    # A forced end and a record of it by the next run: what the run itself wrote counts.
    ends.sort(key=lambda each: each.get("event") == "unclean")
    end = ends[0] if ends else None
    progress = sorted(_values(records, "training_seconds"))
    known = [*progress, *_values(ends[:1], "seconds")]
    has_start = any(each.get("event") in {"start", "resume"} for each in events)
    steps = sorted(
        each["step"] for each in records if each["kind"] != "load" and each.get("step") is not None
    )
    devices = [each["devices"] for each in events if each.get("devices") is not None]
    losses = [*ends[:1], *(each for each in events if each.get("event") == "resume")]
    covered = max(known, default=0.0) - (0.0 if has_start else min(known, default=0.0))
    has_events = any(each["kind"] != "run" for each in records)
    return RunFacts(
        run=run,
        begin=times[0] if times else None,
        until=times[-1] if times else None,
        end="" if end is None else str(end["event"]),
        first_step=steps[0] if steps else None,
        last_step=steps[-1] if steps else None,
        devices=max(devices, default=None),
        seconds=max(known, default=None),
        covered=max(0.0, covered) if has_events else 0.0,
        lost_steps=int(sum(_values(losses, "lost_steps"))),
        lost_seconds=sum(_values(losses, "lost_seconds")),
        exact=end is not None and end["event"] != "unclean",
    )


def _balance(runs: Sequence[RunFacts], events: Mapping[str, Sequence[Record]]) -> Balance:
    covered = {run.run for run in runs if run.covered}
    saves = [each for each in events["save"] if each["run"] in covered]
    loads = [each for each in events["load"] if each["run"] in covered]
    down = sum(
        max(0.0, later.begin - run.until)
        for run, later in pairwise(run for run in runs if run.begin is not None)
        if run.end == "unclean" and run.until is not None and later.begin is not None
    )
    return Balance(
        covered=sum(run.covered for run in runs),
        stall=sum(_values(saves, "stall_seconds")),
        slowdown=sum(_values(saves, "slowdown_seconds")),
        lost=sum(run.lost_seconds for run in runs if run.run in covered),
        loading=sum(_values(loads, "seconds")),
        down=down,
        exact=all(run.exact for run in runs if run.covered),
    )


def _unknown(report: Report) -> list[str]:
    """Say what this report cannot know, and why."""
    found: list[str] = []
    known = {each.get("name") for each in report.events["save"]}
    earlier = [each.name for each in report.checkpoints if each.name not in known]
    if not report.runs and report.older is None:
        found.append(
            "This root has no journal: it was written with journal=False, or by an older version. What saves "
            "cost, what was lost and what retention deleted is not known; only what is in the root now."
        )
    elif earlier:
        found.append(
            f"{len(earlier):,} of {len(report.checkpoints):,} checkpoints have no event in the journal: they "
            "are older than its oldest part, or were copied here. Their times and costs are not known."
        )
    if (bare := [run for run in report.runs if not run.covered]) and report.runs:
        found.append(
            f"{len(bare):,} of {len(report.runs):,} runs have no measured time of training in the events "
            "that are left. The goodput is that of the others."
        )
    if report.older is not None:
        found.append(
            f"{report.older.get('runs') or 0:,} older runs are known only in sum: "
            f"{report.older.get('unclean') or 0:,} of them ended unclean."
        )
    times = [clock_of(each) for kind in report.events.values() for each in kind]
    if any(time is None or time > report.made + A_DAY for time in times):
        found.append("Some records have no credible time; they are counted, but not on the time line.")
    if report.unreadable:
        found.append(f"The markers of {len(report.unreadable):,} directories cannot be read: see `ckpt ls`.")
    return found
