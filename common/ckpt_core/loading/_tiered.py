"""The load of one checkpoint, from the nearest of its copies that is whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Final, final

from ckpt_core.commit import Catalog, Survey, require_trusted
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileFailure,
    OverwrittenError,
    UntrustedCheckpointError,
)
from ckpt_core.loading._load import Load, LoadRequest
from ckpt_core.loading._overwritten import Overwritten, release
from ckpt_core.options import VerifyManifest
from ckpt_core.root import Job
from ckpt_core.state import StateSource
from ckpt_core.storage import Storage
from ckpt_core.tiers import Held, Reading, Tier, TierCopy
from ckpt_core.types import CheckpointInfo, SavedState

_logger = logger_of(__name__)
_MOST_LISTED: Final = 5


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        info: the checkpoint, by its name in the nearest tier that has it.
        saved: its content.
        copy: the nearest copy that it was read from.
        storage: what its files were read from: several tiers if that copy lacks some.
        damaged: position of a tier -> problem of the copy there.
        nearest_name: of the copy in the nearest tier, be it damaged; "" without one.
        sources: further tiers with equal copies, the nearest first.
        suspects: files of the nearest tier that were found damaged; None if any may be.
        surveys: of all tiers, if the checkpoint was chosen from them.
    """

    info: CheckpointInfo
    saved: SavedState
    copy: TierCopy
    storage: Storage
    damaged: Mapping[int, str] = field(default_factory=dict[int, str])
    nearest_name: str = ""
    sources: Sequence[Storage] = ()
    suspects: Collection[str] | None = ()
    surveys: Sequence[Survey] = ()

    @property
    def wrongly_marked(self) -> bool:
        """Whether the nearest tier's copy is marked as damaged, and was found whole."""
        return not self.copy.tier and not self.damaged and self.copy.info.damaged is not None


@final
@dataclass(slots=True)
class PassedOver:
    """The checkpoints and copies that a load has passed over.

    Attributes:
        damaged: for each tier, name -> problem.
        suspects: the files of the nearest tier that were found damaged.
        untrusted: place -> why it is not trusted.
    """

    damaged: Sequence[dict[str, str]]
    suspects: set[str] = field(default_factory=set[str])
    untrusted: dict[str, str] = field(default_factory=dict[str, str])


