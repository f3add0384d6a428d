"""The facts on which a save policy decides."""

from __future__ import annotations

from typing import Final, NamedTuple, TypedDict

PREEMPTION = "preemption"
"""The entry of `CadenceContext.signals` for a job that is about to be stopped."""


class Counts(TypedDict, total=False):
    """What a training has done besides steps, the same on every rank.

    Attributes:
        epochs: epochs finished.
        tokens: tokens trained on, by all ranks together.
    """

    epochs: int
    tokens: int


_NO_COUNTS: Final = Counts()


class SaveCosts(NamedTuple):
    """What the saves of this run cost, measured: medians in seconds of training time.

    Attributes:
        stall: a save blocks training for so long.
        slowdown: further training time lost while one save is in flight, as steps took longer.
        durable: from the decision to the commit in the root.
        uploaded: from the decision until the first `Upload` tier has it; None without one, or not yet known.
        saves: how many were measured.
        lost: seconds of training time that all saves of this run have cost so far.
        step: a step without a save in flight.
    """

    stall: float
    slowdown: float
    durable: float
    uploaded: float | None
    saves: int
    lost: float
    step: float


class FailureRate(NamedTuple):
    """How often this job fails.

    Attributes:
        mtbf: mean seconds between failures.
        source: where the number comes from, for users.
    """

    mtbf: float
    source: str


class ChosenInterval(NamedTuple):
    """The seconds between saves that a policy finds, by which rate of failures."""

    seconds: float
    failures: FailureRate | None = None


class CadenceContext(NamedTuple):
    """The input of a decision; a tuple, as every step of a training makes one.

    Attributes:
        step: the step just finished.
        previous_step: the last step decided on before this one in this run; None at the first.
        now: seconds on any clock, the same for every time here.
        started: when this run started.
        last_save_step: the last step saved or resumed from; None if there is none.
        last_save_time: time of that save; None if there is none.
        total_steps: length of the training, if known.
        signals: external events of the job, e.g. `PREEMPTION`.
        counts: of this step, as far as they are known.
        since_counts: of the last decision or save before it; without a count where it is not known.
        costs: what saves cost; None as long as none was measured.
        failures: how often this job fails; None if not known yet.
        in_flight: whether the newest save is not yet durable in the root, on any rank.
    """

    step: int
    now: float
    started: float
    previous_step: int | None = None
    last_save_step: int | None = None
    last_save_time: float | None = None
    total_steps: int | None = None
    signals: frozenset[str] = frozenset()
    counts: Counts = _NO_COUNTS
    since_counts: Counts = _NO_COUNTS
    costs: SaveCosts | None = None
    failures: FailureRate | None = None
    in_flight: bool = False

    @property
    def since(self) -> int:
        """The last step decided on: a boundary after it and up to `step` is due now."""
        step, decided, saved = self.step, self.previous_step, self.last_save_step
        since = decided if decided is not None and decided < step else None
        if saved is not None and saved < step and (since is None or saved > since):
            since = saved
        return step - 1 if since is None else since
