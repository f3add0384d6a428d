"""Every fault of an S3 service at every part of a job's life, on one rank or all, and what became of it."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, final

from ckpt_core import CheckpointError, CheckpointManager, KeepLatest, SaveError
from ckpt_core.storage import Storage
from tests.reliability import forks
from tests.reliability.objects.jobs import BUCKET, Service, inspect, state_of, sweep_away, values
from tests.reliability.outcome import Choice, Outcome, seen
from tests.support.service_faults import ServiceFault

DEADLINE_SECONDS: Final = 12.0
_REQUEST_SECONDS: Final = DEADLINE_SECONDS / 3
# Beyond the deadline this is a hang; a busy machine may need some of it.
_GRACE_SECONDS: Final = 30.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """What the service does.

    Attributes:
        name: for people.
        fault: as a `ServiceFault`; its target is set for each case.
        told: pattern of what the error must say if the trouble lasts.
        reads_only: whether only answers to reads are touched.
    """

    name: str
    fault: ServiceFault
    told: str
    reads_only: bool = False


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What the requests are for.

    Attributes:
        name: for people.
        act: what the job does meanwhile: `save`, `load` or `resume`.
        method: pattern of the requests' methods.
        path: of the requests, after the bucket; `{root}` stands for the root.
        error: which error says so; "" if the job gets none, because it can do without.
    """

    name: str
    act: str
    method: str
    path: str
    error: str


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One cell of the matrix."""

    trouble: Trouble
    target: Target
    lasts: bool
    world_size: int = 1
    who: str = "*"

    def __str__(self) -> str:
        return f"{self.sweep}: {self.label}"

    @property
    def sweep(self) -> str:
        """The row of the table."""
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks, on {self.who}"
        return f"S3 faults that {'last' if self.lasts else 'pass'}, {ranks}"

    @property
    def label(self) -> str:
        """What happened where."""
        return f"{self.trouble.name}, {self.target.name}"

    @property
    def must_succeed(self) -> bool:
        """Whether nobody may be told of an error."""
        return not self.lasts or not self.target.error


_FAILED: Final = "the object store failed|the object store did not answer"
_SILENT: Final = f"no answer from the object store within|{_FAILED}"
TROUBLES: Final = (
    Trouble(name="500", fault=ServiceFault(action="error", code="InternalError"), told=_FAILED),
    Trouble(name="503", fault=ServiceFault(action="error", code="ServiceUnavailable"), told=_FAILED),
    Trouble(name="SlowDown", fault=ServiceFault(action="error", code="SlowDown"), told=_FAILED),
    Trouble(name="connection reset", fault=ServiceFault(action="drop"), told=_SILENT),
    Trouble(name="answer lost", fault=ServiceFault(action="lose"), told=_SILENT),
    Trouble(name="no answer", fault=ServiceFault(action="hang"), told=_SILENT),
    Trouble(
        name="answer cut short",
        fault=ServiceFault(action="truncate"),
        told=f"{_SILENT}|ends at byte|cannot be read",
        reads_only=True,
    ),
)
REFUSALS: Final = (
    Trouble(
        name="credentials expired",
        fault=ServiceFault(action="error", code="ExpiredToken"),
        told="credentials of this job have expired; renew them",
    ),
    Trouble(
        name="access denied", fault=ServiceFault(action="error", code="AccessDenied"), told="access refused"
    ),
)
_SAVED: Final = "{root}/step-000000002"
TARGETS: Final = (
    Target(name="data", act="save", method="P*", path=f"/{_SAVED}/__*", error="SaveError"),
    Target(name="manifest", act="save", method="PUT", path=f"/{_SAVED}/manifest.json", error="SaveError"),
    Target(name="marker", act="save", method="PUT", path=f"/{_SAVED}/COMMITTED", error="SaveError"),
    Target(
        name="lease", act="save", method="[GH]E*", path="/{root}/.ckpt-suite/writer.json", error="SaveError"
    ),
    Target(name="prune", act="save", method="DELETE", path="/{root}/step-000000001/*", error=""),
    Target(name="load", act="load", method="GET", path="/{root}/step-000000001/__*", error="LoadError"),
    Target(
        name="claim", act="resume", method="PUT", path="/{root}/.ckpt-suite/writer.json", error="ConfigError"
    ),
    Target(
        name="list on resume",
        act="resume",
        method="GET",
        path="[?]list-type=2&prefix={root}/&*",
        error="ConfigError",
    ),
)


def cases() -> list[Case]:
    """The whole matrix."""
    found = [
        Case(trouble=trouble, target=target, lasts=lasts, world_size=world_size, who=who)
        for trouble, target, lasts, (world_size, who) in itertools.product(
            TROUBLES + REFUSALS, TARGETS, (False, True), ((1, "*"), (2, "rank1"), (2, "*"))
        )
        if not (trouble.reads_only and target.name not in {"load", "lease", "list on resume"})
        and not (trouble in REFUSALS and not lasts)  # refusals are not tried again
    ]
    # On a rank that is not the coordinator there are only data and loads.
    return [case for case in found if case.who != "rank1" or case.target.name in {"data", "load"}]


def faults(found: Service, choice: Choice) -> Iterator[Outcome]:
    """One case after another, each in a root of its own; all of them, or the chosen ones."""
    for number, case in enumerate(choice.of(cases())):
        yield meet(found, case, f"fault-{number}")


def meet(found: Service, case: Case, root: str) -> Outcome:
    """Save step 1 in peace, meet the fault, be rid of it, save again; then a fresh process looks."""
    begin, end = forks.Gate(), forks.Gate()

    def be(rank: int, tell: forks.Tell) -> None:
        _live(found.storage(root, f"rank{rank}", request_seconds=_REQUEST_SECONDS), case, begin, end, tell)

    with forks.ranks(case.world_size, be) as ranks:
        for child in ranks:
            assert child.hear(0) == "ready", f"{case}: {child.hear(0)}"
        target = f"/{BUCKET}" + case.target.path.format(root=root)
        details = {"method": case.target.method, "target": target, "who": case.who}
        # Two tries, of which one fails.
        count = None if case.lasts else 1
        found.control.set(_like(case.trouble.fault, count=count, **details))
        begin.open()
        told = [child.hear(1) for child in ranks]
        met = [request for request in found.control.log() if request.faults and f"{root}/" in request.target]
        found.control.clear()
        found.control.release()
        end.open()
        forks.gather(ranks)
    for gate in (begin, end):
        gate.discard()
    later = [child.told for child in ranks]
    acknowledged = 3 if all(answer[-1:] == ["saved 3"] for answer in later) else 1
    resumed, broken = seen(partial(inspect, found, root, acknowledged, columns=8))
    forks.forked(lambda _tell: sweep_away(found, root))
    problem = _problem(case, told, later) or broken
    return Outcome(
        sweep=case.sweep,
        point=case.label,
        acknowledged=acknowledged,
        resumed=resumed,
        problem=problem if met else "the fault was not met, so that this shows nothing",
    )


def _like(fault: ServiceFault, *, count: int | None, **details: str) -> ServiceFault:
    return ServiceFault(action=fault.action, code=fault.code, count=count, **details)


def _problem(case: Case, told: Sequence[dict[str, Any]], later: Sequence[Sequence[Any]]) -> str:
    for rank, answer in enumerate(told):
        problem = _of_answer(case, answer)
        if problem:
            return f"rank {rank}: {problem}"
    broken = [answer for answer in later if answer[-1:] != ["saved 3"]]
    return f"once the fault was gone: {broken[0]}" if broken else ""


def _of_answer(case: Case, answer: dict[str, Any]) -> str:
    if answer.get("seconds", 0) > DEADLINE_SECONDS + _GRACE_SECONDS:
        return f"told only after {answer['seconds']:.0f} s"
    if "error" in answer:
        return str(answer["error"])
    failed = answer["failed"]
    if case.must_succeed:
        return f"should have succeeded: {failed}" if failed else ""
    if not failed:
        # What was done although nobody was told may be found out later.
        return "" if case.trouble.fault.action == "lose" else "nobody was told"
    as_documented = re.match(case.target.error, failed) and re.search(case.trouble.told, failed)
    return "" if as_documented else f"not the documented error: {failed}"


def _live(storage: Storage, case: Case, begin: forks.Gate, end: forks.Gate, tell: forks.Tell) -> None:
    """One rank: in peace, in the fault, in peace again."""

    def manager() -> CheckpointManager:
        return CheckpointManager(
            storage, keep=KeepLatest(1), deadline_seconds=DEADLINE_SECONDS, journal=False
        )

    checkpoints = manager()
    checkpoints.resume(state_of(0))
    _save(checkpoints, 1)
    if case.target.act == "resume":
        checkpoints.close()
        checkpoints = manager()
    tell("ready")
    begin.wait()
    tell(_timed(_ACTS[case.target.act], checkpoints))
    end.wait()
    _save(checkpoints, 3)
    checkpoints.close()
    tell("saved 3")


def _timed(act: Callable[[CheckpointManager], None], checkpoints: CheckpointManager) -> dict[str, Any]:
    started, failed = time.monotonic(), ""
    try:
        act(checkpoints)
    except (CheckpointError, OSError) as error:
        uncertain = isinstance(error, SaveError) and error.in_doubt
        failed = f"{type(error).__name__}: {error}{' [may be committed]' if uncertain else ''}"
    return {"failed": failed, "seconds": time.monotonic() - started}


def _save(checkpoints: CheckpointManager, step: int) -> None:
    handle = checkpoints.save(step, state_of(step))
    assert handle is not None
    try:
        handle.result()
    finally:
        # The failure was told; it is not to be told again.
        _settle(checkpoints)


def _settle(checkpoints: CheckpointManager) -> None:
    try:
        checkpoints.wait()
    except SaveError:
        return


def _load(checkpoints: CheckpointManager) -> None:
    state = state_of(0)
    before = values(state)
    try:
        checkpoints.load(state)
    except CheckpointError:
        assert values(state) == before, "a load that failed has changed the state"
        raise
    assert values(state) == values(state_of(1)), "not what was saved"


def _expect_step_1(step: int | None) -> None:
    assert step == 1, f"resumed from step {step}"


_ACTS: Final[dict[str, Callable[[CheckpointManager], None]]] = {
    "save": lambda checkpoints: _save(checkpoints, 2),
    "load": _load,
    "resume": lambda checkpoints: _expect_step_1(checkpoints.resume(state_of(0))),
}