@final
class TieredLoader:
    """Loads of one checkpoint at a time. Methods are collective.

    Attributes:
        overwritten: what failed loads have left in the live state.

    Args:
        job: storage, ranks and telemetry.
        tiers: the nearest first.
        verify_manifest: judges every copy before it is read; None to trust all.
    """

    def __init__(self, job: Job, tiers: Sequence[Tier], verify_manifest: VerifyManifest | None) -> None:
        self._job = job
        self._tiers = tiers
        self._verify_manifest = verify_manifest
        self.overwritten = Overwritten()

    def load(
        self, held: Held, request: LoadRequest, source: StateSource, passed_over: PassedOver | None = None
    ) -> Loaded:
        """Load a checkpoint from the nearest copy, what is damaged there from the next.

        Raises:
            CorruptCheckpointError: no copy of some file is whole.
            UntrustedCheckpointError: no copy is trusted.
            CheckpointNotFoundError: every copy was pruned while it was being read.
            OverwrittenError: storage failed half-way.
            LoadError: it failed before; but for damage on arrival, nothing was touched by these, either.
        """
        found = passed_over or PassedOver([{} for _ in self._tiers])
        errors: list[CheckpointError] = []
        for copies in _equal(held.copies):
            storages = [self._tiers[c.tier].reading(c.info, self._job.coordinator) for c in copies]
            reading = Reading(copies[0].info.name, storages, part=copies[0].part)
            there = True
            while there:
                copy = copies[reading.nearest]
                one = replace(request, directory=copy.info.name, committed=copy.info)
                try:
                    with self._job.telemetry.span("load", **self._details(copy)):
                        saved = self.load_directory(one, source, reading.storage)
                except (CorruptCheckpointError, UntrustedCheckpointError, CheckpointNotFoundError) as error:
                    release(error)
                    errors.append(error)
                    # Without a record the only copy's error is all there is to say.
                    noted = found if passed_over is not None or len(held.copies) > 1 else None
                    there = self._pass_over(copies, reading, error, noted)
                else:
                    damaged, near = _damage_of(held, found), held.copies[0].tier == 0
                    further = [s for c, s in zip(copies, storages, strict=True) if c.tier]
                    return Loaded(
                        info=held.info,
                        saved=saved,
                        copy=copy,
                        storage=reading.storage,
                        damaged=damaged,
                        nearest_name=held.info.name if near else "",
                        sources=further,
                        # What else is damaged in a copy that was passed over as a whole is not known.
                        suspects=None if near and copy.tier else set(found.suspects),
                    )
        raise _worst(errors)

    def load_directory(
        self, request: LoadRequest, source: StateSource, storage: Storage | None = None
    ) -> SavedState:
        """Load one checkpoint directory; see `Load.run`.

        If damage is found on arrival, it is loaded once more, and verified before it is read into place.

        Raises:
            CorruptCheckpointError: it does not verify.
            UntrustedCheckpointError: it is not trusted.
            CheckpointNotFoundError: it was pruned while it was being read.
            OverwrittenError: storage failed half-way.
        """
        job = self._job if storage is None else replace(self._job, storage=storage)
        place = f"{job.storage.url}/{request.directory}"
        try:
            request = replace(request, manifest_sha256=self._accepted(job.storage, request.directory))
            for again in (False, True):
                try:
                    return Load(request, source, job, self.overwritten).run()
                except OverwrittenError as error:
                    request = self._verified_first(request, error, again=again)
            raise AssertionError  # not reached
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            if request.committed is None or self._is_there(job.storage, request.committed):
                raise
            raise CheckpointNotFoundError(
                f"{place} was pruned or replaced while it was being read; "
                "nothing was loaded. Load another one, or pin a checkpoint to keep it"
            ) from error
        except ArchivedError as error:
            raise archived(place, error) from error

    def _verified_first(self, request: LoadRequest, error: OverwrittenError, *, again: bool) -> LoadRequest:
        """Return the request by which to load once more what was damaged on arrival."""
        release(error)
        if not error.damaged:
            raise error
        if again:
            raise CorruptCheckpointError(str(error), failures=tuple(error.failures)) from error
        if self._job.coordinator.is_coordinator:
            _logger.error("%s; loading it once more, verified first", error)
        return replace(request, verification="full" if request.verification == "full" else "read")

    def _accepted(self, storage: Storage, name: str) -> str | None:
        """Return the SHA-256 of the trusted manifest; None without a judge."""
        if self._verify_manifest is None:
            return None
        return self._job.coordinator.run_on_coordinator(
            lambda: require_trusted(storage, name, self._verify_manifest),
            what="asking whether a checkpoint is trusted",
        )

    def _is_there(self, storage: Storage, info: CheckpointInfo) -> bool:
        """Return whether that checkpoint still has its name."""

        def find() -> bool:
            try:
                return Catalog(storage).marker(info.name).created == info.created
            except CheckpointNotFoundError:
                return False
            except CheckpointError:
                return True  # damaged, as the load found it

        return self._job.coordinator.run_on_coordinator(find, what="looking for a checkpoint")

    def _pass_over(
        self, copies: Sequence[TierCopy], reading: Reading, error: CheckpointError, noted: PassedOver | None
    ) -> bool:
        """Record and report a failure; return whether another copy can be read."""
        nearest = copies[reading.nearest]
        failures = error.failures if isinstance(error, CorruptCheckpointError) else ()
        found: dict[int, list[FileFailure]] = {}
        for failure in failures:
            found.setdefault(min(reading.copy_of(failure.path), len(copies) - 1), []).append(failure)
        there = reading.pass_over({failure.path for failure in failures})
        if noted is None:
            return there
        if isinstance(error, UntrustedCheckpointError):
            # Other jobs may trust it, so it is not marked.
            noted.untrusted[self._place(nearest)] = error.why
            self.report(
                nearest.tier, nearest.info.name, error.why, step=nearest.info.step, what="not trusted"
            )
        elif isinstance(error, CorruptCheckpointError):
            for copy, of_copy in [(copies[each], listed) for each, listed in found.items()] or [
                (nearest, [])
            ]:
                problem = shortened(of_copy) or str(error)
                if not copy.tier:
                    noted.suspects.update(failure.path for failure in of_copy)
                before = noted.damaged[copy.tier].get(copy.info.name)
                noted.damaged[copy.tier][copy.info.name] = f"{before}; {problem}" if before else problem
                self.report(copy.tier, copy.info.name, problem, step=copy.info.step)
        return there

    def report(self, tier: int, name: str, problem: str, *, step: int | None, what: str = "damaged") -> None:
        """Log on the coordinator, and in telemetry, that a copy is passed over."""
        which = {} if len(self._tiers) == 1 else {"tier": self._tiers[tier].label}
        self._job.telemetry.point("load.rejected", name=name, step=step, failures=problem, **which)
        if self._job.coordinator.is_coordinator:
            url = self._tiers[tier].storage.url
            _logger.error("%s/%s is committed but %s (%s) and is passed over", url, name, what, problem)

    def _details(self, copy: TierCopy) -> dict[str, Any]:
        info = copy.info
        own = {"step": info.step, "name": info.name, "size_bytes": info.size_bytes}
        return {**own, "tier": self._tiers[copy.tier].label, "rank": self._job.coordinator.rank}

    def _place(self, copy: TierCopy) -> str:
        name = copy.info.name
        return name if len(self._tiers) == 1 else f"{self._tiers[copy.tier].storage.url}/{name}"


def _equal(copies: Sequence[TierCopy]) -> Iterator[Sequence[TierCopy]]:
    """Divide copies into runs of equal ones: of the same name and manifest."""
    for _, equal in groupby(copies, key=lambda copy: (copy.info.name, copy.info.manifest_sha256)):
        yield list(equal)


def _damage_of(held: Held, passed_over: PassedOver) -> dict[int, str]:
    return {
        copy.tier: problem
        for copy in held.copies
        if (problem := passed_over.damaged[copy.tier].get(copy.info.name)) is not None
    }


def _worst(errors: Sequence[CheckpointError]) -> CheckpointError:
    """Return the nearest copy's error; one of damage before one of a prune."""
    return next((e for e in errors if not isinstance(e, CheckpointNotFoundError)), errors[0])


def archived(place: str, error: ArchivedError) -> ArchivedError:
    """Tell what an archived checkpoint means for a load."""
    return error.retold(
        f"{place}: {error}. Nothing was loaded, and nothing older was tried, because this one is whole; to "
        "continue from an older one nevertheless, load it by step= or name="
    )


def shortened(failures: Sequence[FileFailure]) -> str:
    """Return the first few failures in one line."""
    return "; ".join(str(failure) for failure in failures[:_MOST_LISTED])
