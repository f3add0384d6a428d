"""What a caller of a save gives and gets: the request, the handle, and the error."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar, cast, final

from typing_extensions import override

from ckpt_core.collective import checked_step
from ckpt_core.coordination import require_same_process
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    DeadlineError,
    SaveError,
    SavePhase,
    failure_text,
)
from ckpt_core.names import parse_step_name, step_name
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import mapping, require, text

T = TypeVar("T")

_DOING: Final[Mapping[SavePhase, str]] = {
    "plan": "planning",
    "stage": "staging",
    "open": "opening",
    "write": "writing",
    "commit": "committing",
}
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """The step and name of a save, with its metrics and annotations.

    Attributes:
        replace: whether `name` may be committed already.
        progress: the counts that the manifest names: `epochs`, `total_steps`.
        refusal: why this rank cannot ask for a save; reported to the ranks that can.
    """

    step: int
    name: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replace: bool = False
    progress: Mapping[str, int] = field(default_factory=dict[str, int])
    refusal: CheckpointError | None = None

    @classmethod
    def checked(
        cls,
        step: Any,
        name: str | None,
        *,
        metrics: Mapping[str, float] | None,
        annotations: Mapping[str, Any] | None,
        progress: Mapping[str, int],
    ) -> SaveRequest:
        """Return the request of a call of `save`.

        Raises:
            ConfigError: an argument is invalid.
        """
        number = checked_step("save", step)
        require(
            "save",
            None if name is None or name == "" else text("name", name),
            None if metrics is None else mapping("metrics", metrics),
            None if annotations is None else mapping("annotations", annotations),
        )
        return cls(
            step=number,
            name=step_name(number) if name is None else name,
            metrics=dict(metrics or {}),
            annotations=dict(annotations or {}),
            replace=name is not None,
            progress=dict(progress),
        )

    def __post_init__(self) -> None:
        named = parse_step_name(self.name)
        if named not in {None, self.step}:
            raise ConfigError(
                f"{self.name!r} is the name of step {named}, which would find it taken: give this "
                f"step, {self.step}, another name"
            )
        # Now, for the commit would find out only after everything has been written.
        try:
            json.dumps(self.annotations, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"annotations of step {self.step} must be plain JSON: {error}") from error
        try:
            # A metric is often a tensor of one element, which no listing could show.
            numbers = {str(name): _number(value) for name, value in self.metrics.items()}
        except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"metrics of step {self.step} must be numbers by name: {error}") from error
        object.__setattr__(self, "metrics", numbers)

    def digest(self) -> int:
        """Hash the request to [0, 2**62): equal on ranks that ask for the same save."""
        asked = f"{self.step} {self.replace} {self.name}".encode()
        return int.from_bytes(hashlib.blake2b(asked, digest_size=8).digest(), "big") >> 2


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{value!r:.40} is a {type(value).__name__}")
    return float(value)


@final
class _OutcomeFuture(Future[CheckpointInfo]):
    """The outcome of a save; `taken` once somebody has received its error."""

    taken = False

    @override
    def result(self, timeout: float | None = None) -> CheckpointInfo:
        self.exception(timeout)
        return super().result()

    @override
    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.taken = error is not None
        return error


@final
class SaveHandle:
    """A save in flight.

    Attributes:
        step: the step saved.
        name: directory name of the checkpoint under its root.
        created: when it was agreed on, Unix seconds on the coordinator's clock.
        staged: resolves when training may change the state.
        committed: resolves when the checkpoint exists, or raises the same `SaveError` on every rank. Who gets
            the error here, or from `result`, has it: the manager does not raise it again.
        uploaded: resolves with the checkpoint when every further tier that it was due for has it; with None
            if it was due for none, a newer one has overtaken it, or it was left to the next run; raises
            `UploadError` if it could not be uploaded in time. Without an `Upload` it is `committed`.

    Concurrency: futures may be waited for on any thread of any rank; nothing here is collective.
    """

    def __init__(self, step: int, name: str, created: float) -> None:
        self.step = step
        self.name = name
        self.created = created
        self._pid = os.getpid()
        self.staged: Future[None] = Future()
        self.committed: Future[CheckpointInfo] = _OutcomeFuture()
        self.uploaded = cast("Future[CheckpointInfo | None]", self.committed)
        for future in (self.staged, self.committed):
            future.set_running_or_notify_cancel()  # a caller that waits must not cancel the save

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self.committed.done()

    @property
    def error(self) -> BaseException | None:
        """Why the save has failed, None if it has not; the manager raises it all the same."""
        return Future.exception(self.committed) if self.committed.done() else None

    @property
    def taken(self) -> bool:
        """Whether its error has been received."""
        return cast("_OutcomeFuture", self.committed).taken

    def result(self, timeout_seconds: float | None = None) -> CheckpointInfo:
        """Wait for the commit.

        Raises:
            ConfigError: this process was forked from the one that saves.
            SaveError: the save failed on some rank.
            TimeoutError: the save has not ended in time.
        """
        require_same_process(self._pid)
        return self.committed.result(timeout_seconds)


def fulfil(future: Future[T], value: T) -> bool:
    """Set a future's value; return False if it had an outcome already."""
    try:
        future.set_result(value)
    except InvalidStateError:
        return False
    return True


def reject(future: Future[T], error: BaseException) -> bool:
    """Set a future's error; return False if it had an outcome already."""
    try:
        future.set_exception(error)
    except InvalidStateError:
        return False
    return True


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
