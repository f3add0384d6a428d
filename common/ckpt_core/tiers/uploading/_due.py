"""The rule by which checkpoints are due for a further tier, without I/O.

With `save=EverySteps(100)` and `every=10`, due is the first save at or after each multiple of 1,000 steps,
whatever was saved, skipped or lost in between. With any other policy, due is every tenth save, counted over
restarts; saves at a preemption come in addition, and are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, final

from ckpt_core.cadence import AnyOf, EverySteps, SavePolicy
from ckpt_core.messages import message
from ckpt_core.validation import integer

UPLOAD: Final = "upload"
"""The annotation that holds the number of a checkpoint."""


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class SaveNumber:
    """The place of a save in its run.

    Attributes:
        number: of saves so far, those before restarts included.
        after: the step of the save before.
        extra: whether only a preemption asked for it.
    """

    number: int = 0
    after: int = 0
    extra: bool = False

    @classmethod
    def read(cls, annotations: Mapping[str, Any]) -> Self | None:
        """Read the number from annotations, which users may have written; else None."""
        found = annotations.get(UPLOAD)
        if not isinstance(found, Mapping):
            return None
        number, after = found.get("number"), found.get("after")
        if integer("number", number, minimum=0) or integer("after", after, minimum=0):
            return None
        return cls(number=number, after=after, extra=found.get("extra") is True)  # type: ignore[arg-type]

    @property
    def annotations(self) -> dict[str, Any]:
        """What the manifest of the save notes."""
        extra = {"extra": True} if self.extra else {}
        return {UPLOAD: {"number": self.number, "after": self.after, **extra}}


@final
@dataclass(frozen=True, slots=True)
class DueRule:
    """The rule for one run: which of its saves are the n-th.

    Attributes:
        steps: the policy that saves by steps, if there is exactly one.
    """

    steps: EverySteps | None

    @classmethod
    def of(cls, policy: SavePolicy | None) -> Self:
        """Find the policy that saves by steps."""
        each = policy.policies if isinstance(policy, AnyOf) else (policy,)
        by_steps = [one for one in each if isinstance(one, EverySteps)]
        return cls(by_steps[0] if len(by_steps) == 1 else None)

    def is_due(self, step: int, number: SaveNumber | None, every: int) -> bool:
        """Return whether a checkpoint is due for a tier that gets every n-th."""
        if every == 1:
            return True
        if number is None:
            return False
        if self.steps is None:
            return not number.extra and number.number % every == 0
        interval, offset = self.steps.n * every, self.steps.offset
        return (step - offset) // interval > max(0, (number.after - offset) // interval)
