"""Fetches of whole checkpoints into the nearest tier, for hosts that read files."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import final

from ckpt_core.collective import collective_phase
from ckpt_core.commit import Catalog, abandon, plain_storage, require_trusted, share, verify
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
    lost,
)
from ckpt_core.loading._repair import note_copied
from ckpt_core.messages import message
from ckpt_core.names import data_rank, run_name
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job, Ownership
from ckpt_core.tiers import CheckpointCopy, CopyTerms, Held, RunCatalog, Tier, United
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    tier: int
    name: str
    as_name: str
    info: CheckpointInfo


@final
class Fetcher:
    """Copies checkpoints that only further tiers have whole into the nearest tier.

    Collective: each rank copies its share of the files, and all are verified on the way.
    """

    def __init__(
        self, job: Job, tiers: Sequence[Tier], options: CheckpointOptions, ownership: Ownership
    ) -> None:
        self._job = job
        self._tiers = tiers
        self._catalog = RunCatalog(tiers)
        self._ownership = ownership
        self._verify_manifest = options.manifest_verifier

    def fetch(self, *, name: str | None = None) -> CheckpointInfo | None:
        """Fetch a checkpoint, unless the nearest tier has it whole as far as is known.

        Its small files are verified there, and the sizes of the others compared. The root is taken first.
        Without a name it is the newest that is not bad; where that is damaged in every tier, the one before.
        Returns what was fetched, if anything was.
        """
        if len(self._tiers) == 1 or not self._tiers[0].shared:
            return None
        self._job.coordinator.bind()
        self._ownership.take()
        passed: list[str] = []
        while True:
            choice = self._job.coordinator.run_on_coordinator(
                lambda: self._choose(name, passed), what="looking for a checkpoint to fetch"
            )
            if choice is None:
                return None
            try:
                return self._copy(choice)
            except (CorruptCheckpointError, UntrustedCheckpointError, IncompatibleCheckpointError) as error:
                place = f"{self._tiers[choice.tier].label}/{choice.name}"
                passed.append(place)
                if self._job.coordinator.is_coordinator:
                    _logger.warning("%s could not be fetched and is passed over: %s", place, error)

    def _choose(self, name: str | None, passed: Collection[str]) -> _Choice | None:
        union = self._catalog.union()
        if name is None:
            wanted: Iterator[Held] = (held for held in reversed(union.committed) if held.info.bad is None)
        else:
            found = union.find(name=name)
            wanted = iter(() if found is None else [found])
        for held in wanted:
            nearest = held.copies[0]
            if not nearest.tier and self._seems_whole(nearest.info):
                return None
            for copy in held.copies[1 if not nearest.tier else 0 :]:
                if f"{self._tiers[copy.tier].label}/{copy.info.name}" not in passed:
                    as_name = _free_name(union, copy.info) if nearest.tier else nearest.info.name
                    return _Choice(tier=copy.tier, name=copy.info.name, as_name=as_name, info=copy.info)
        return None

    def _seems_whole(self, info: CheckpointInfo) -> bool:
        """Return whether no damage is known, or found without reading large files."""
        storage = self._job.storage
        try:
            files = Catalog(storage).manifest(info.name).files
            if info.damaged is not None or any(
                storage.size(f"{info.name}/{entry.path}") != entry.size_bytes for entry in files
            ):
                return False
        except (CheckpointError, FileNotFoundError):
            return False
        return not lost(
            verify(storage, info.name, paths=[e.path for e in files if data_rank(e.path) is None])
        )

    def _copy(self, choice: _Choice) -> CheckpointInfo:
        coordinator, target = self._job.coordinator, self._job.storage
        source, place = self._tiers[choice.tier], f"{self._tiers[choice.tier].label}/{choice.name}"
        consequence = f"{place} could not be fetched, and nothing was loaded"
        copies: list[CheckpointCopy] = []
        if coordinator.is_coordinator:
            _logger.info("%s is not whole in %s: it is fetched from %s", choice.as_name, target.url, place)
        try:
            with (
                self._job.telemetry.span("fetch", name=choice.as_name, rank=coordinator.rank),
                collective_phase(coordinator, consequence, what="beginning to fetch a checkpoint"),
            ):
                if coordinator.is_coordinator:
                    require_trusted(source.storage, choice.name, self._verify_manifest)
                plain = plain_storage(source.storage, choice.name)
                copies.append(CheckpointCopy.of(plain, target, choice.name, as_name=choice.as_name))
                if coordinator.is_coordinator:
                    copies[0].begin(repair=True)
            with collective_phase(coordinator, consequence, what="fetching a checkpoint"):
                files = copies[0].manifest.files
                share_of = set(share(files, coordinator.rank, coordinator.world_size))
                to_own = CheckpointCopy.of(plain, target.own, choice.name, as_name=choice.as_name)
                to_own.copy_files([entry for entry in files if entry.path in share_of], CopyTerms())
            return coordinator.run_on_coordinator(
                lambda: self._finish(copies[0]), what="committing a fetched checkpoint"
            )
        except BaseException:
            if copies and coordinator.is_coordinator:
                abandon(target, copies[0].working)
            raise

    def _finish(self, copy: CheckpointCopy) -> CheckpointInfo:
        info = copy.finish(check=self._ownership.check, repair=True)
        note_copied(self._ownership, info)
        return info


def _free_name(union: United, info: CheckpointInfo) -> str:
    """Return the name of a checkpoint, or another if the nearest tier has it already."""
    copies = (copy for held in union.everything for copy in held.copies)
    taken = any(not copy.tier and copy.info.name == info.name for copy in copies)
    return run_name(info.name, info.lineage.id or info.save_id[:8]) if taken else info.name
