"""Errors of saves: the report of one rank, and the error raised on every rank."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from typing import Final

from ckpt_core.errors import CoordinationError, DeadlineError, SaveError, SavePhase, failure_text

_DOING: Final[Mapping[SavePhase, str]] = {
    "plan": "planning",
    "stage": "staging",
    "open": "opening",
    "write": "writing",
    "commit": "committing",
}
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


def failed_in(phase: SavePhase, error: BaseException) -> SaveError:
    """Make the error that a rank reports to the others when a phase fails on it."""
    if isinstance(error, SaveError):
        reported = error if error.phase else error.retold(str(error), phase=phase)
    else:
        reported = SaveError(f"while {_DOING[phase]}: {failure_text(error)}", phase=phase)
    if reported is not error:
        reported.__cause__ = error
    return reported


def save_error(url: str, step: int, phase: SavePhase, error: CoordinationError) -> SaveError:
    """Make the one error that every rank raises for a failed save."""
    # Nothing is written while ranks plan, whether or not this rank learned the result.
    in_doubt = error.in_doubt and phase != "plan"
    verdict = f"it is not known whether step {step} was" if in_doubt else f"step {step} was not"
    return SaveError(
        f"{verdict} saved to {url} (phase {phase}): {error}. "
        f"Every checkpoint committed before is untouched; {_remedy(error)}, then save again",
        step=step,
        phase=phase,
        failures=error.failures,
        in_doubt=in_doubt,
    )


def _remedy(error: CoordinationError) -> str:
    if isinstance(error, DeadlineError):
        return "find out what stopped those ranks"
    full = any(cause.errno in _FULL for cause in error.causes.values())
    return "free space there" if full else "remove the cause"
