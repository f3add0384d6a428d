from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.lifecycle._reducer import (
    Command,
    Committed,
    Event,
    Failed,
    Fulfil,
    Meet,
    Open,
    Opened,
    Phase,
    Prune,
    Refused,
    Reject,
    Release,
    Staged,
    Write,
    Written,
    reduce,
)
from ckpt_core.types import CheckpointInfo

INFO = CheckpointInfo(step=3, name="step-000000003", created=1.0)
ERROR = OSError("disk")
EVENTS: tuple[Event, ...] = (
    Staged(), Opened(), Refused(), Written(b"report"), Committed(INFO), Failed(ERROR)
)  # fmt: skip


def legal(phase: Phase) -> list[Event]:
    """The events that the reducer accepts in this phase."""
    accepted = []
    for event in EVENTS:
        try:
            reduce(phase, event)
        except ValueError:
            continue
        accepted.append(event)
    return accepted


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Event], list[Command]]:
    """A whole save: any legal event in any phase, until there is none."""
    phase, events, commands = Phase.PLANNED, [], []
    while choices := legal(phase):
        events.append(draw(st.sampled_from(choices)))
        phase, more = reduce(phase, events[-1])
        commands += more
        assert len(events) <= 4
    assert phase is Phase.DONE
    return events, commands


def of(kind: type | tuple[type, ...], commands: list[Command]) -> list[int]:
    return [place for place, command in enumerate(commands) if isinstance(command, kind)]


@given(runs())
def test_every_save_ends_with_exactly_one_verdict(run):
    _, commands = run
    assert len(of((Fulfil, Reject), commands)) == 1


@given(runs())
def test_every_rank_meets_exactly_once_after_giving_its_memory_back(run):
    _, commands = run
    (meet,), (release,) = of(Meet, commands), of(Release, commands)
    assert release < meet


@given(runs())
def test_nothing_is_pruned_unless_something_was_committed_before(run):
    _, commands = run
    if prune := of(Prune, commands):
        assert of(Fulfil, commands) < prune
    else:
        assert of(Reject, commands)


@given(runs())
def test_nothing_is_written_after_the_memory_is_given_back(run):
    _, commands = run
    assert all(write < of(Release, commands)[0] for write in of(Write, commands))


@given(runs())
def test_success_is_told_only_of_what_was_committed_and_errors_are_never_lost(run):
    events, commands = run
    fulfilled = [command.info for command in commands if isinstance(command, Fulfil)]
    rejected = [command.error for command in commands if isinstance(command, Reject)]
    assert fulfilled == [event.info for event in events if isinstance(event, Committed)]
    assert rejected == ([] if fulfilled else [events[-1].error])
    brought = {Written: b"report", Refused: b"", Failed: ERROR}[type(events[-2])]
    (payload,) = [command.payload for command in commands if isinstance(command, Meet)]
    assert payload == brought


@given(runs())
def test_nobody_writes_before_the_coordinator_has_opened_the_save(run):
    events, commands = run
    assert bool(of(Write, commands)) == any(isinstance(event, Opened) for event in events)
    assert len(of(Open, commands)) == 1


def test_a_rank_that_failed_to_stage_takes_its_error_to_the_opening():
    assert reduce(Phase.PLANNED, Failed(ERROR)) == (Phase.OPENING, (Open(ERROR),))


def test_a_save_that_goes_well_runs_in_this_order():
    phase, commands = Phase.PLANNED, []
    for event in (Staged(), Opened(), Written(b"report"), Committed(INFO)):
        phase, more = reduce(phase, event)
        commands += more
    assert commands == [Open(), Write(), Release(), Meet(b"report"), Fulfil(INFO), Prune(INFO)]


@pytest.mark.parametrize(
    ("phase", "event"),
    [(phase, event) for phase in Phase for event in EVENTS if event not in legal(phase)],
    ids=str,
)
def test_events_out_of_order_are_refused_by_name(phase, event):
    with pytest.raises(ValueError, match=f"{type(event).__name__} cannot occur in phase {phase.name}"):
        reduce(phase, event)


def test_only_these_events_are_legal():
    names = {phase.name: [type(event).__name__ for event in legal(phase)] for phase in Phase}
    assert names == {
        "PLANNED": ["Staged", "Failed"],
        "OPENING": ["Opened", "Refused", "Failed"],
        "WRITING": ["Written", "Failed"],
        "MEETING": ["Committed", "Failed"],
        "DONE": [],
    }
