"""`ckpt cp`, and a demotion, killed at every request to the bucket that they write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from tests.reliability import forks
from tests.reliability.copies import demotions
from tests.reliability.copies.cases import STEP, Point, copied, digest, look, make_source, outcome_of
from tests.reliability.disk.traps import When
from tests.reliability.objects.jobs import BUCKET, MIB, Service, assert_clean, fault_at, service, sweep_away
from tests.reliability.outcome import Choice, Outcome, seen

_SWEEP: Final = "ckpt cp to S3, killed"
_DEMOTION: Final = "a demotion in S3, killed"
_READS: Final = {"GET", "HEAD"}
_BEFORE: Final[tuple[When, ...]] = ("before",)
_BOTH: Final[tuple[When, ...]] = ("before", "after")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Acts:
    """What is killed in a root: what it finds there, what it does, and what must be true then."""

    sweep: str
    make: Callable[[str], None]
    act: Callable[[str], None]
    look: Callable[[str], int]


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every request, or at the chosen ones."""
    source = folder / "source"
    forks.forked(lambda _tell: make_source(source))
    before = digest(source)
    with service() as found:
        copy = _Acts(
            sweep=_SWEEP,
            make=lambda _root: None,
            act=lambda root: copied(source, f"s3://{BUCKET}/{root}", _options(found, "copier")),
            look=lambda root: _looked(found, root, source, before),
        )
        demotion = _Acts(
            sweep=_DEMOTION,
            make=lambda root: demotions.make_run(found.storage(root)),
            act=lambda root: demotions.demote(found.storage(root, "copier")),
            look=lambda root: demotions.look(found.storage(root)),
        )
        for acts in (each for each in (copy, demotion) if choice.may_name(each.sweep)):
            for number, point in enumerate(choice.of(_points(found, acts))):
                yield _case(found, point, acts, f"{acts.sweep.split()[1]}-{number}")


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


def _points(found: Service, acts: _Acts) -> list[Point]:
    """Every request, from a rehearsal."""
    forks.forked(lambda _tell: acts.make("rehearsal"))
    begun = len(found.control.log())
    forks.answer(lambda: acts.act("rehearsal"))
    log = [each for each in found.control.log(begun) if each.who == "copier" and "rehearsal/" in each.target]
    forks.forked(lambda _tell: sweep_away(found, "rehearsal"))
    return [
        Point(sweep=acts.sweep, number=number, when=when, label=f"{request.method} {request.target}")
        for number, request in enumerate(log)
        for when in (_BEFORE if request.method in _READS else _BOTH)
    ]


def _looked(found: Service, root: str, source: Path, before: str) -> int:
    target, options = f"s3://{BUCKET}/{root}", _options(found, "inspector")
    resumed = look(found.storage(root), source, before, target, options)
    assert_clean(found, root, STEP)
    return resumed


def _case(found: Service, point: Point, acts: _Acts, root: str) -> Outcome:
    forks.forked(lambda _tell: acts.make(root))
    begin = forks.Gate()

    def be(_rank: int, tell: forks.Tell) -> None:
        begin.wait()
        acts.act(root)
        tell("copied")

    with forks.ranks(1, be) as children:
        action = "kill" if point.when == "before" else "kill_after"
        pids = [children[0].pid]
        found.control.set(fault_at(root, action=action, who="copier", nth=point.number, count=1, pids=pids))
        begin.open()
        forks.gather(children)
    begin.discard()
    found.control.clear()
    resumed, problem = seen(lambda: acts.look(root))
    forks.forked(lambda _tell: sweep_away(found, root))
    problem = problem or ("" if children[0].killed else f"not killed: {children[0].told}")
    return outcome_of(point, children[0], resumed, problem)
