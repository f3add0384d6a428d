"""The checkpoints of several tiers as those of one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, final

from ckpt_core.commit import Survey, on_present_line, present_lineage
from ckpt_core.names import set_aside
from ckpt_core.types import CheckpointInfo, Lineage


@final
@dataclass(frozen=True, slots=True)
class TierCopy:
    """A checkpoint as one tier holds it.

    Attributes:
        tier: position of the tier, 0 for the nearest.
        info: with the name, pin and marks that it has there.
        part: whether some of its files are only in further copies.
    """

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
    def alone(cls, info: CheckpointInfo, tier: int = 0) -> Self:
        """Return a checkpoint that one tier has."""
        return cls(info, [TierCopy(tier, info)])


@final
@dataclass(frozen=True, slots=True)
class United:
    """The checkpoints of several tiers, each once.

    Attributes:
        everything: oldest step first.
        lineage: the present one of all tiers together.
    """

    everything: Sequence[Held]
    lineage: Lineage

    @property
    def committed(self) -> list[Held]:
        """The checkpoints of the present lineage, oldest step first."""
        return [held for held in self.everything if not held.info.abandoned]

    @property
    def newest(self) -> Held | None:
        """The newest checkpoint of the present lineage, marked or not."""
        return next(reversed(self.committed), None)

    @property
    def infos(self) -> list[CheckpointInfo]:
        """All of them as listings see them."""
        return [held.info for held in self.everything]

    def find(self, *, step: int | None = None, name: str | None = None) -> Held | None:
        """Return the checkpoint of a step or name; see `Catalog.find` for the choice."""
        found = [
            held
            for held in self.everything
            if step in {None, held.info.step} and name in {None, *_names(held)}
        ]
        return max(found, key=_preferred, default=None)


def _names(held: Held) -> set[str | None]:
    return {each for copy in held.copies for each in (copy.info.name, set_aside(copy.info.name))}


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
            copies = _same(nearer, info)
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
    line = on_present_line(infos, present)
    return United([Held(info, by_key[_key(info)]) for info in line], present)


def _add_part(groups: Sequence[list[TierCopy]], part: TierCopy) -> None:
    """Add a part of a checkpoint to its whole copies in further tiers, if any."""
    for copies in groups:
        whole = copies[0].info
        same = (whole.name, whole.manifest_sha256) == (part.info.name, part.info.manifest_sha256)
        if same and copies[0].tier > part.tier:
            copies.insert(0, part)


def _same(groups: Sequence[list[TierCopy]], info: CheckpointInfo) -> list[TierCopy] | None:
    """Return the copies in nearer tiers, preferably of the same name."""
    found = [copies for copies in groups if copies[0].info.save_id == info.save_id and info.save_id]
    named = [copies for copies in found if copies[0].info.name == info.name]
    return next(iter(named or found), None)


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
