"""The checkpoints of several tiers as those of one run; which copy is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

from ckpt_core.commit import Catalog, Inventory, Survey, on_present_line, present_lineage, verify
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, FileFailure, LoadError, failure_text
from ckpt_core.names import set_aside
from ckpt_core.storage import LayeredStorage, Storage
from ckpt_core.tiers._tier import Tier
from ckpt_core.types import CheckpointInfo, Lineage

_MOST_ATTEMPTS: Final = 8
"""Attempts with files from several copies, before the nearest copy is passed over as a whole."""


@final
class Reading:
    """Equal copies of one checkpoint, read as one without the files that are damaged.

    The first attempt reads the nearest copy alone, so that what is missing there is noticed. Later ones read
    each file from the nearest copy in which it is not known to be damaged. Where the nearest copy is only a
    part, so does the first.
    """

    def __init__(self, directory: str, storages: Sequence[Storage], *, part: bool) -> None:
        self._directory = directory
        self._storages = storages
        self._passed_over: dict[str, int] = {}
        self._attempts = 1 if part else 0
        self.nearest = 0

    @property
    def storage(self) -> Storage:
        """What the next attempt reads."""
        storages = self._storages[self.nearest :]
        if not self._attempts or len(storages) == 1:
            return storages[0]
        passed_over = {f"{self._directory}/{path}": count for path, count in self._passed_over.items()}
        return LayeredStorage(*storages, passed_over=passed_over)

    def copy_of(self, path: str) -> int:
        """Return the position of the copy that a file was read from."""
        return self.nearest + self._passed_over.get(path, 0)

    def pass_over(self, paths: Collection[str]) -> bool:
        """Pass over files in the copies that they were read from; False if none is left.

        Without any, the whole nearest copy is passed over.
        """
        left = len(self._storages) - self.nearest
        self._attempts += 1
        if not paths or self._attempts > _MOST_ATTEMPTS:
            self.nearest += 1
            self._attempts, self._passed_over = 0, {}
            return left > 1
        for path in paths:
            self._passed_over[path] = self._passed_over.get(path, 0) + 1
        return all(count < left for count in self._passed_over.values())


@final
@dataclass(frozen=True, slots=True)
class TierCopy:
    """A checkpoint as one tier holds it, or a `part` of it; 0 is the nearest tier."""

    tier: int
    info: CheckpointInfo
    part: bool = False


@final
@dataclass(frozen=True, slots=True)
class Held:
    """A checkpoint, and every copy of it.

    Attributes:
        info: by the name that it has in the nearest tier; marked as bad if any tier says so, as damaged if
            all do; `abandoned` by the present lineage of all tiers together.
        copies: the nearest first.
    """

    info: CheckpointInfo
    copies: Sequence[TierCopy]

    @classmethod
    def alone(cls, info: CheckpointInfo, tier: int) -> Self:
        """Return a checkpoint that one tier has."""
        return cls(info, [TierCopy(tier, info)])


@final
@dataclass(frozen=True, slots=True)
class United:
    """The checkpoints of several tiers, each once, oldest step first; their lineage."""

    everything: Sequence[Held]
    lineage: Lineage

    @property
    def committed(self) -> list[Held]:
        """The whole states of the present lineage, oldest step first."""
        there = (held for held in self.everything if not held.info.abandoned)
        return [held for held in there if held.info.weights_of is None]

    @property
    def weights(self) -> list[Held]:
        """What holds only weights, of the present lineage, oldest step first."""
        return [held for held in self.everything if held.info.weights_of and not held.info.abandoned]

    @property
    def infos(self) -> list[CheckpointInfo]:
        """All of them as listings see them."""
        return [held.info for held in self.everything]

    def find(self, *, step: int | None = None, name: str | None = None) -> Held | None:
        """Return the checkpoint of a step or name; see `Catalog.find` for the choice."""
        found = [
            held
            for held in self.everything
            if step in {None, held.info.step}
            and any(name in {None, copy.info.name, set_aside(copy.info.name)} for copy in held.copies)
        ]
        return max(found, key=_preferred, default=None)


def _preferred(held: Held) -> tuple[bool, bool, int, float, int]:
    info = held.info
    return not info.abandoned, info.usable, info.lineage.number, info.created, -held.copies[0].tier


def unite(surveys: Sequence[Survey]) -> United:
    """Unite what tiers hold, the nearest first.

    Copies of one checkpoint have the same save id: names and steps may be given twice, as by a run that
    began afresh on an empty disk.
    """
    groups: list[list[TierCopy]] = []
    for tier, survey in enumerate(surveys):
        nearer = list(groups)
        for info in survey.everything:
            found = [each for each in nearer if each[0].info.save_id == info.save_id and info.save_id]
            named = [each for each in found if each[0].info.name == info.name]
            copies = next(iter(named or found), None)
            if copies is None:
                groups.append([TierCopy(tier, info)])
            elif copies[-1].tier < tier or info.name == copies[0].info.name:
                copies[:] = [*(copy for copy in copies if copy.tier < tier), TierCopy(tier, info)]
    for tier, survey in enumerate(surveys):
        for info in survey.parts:
            _add_part(groups, TierCopy(tier, info, part=True))
    infos = [_merged(copies) for copies in groups]
    # The lineage of a survey counts also those of checkpoints whose marker cannot be read.
    present = present_lineage(infos, [survey.lineage for survey in surveys])
    by_key = {_key(info): copies for info, copies in zip(infos, groups, strict=True)}
    return United([Held(info, by_key[_key(info)]) for info in on_present_line(infos, present)], present)


def _add_part(groups: Sequence[list[TierCopy]], part: TierCopy) -> None:
    """Add a part of a checkpoint to its whole copies in further tiers, if any."""
    for copies in groups:
        whole = copies[0].info
        same = (whole.name, whole.manifest_sha256) == (part.info.name, part.info.manifest_sha256)
        if same and copies[0].tier > part.tier:
            copies.insert(0, part)


def _merged(copies: Sequence[TierCopy]) -> CheckpointInfo:
    infos = [copy.info for copy in copies]
    pinned, bad = (
        next((found for info in infos if (found := getattr(info, mark)) is not None), None)
        for mark in ("pinned", "bad")
    )
    damaged = infos[0].damaged if all(info.damaged is not None for info in infos) else None
    return replace(infos[0], pinned=pinned, bad=bad, damaged=damaged)


def _key(info: CheckpointInfo) -> tuple[str, str, float]:
    return info.name, info.save_id, info.created


@final
class RunCatalog:
    """The checkpoints of one run: each once, whichever tiers have a copy.

    Like `Catalog`, it reads storage again at every call. A further tier that cannot be listed is an error: it
    may hold the newest checkpoint.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = tiers

    def committed(self, *, abandoned: bool = False) -> list[CheckpointInfo]:
        """List the present lineage's checkpoints; with `abandoned` all; oldest first.

        Raises:
            LoadError: a further tier could not be listed.
        """
        union = self.union()
        return union.infos if abandoned else [held.info for held in union.committed]

    def latest(self) -> CheckpointInfo | None:
        """Return the newest unmarked checkpoint; see `Catalog.latest`."""
        infos = [info for info in self.committed() if info.bad is None]
        return next(reversed([info for info in infos if info.usable] or infos), None)

    def find(self, step: int | None = None, name: str | None = None) -> Held:
        """Return a checkpoint, by default the present lineage's newest, marked or not.

        Raises:
            CheckpointNotFoundError: there is none in any tier.
            CorruptCheckpointError: its marker is damaged.
            IncompatibleCheckpointError: it was written by a newer version.
            LoadError: a further tier could not be listed.
        """
        union = self.union()
        if (step, name) == (None, None):
            if committed := union.committed:
                return committed[-1]
            urls = " and ".join(tier.storage.url for tier in self._tiers)
            raise CheckpointNotFoundError(f"nothing has been committed to {urls} yet")
        if (found := union.find(step=step, name=name)) is not None:
            return found
        missing = list[CheckpointNotFoundError]()
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
        """Verify every byte of a checkpoint, or the newest, in the nearest tier with it.

        `note` is called with one of the nearest tier and its failures; elsewhere it is marked.
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
            survey.log_unreadable(tier.storage.url)
        return unite(surveys)
