"""The checkpoints of one run, over all its tiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, final

from ckpt_core.commit import Catalog, Inventory, verify
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    FileFailure,
    LoadError,
    failure_text,
)
from ckpt_core.tiers._tier import Tier
from ckpt_core.tiers._union import Held, United, unite
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)


@final
class RunCatalog:
    """The checkpoints of one run: each once, whichever tiers have a copy.

    Like `Catalog`, it reads storage again at every call. A further tier that cannot be listed is an error: it
    may hold the newest checkpoint.

    Args:
        tiers: the nearest first.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def committed(self, *, abandoned: bool = False) -> list[CheckpointInfo]:
        """List the present lineage's checkpoints, or `abandoned` ones, too; oldest first.

        Raises:
            LoadError: a further tier could not be listed.
        """
        infos = self.union().infos
        return infos if abandoned else [info for info in infos if not info.abandoned]

    def latest(self) -> CheckpointInfo | None:
        """Return the newest unmarked checkpoint; see `Catalog.latest`."""
        infos = [info for info in self.committed() if info.bad is None]
        usable = [info for info in infos if info.usable]
        return next(reversed(usable or infos), None)

    def find(self, step: int | None = None, name: str | None = None) -> Held:
        """Return a checkpoint, by default the present lineage's newest, marked or not.

        Raises:
            CheckpointNotFoundError: there is none in any tier.
            CorruptCheckpointError: its marker is damaged.
            IncompatibleCheckpointError: it was written by a newer version.
            LoadError: a further tier could not be listed.
        """
        union = self.union()
        found = union.find(step=step, name=name) if (step, name) != (None, None) else union.newest
        if found is not None:
            return found
        urls = " and ".join(tier.storage.url for tier in self._tiers)
        missing = [CheckpointNotFoundError(f"nothing has been committed to {urls} yet")]
        if (step, name) != (None, None):
            missing = []
            for position, tier in enumerate(self._tiers):
                try:
                    return Held.alone(Catalog(tier.storage).find(step=step, name=name), position)
                except CheckpointNotFoundError as error:
                    missing.append(error)
        raise CheckpointNotFoundError("; ".join(map(str, missing)))

    def annotations(self, held: Held) -> Mapping[str, Any]:
        """Return the annotations of a checkpoint; none without a whole manifest."""
        for copy in held.copies:
            with suppress(CheckpointError):
                return Catalog(self._tiers[copy.tier].storage).manifest(copy.info.name).annotations
        return {}

    def verify(
        self, step: int | None, note: Callable[[CheckpointInfo, Sequence[FileFailure]], None]
    ) -> list[FileFailure]:
        """Verify every byte of a checkpoint in the nearest tier that has it.

        Args:
            step: of the checkpoint; None for the newest.
            note: called with a checkpoint of the nearest tier and its failures; in other tiers the mark of
                damage is set or removed.
        """
        copy = self.find(step).copies[0]
        storage, info = self._tiers[copy.tier].storage, copy.info
        failures = verify(storage, info.name)
        if not copy.tier:
            note(info, failures)
            return failures
        Inventory(storage).learn(info, failures)
        return failures

    def pin(self, step: int, reason: str) -> None:
        """Protect a step from pruning in every tier, also in those that have no copy yet.

        Errors as by `Catalog.pin`, and `LoadError`.
        """
        self.find(step)
        for tier in self._tiers:
            Catalog(tier.storage).pin(step, reason, ahead=True)

    def unpin(self, step: int) -> None:
        """Remove a pin from every tier; errors as by `Catalog.unpin`."""
        for tier in self._tiers:
            Catalog(tier.storage).unpin(step)

    def mark_bad(self, step: int, reason: str) -> None:
        """Mark every copy of a step's checkpoint as bad; errors as by `Catalog.mark_bad`."""
        for copy in self.find(step).copies:
            Catalog(self._tiers[copy.tier].storage).mark_bad(copy.info.name, reason)

    def unmark_bad(self, step: int) -> None:
        """Remove the mark from every copy of the step's checkpoints."""
        for held in self.union().everything:
            for copy in held.copies if held.info.step == step else ():
                if copy.info.bad is not None:
                    Catalog(self._tiers[copy.tier].storage).unmark(copy.info.name, bad=True)

    def union(self) -> United:
        """List all tiers, and log directories whose marker cannot be read.

        Raises:
            LoadError: a further tier could not be listed.
        """
        nearest, *others = self._tiers
        surveys = [nearest.survey()]
        for tier in others:
            try:
                surveys.append(tier.survey())
            except OSError as error:
                raise LoadError(
                    f"{tier.label} could not be listed, and may hold the newest checkpoint: "
                    f"{failure_text(error)}. Try again when it can be reached"
                ) from error
        for tier, survey in zip(self._tiers, surveys, strict=True):
            for name, problem in survey.unreadable.items():
                _logger.warning("%s/%s is left out: %s", tier.storage.url, name, problem)
        return unite(surveys)
