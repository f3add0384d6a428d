"""What all ranks raise when a phase fails on some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ckpt_core.collective import _PhaseOutcome, _raise_worst, collective_phase
from ckpt_core.coordination import Solo
from ckpt_core.errors import (
    CheckpointError,
    CoordinationError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    LoadError,
)


def corrupt(path: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path} is damaged", failures=(FileFailure(path=path, problem="flipped"),))


def told(*errors: Exception | None) -> Sequence[_PhaseOutcome]:
    return [
        _PhaseOutcome(
            error if isinstance(error, CheckpointError) else None, "" if error is None else repr(error)
        )
        for error in errors
    ]


def raised(*errors: Exception | None) -> Exception:
    with pytest.raises(CheckpointError) as caught:
        _raise_worst(told(*errors), "nothing was loaded", None)
    return caught.value


def test_damage_is_told_before_anything_else_for_an_older_checkpoint_must_be_tried():
    error = raised(OSError("no answer"), IncompatibleCheckpointError("other"), corrupt("a"))
    assert isinstance(error, CorruptCheckpointError)
    assert "found by rank 2" in str(error)


def test_all_damage_is_told_once():
    error = raised(corrupt("a"), None, corrupt("b"), corrupt("a"))
    assert isinstance(error, CorruptCheckpointError)
    assert [failure.path for failure in error.failures] == ["a", "b"]
    assert "found by rank 0, 2, 3; 2 place(s) in all" in str(error)


def test_the_rank_that_it_happened_to_knows_better_than_those_that_were_told():
    error = raised(CoordinationError("rank 1: OSError"), OSError("the disk is gone"), None)
    assert isinstance(error, LoadError)
    assert "rank 1: OSError('the disk is gone')" in str(error)


def test_hearsay_is_better_than_nothing():
    assert isinstance(raised(None, CoordinationError("a peer was lost")), LoadError)


@pytest.mark.parametrize(
    ("act", "kind"),
    [(lambda: 1 / 0, LoadError), (lambda: (_ for _ in ()).throw(corrupt("a")), CorruptCheckpointError)],
    ids=["foreign", "ours"],
)
def test_alone_the_error_is_ones_own(act: Callable[[], Any], kind: type[Exception]):
    with pytest.raises(kind), collective_phase(Solo(), "nothing was loaded"):
        act()


def test_nothing_is_raised_if_nothing_failed():
    with collective_phase(Solo(), "") as note:
        note.own = 7
    assert note.all == [7]
