"""Compare the phases, list the differences, and print the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table

from examples.demo.evidence import Evidence, Loss, PhaseEvidence
from examples.demo.plan import KILLED, PHASES, RESHARDED, RESUMED, UNINTERRUPTED, Plan

SHOWN_DIFFERENCES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One comparison: its subject, the number of values, and the differences."""

    phase: str
    subject: str
    compared: int
    differences: Sequence[str]

    @property
    def holds(self) -> bool:
        """Return whether values were compared and none differs."""
        return self.compared > 0 and not self.differences


def judge(evidence: Evidence, plan: Plan) -> list[Check]:
    """Compare with the uninterrupted run; on one rank, with the resumed run."""
    killed_at = max(plan.kill_step, last(evidence.killed))
    return [
        _losses(evidence, UNINTERRUPTED, range(1, plan.steps + 1)),
        _losses(evidence, KILLED, range(1, killed_at + 1)),
        _torn(evidence, plan),
        _losses(evidence, RESUMED, range(plan.resume_step + 1, plan.steps + 1)),
        _states(RESUMED, evidence.uninterrupted.state, evidence.resumed.state),
        _states(RESHARDED, evidence.resumed.state, evidence.resharded.state),
    ]


def last(phase: PhaseEvidence) -> int:
    """Return the last step that every rank has done; 0 if none."""
    return phase.steps[-1] if phase.steps else 0


def _losses(evidence: Evidence, phase: str, steps: range) -> Check:
    reference = evidence.uninterrupted
    differences = list(_loss_differences(reference, evidence.phase(phase), steps))
    compared = len(steps) * len(reference.losses)
    return Check(phase=phase, subject="losses", compared=compared, differences=differences)


def _loss_differences(expected: PhaseEvidence, found: PhaseEvidence, steps: range) -> Iterator[str]:
    for rank in expected.losses:
        right, other = _bits(expected.losses[rank]), _bits(found.losses.get(rank, ()))
        for step in steps:
            one, two = right.get(step, "none"), other.get(step, "none")
            if one != two or one == "none":
                yield f"step {step}, rank {rank}: {one} and {two}"
        # The kill reaches ranks at different moments: one may be a step ahead of the others.
        for step in sorted(set(other) - set(steps)):
            if step < steps.start or other[step] != right.get(step):
                yield f"step {step}, rank {rank}: not expected, {other[step]}"


def _bits(losses: Sequence[Loss]) -> dict[int, str]:
    return {loss.step: loss.bits for loss in losses}


def _states(phase: str, expected: Mapping[str, str], found: Mapping[str, str]) -> Check:
    names = sorted(expected.keys() | found.keys())
    differences = [
        f"{name}: {expected.get(name, 'none')} and {found.get(name, 'none')}"
        for name in names
        if expected.get(name) != found.get(name)
    ]
    return Check(phase=phase, subject="tensors", compared=len(names), differences=differences)


def _torn(evidence: Evidence, plan: Plan) -> Check:
    kill = evidence.kill
    problems = []
    if len(kill.torn) != 1 or not kill.torn_bytes:
        problems.append(f"expected one torn save with bytes in it, found {list(kill.torn)}")
    if max(kill.committed, default=0) != plan.resume_step:
        problems.append(f"expected {plan.resume_step} as newest committed step, found {list(kill.committed)}")
    problems += [f"{name} was not reported" for name in kill.torn if name not in evidence.resumed.log]
    problems += [f"{name} is still there" for name in evidence.still_torn]
    return Check(phase=KILLED, subject="torn, cleared", compared=1, differences=problems)


def table(evidence: Evidence, checks: Sequence[Check]) -> RenderableType:
    """Build a table with one row per phase and its differences below."""
    title = f"[bold]{evidence.framework}"
    grid = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for header in ("run", "ranks", "steps", "saved", "torn", "stall ms\nmedian, max", "MB\neach", "equal"):
        grid.add_column(header, justify="left" if header in {"run", "equal"} else "right")
    for phase in PHASES:
        grid.add_row(*_row(phase, evidence, checks))
    failed = [check for check in checks if not check.holds]
    return Group(grid, *(line for check in failed for line in _complaints(check)))


def _row(name: str, evidence: Evidence, checks: Sequence[Check]) -> Iterator[str]:
    phase = evidence.phase(name)
    yield name
    yield str(len(phase.losses))
    yield f"{phase.steps[0]}-{phase.steps[-1]}" if phase.steps else "none"
    commits = [span for span in phase.finished("save.commit") if span.rank == 0]
    yield "" if name == UNINTERRUPTED else str(len(commits))
    yield str(len(evidence.kill.torn)) if name == KILLED else ""
    stalls = [span.seconds * 1e3 for span in phase.finished("save.stall")]
    yield f"{statistics.median(stalls):.0f}, {max(stalls):.0f}" if stalls else ""
    yield f"{max(span.size_bytes for span in commits) / 1e6:.1f}" if commits else ""
    yield "\n".join(_verdict(check) for check in checks if check.phase == name)


def _verdict(check: Check) -> str:
    if check.holds:
        return f"[green]✓[/] {check.compared} {check.subject}"
    return f"[red bold]✗ {len(check.differences)} of {check.compared} {check.subject}"


def _complaints(check: Check) -> Iterator[str]:
    for difference in check.differences[:SHOWN_DIFFERENCES]:
        yield f"[red]  {check.phase}, {check.subject}: {difference}"
    hidden = len(check.differences) - SHOWN_DIFFERENCES
    if hidden > 0:
        yield f"[red]  and {hidden} more"


def report(console: Console, evidence: Evidence, plan: Plan) -> bool:
    """Print the table of one framework; return whether everything is equal."""
    checks = judge(evidence, plan)
    console.print(table(evidence, checks))
    return all(check.holds for check in checks)
