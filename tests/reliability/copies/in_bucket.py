"""`ckpt cp` killed at every request to the target's bucket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from tests.reliability import forks
from tests.reliability.copies.cases import STEP, Point, copied, digest, look, make_source, outcome_of
from tests.reliability.disk.traps import When
from tests.reliability.objects.jobs import BUCKET, MIB, Service, assert_clean, fault_at, service, sweep_away
from tests.reliability.outcome import Choice, Outcome, seen

_SWEEP: Final = "ckpt cp to S3, killed"
_READS: Final = {"GET", "HEAD"}
_BEFORE: Final[tuple[When, ...]] = ("before",)
_BOTH: Final[tuple[When, ...]] = ("before", "after")


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every request, or at the chosen ones."""
    source = folder / "source"
    forks.forked(lambda _tell: make_source(source))
    before = digest(source)
    with service() as found:
        for number, point in enumerate(choice.of(_points(found, source))):
            yield _case(found, point, source, before, f"copy-{number}")


def _options(found: Service, who: str) -> list[str]:
    options = {
        "key": who,
        "secret": "testing",
        "endpoint_url": found.endpoint,
        "write_block_bytes": 5 * MIB,
        "request_seconds": 20.0,
    }
    return [
        word for key, value in options.items() for word in ("--storage-option", f"{key}={json.dumps(value)}")
    ]


def _points(found: Service, source: Path) -> list[Point]:
    """Every request, from a rehearsal."""
    begun = len(found.control.log())
    forks.answer(lambda: copied(source, f"s3://{BUCKET}/rehearsal", _options(found, "copier")))
    log = [each for each in found.control.log(begun) if each.who == "copier" and "rehearsal/" in each.target]
    forks.forked(lambda _tell: sweep_away(found, "rehearsal"))
    return [
        Point(sweep=_SWEEP, number=number, when=when, label=f"{request.method} {request.target}")
        for number, request in enumerate(log)
        for when in (_BEFORE if request.method in _READS else _BOTH)
    ]


def _clean(found: Service, root: str) -> int:
    assert_clean(found, root, STEP)
    return STEP


def _case(found: Service, point: Point, source: Path, before: str, root: str) -> Outcome:
    target, begin = f"s3://{BUCKET}/{root}", forks.Gate()

    def be(_rank: int, tell: forks.Tell) -> None:
        begin.wait()
        copied(source, target, _options(found, "copier"))
        tell("copied")

    with forks.ranks(1, be) as children:
        action = "kill" if point.when == "before" else "kill_after"
        pids = [children[0].pid]
        found.control.set(fault_at(root, action=action, who="copier", nth=point.number, count=1, pids=pids))
        begin.open()
        forks.gather(children)
    begin.discard()
    found.control.clear()
    options = _options(found, "inspector")
    resumed, problem = seen(lambda: look(found.storage(root), source, before, target, options))
    if not problem:
        problem = seen(partial(_clean, found, root))[1]
    forks.forked(lambda _tell: sweep_away(found, root))
    problem = problem or ("" if children[0].killed else f"not killed: {children[0].told}")
    return outcome_of(point, children[0], resumed, problem)
