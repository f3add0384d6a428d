"""What is due for a further tier: by a rule, and what an earlier run has left.

With `save=EverySteps(100)` and `every=10`, due is the first save at or after each multiple of 1,000 steps,
whatever was saved, skipped or lost in between. With any other policy, due is every tenth save, counted over
restarts; saves at a preemption come in addition, and are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

from ckpt_core.cadence import AnyOf, EverySteps, SavePolicy
from ckpt_core.commit import Catalog
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CorruptCheckpointError, IncompatibleCheckpointError
from ckpt_core.messages import message
from ckpt_core.options import Upload
from ckpt_core.storage import Storage
from ckpt_core.tiers import read_tiers
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import integer

_logger = logger_of(__name__)

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


def left_due(
    storage: Storage, rule: DueRule, uploads: Sequence[Upload], there: Sequence[Sequence[CheckpointInfo]]
) -> list[list[CheckpointInfo]]:
    """Return what an earlier run has left for each tier, oldest first.

    Warns of what is due for tiers that this run does not have.

    What is older than the newest in a tier was overtaken, or pruned there. Where a newer one overtakes, only
    the newest is due.
    """
    catalog, begun = Catalog(storage), _begun(storage)
    present = [info for info in catalog.committed() if info.usable]
    _warn_of_others(storage, present, begun - {(each.url, name) for each in uploads for _, name in begun})

    def is_due(info: CheckpointInfo, upload: Upload) -> bool:
        if (upload.url, info.name) in begun:
            return True
        try:
            annotations = catalog.manifest(info.name).annotations
        except CheckpointError as error:
            _logger.warning("%s is not uploaded: %s", info.name, error)
            return False
        return rule.is_due(info.step, SaveNumber.read(annotations), upload.every)

    found: list[list[CheckpointInfo]] = []
    for upload, copies in zip(uploads, there, strict=True):
        newest = max(map(_age, copies), default=(-1, -1))
        have = {info.save_id for info in copies}
        newer = (info for info in present if _age(info) > newest and info.save_id not in have)
        due = [info for info in newer if is_due(info, upload)]
        found.append(due[-1:] if upload.when_busy == "overtake" else due)
    return found


def _age(info: CheckpointInfo) -> tuple[int, int]:
    return info.lineage.number, info.step


def _begun(storage: Storage) -> set[tuple[str, str]]:
    """Return the uploads that were left: URL of the tier and name."""
    try:
        records = read_tiers(storage)
    except (OSError, CorruptCheckpointError, IncompatibleCheckpointError) as error:
        _logger.warning("%s: which uploads were left is not known: %s", storage.url, error)
        return set()
    return {(each.url, name) for each in records for name in each.due}


def _warn_of_others(
    storage: Storage, present: Sequence[CheckpointInfo], others: set[tuple[str, str]]
) -> None:
    """Say what is due for tiers that this run does not upload to."""
    for url in sorted({url for url, _ in others}):
        steps = [str(info.step) for info in present if (url, info.name) in others]
        if steps:
            _logger.warning(
                "step(s) %s were due for %s, where this run uploads nothing: `ckpt upload %s --to %s --all` "
                "sends what is not there",
                ", ".join(steps),
                url,
                storage.url,
                url,
            )
