"""The choice of a checkpoint, the newest that verifies, and of its nearest copy."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, groupby
from typing import Any, Final, final

from ckpt_core.commit import (
    Catalog,
    Occupant,
    Survey,
    content_of,
    describe,
    file_as_root,
    look_around,
    require_trusted,
)
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    CoordinationError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    LoadError,
    OverwrittenError,
    PartialCheckpointError,
    UntrustedCheckpointError,
    failure_text,
)
from ckpt_core.loading._checkpoint import is_stock
from ckpt_core.loading._load import Load, LoadRequest, Overwritten
from ckpt_core.names import MARKER, can_count, chunks_name, is_incomplete, is_trash, parse_step_name
from ckpt_core.options import Verify, VerifyManifest
from ckpt_core.root import Job
from ckpt_core.state import StateSource
from ckpt_core.storage import Storage, around, open_storage
from ckpt_core.tiers import Held, Reading, Tier, TierCopy, United, unite
from ckpt_core.types import CheckpointInfo, SavedState

_logger = logger_of(__name__)

_MOST_PRUNED: Final = 8
"""How often the chosen checkpoint may be pruned before it is read."""
_MOST_LISTED: Final = 5


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A checkpoint that was loaded.

    Attributes:
        info: the checkpoint, by its name in the nearest tier that has it.
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
class _PassedOver:
    """The checkpoints and copies that a load has passed over.

    Attributes:
        damaged: for each tier, name -> problem.
        untrusted: place -> why it is not trusted.
    """

    damaged: Sequence[dict[str, str]]
    suspects: set[str] = field(default_factory=set[str])
    untrusted: dict[str, str] = field(default_factory=dict[str, str])


@final
class Loader:
    """The loads of one manager. Methods are collective unless they say otherwise."""

    def __init__(
        self, job: Job, *, tiers: Sequence[Tier] = (), verify_manifest: VerifyManifest | None = None
    ) -> None:
        self._tiers = tuple(tiers) or (Tier(job.storage.url, job.storage),)
        self._job = job
        self._coordinator = job.coordinator
        self._telemetry = job.telemetry
        self._verify_manifest = verify_manifest
        self.overwritten = Overwritten()

    @property
    def _url(self) -> str:
        return " and ".join(tier.storage.url for tier in self._tiers)

    def newest(
        self,
        request: LoadRequest,
        source: StateSource,
        *,
        note_damaged: Callable[[Mapping[str, str]], None] | None = None,
    ) -> Loaded | None:
        """Load the newest committed checkpoint that verifies and is trusted.

        Others are reported and passed over. Where one was found to be damaged after live tensors had been
        overwritten, the next must overwrite all of these, or is passed over, too. A checkpoint that was
        marked as damaged before is tried as any other: a mark may be wrong. If the job that owns the root
        prunes one while it is being read, there is a newer one, which is tried next. With several tiers, a
        checkpoint is read from the nearest that has it, and what is damaged there from the next, before an
        older one is tried.

        `note_damaged` is called with the names of checkpoints of the nearest tier that did not verify, and
        their problems; those of other tiers are marked there. Nothing is returned if nothing is committed.
        Errors are those of `CheckpointManager.resume`; of `one`, those of `load`.
        """
        with _telling(self.overwritten):
            for often in count():
                surveys = self._complete(self._surveys())
                union, passed_over = unite(surveys), _PassedOver([_unreadable(survey) for survey in surveys])
                loaded: Loaded | None = None
                try:
                    for held in self._candidates(surveys, union, passed_over):
                        with (
                            suppress(CorruptCheckpointError, UntrustedCheckpointError),
                            _misfits_of(held, self._job, self.overwritten),
                        ):
                            loaded = self._load(held, request, source, passed_over)
                            break
                except CheckpointNotFoundError as error:
                    if often == _MOST_PRUNED:
                        raise
                    _logger.warning("%s; looking for a newer one", error)
                    continue
                if note_damaged is not None:
                    self._mark(union, passed_over, note_damaged)
                if loaded is None and (any(passed_over.damaged) or union.committed or union.weights):
                    some = any(passed_over.damaged) or union.committed
                    kind = CorruptCheckpointError if some else IncompatibleCheckpointError
                    raise (UntrustedCheckpointError if passed_over.untrusted else kind)(
                        _nothing_usable(self._url, union, passed_over)
                    )
                self._note_parts(surveys, loaded)
                return None if loaded is None else replace(loaded, surveys=surveys)
        raise AssertionError  # not reached: there is no end of counting

    def one(
        self, request: LoadRequest, source: StateSource, *, step: int | None, name: str | None
    ) -> tuple[SavedState, CheckpointInfo | None]:
        """Load a checkpoint by step or name, also a directory that stock DCP wrote.

        Return its content, and the checkpoint; None if stock DCP wrote it.
        """
        with _telling(self.overwritten):
            found = self._find(step, name)
            if isinstance(found, Held):
                loaded = self._load(found, request, source)
                return loaded.saved, loaded.info
            tier, directory = found
            one = replace(request, directory=directory)
            return self._load_directory(one, source, self._tiers[tier].storage), None

    def elsewhere(
        self, request: LoadRequest, source: StateSource, place: str, options: Mapping[str, Any]
    ) -> SavedState:
        """Load what is at a place, a folder or a file, of whatever format that is known."""
        root, directory, file = self._coordinator.run_on_coordinator(
            lambda: find_source(place, options), what="looking for a source"
        )
        with _telling(self.overwritten):
            one = replace(request, directory=directory, file=file)
            return self._load_directory(one, source, open_storage(root, options))

    def _find(self, step: int | None, name: str | None) -> Held | tuple[int, str]:
        """Find a checkpoint and its copies, or the tier and directory of stock DCP's."""
        surveys = self._surveys() if len(self._tiers) > 1 else []
        reached = [Survey(committed=[], unreadable={}) if isinstance(s, LoadError) else s for s in surveys]
        failures = [each for each in surveys if isinstance(each, LoadError)]
        if held := unite(reached).find(step=step, name=name):
            for failure in failures if self._coordinator.is_coordinator else ():
                _logger.warning("%s is loaded without having looked there: %s", held.info.name, failure)
            return held
        for failure in failures:
            raise failure

        def look() -> tuple[int, CheckpointInfo | str]:
            errors: list[CheckpointNotFoundError] = []
            for position, tier in enumerate(self._tiers):
                try:
                    return position, self._existing(tier.storage, step, name)
                except CheckpointNotFoundError as error:
                    errors.append(error)
            raise CheckpointNotFoundError("; ".join(map(str, errors)))

        position, other = self._coordinator.run_on_coordinator(look, what="looking for a checkpoint")
        return (position, other) if isinstance(other, str) else Held.alone(other, position)

    def log_surroundings(self, loaded: Loaded | None) -> None:
        """Log other content of the tiers if nothing, or an older checkpoint, was resumed."""
        if not self._coordinator.is_coordinator:
            return
        try:
            if loaded is not None:
                for tier, survey in zip(self._tiers, loaded.surveys, strict=True):
                    _log_newer(tier.storage, loaded.info.step, survey)
            elif advice := self._advice():
                _logger.warning(
                    "training starts afresh, because nothing is committed in %s; but %s",
                    self._url,
                    "; ".join(advice),
                )
            else:
                _logger.info("training starts afresh: %s holds no checkpoint yet", self._url)
        except (CheckpointError, OSError) as error:
            _logger.warning("%s could not be listed: %s", self._url, error)

    def _advice(self) -> list[str]:
        storages = [tier.storage for tier in self._tiers]
        return [line for storage in storages for line in look_around(storage).advice(storage.url)]

    def required(self, loaded: Loaded | None) -> Loaded:
        """Return what was loaded. Not collective."""
        if loaded is not None:
            return loaded
        raise CheckpointNotFoundError(
            "; ".join([f"nothing has been committed to {self._url} yet", *self._advice()])
        )

    def _surveys(self) -> list[Survey | LoadError]:
        """List every tier; an error for each but the nearest that cannot be listed."""
        nearest, *others = self._tiers

        def listed(tier: Tier) -> Survey | LoadError:
            try:
                return tier.survey()
            except OSError as error:
                return LoadError(f"{tier.label} could not be listed: {failure_text(error)}")

        surveys: list[Survey | LoadError] = [nearest.survey_for_all(self._coordinator)]
        for tier in others:
            find = partial(listed, tier)
            surveys.append(self._coordinator.run_on_coordinator(find, what="looking for checkpoints"))
        return surveys

    def _complete(self, surveys: Sequence[Survey | LoadError]) -> list[Survey]:
        """Return the surveys if none may lack what is newest."""
        complete = [survey for survey in surveys if isinstance(survey, Survey)]
        for survey in surveys:
            if isinstance(survey, LoadError):
                there = unite(complete).committed
                newest = f"; the newest known is step {there[-1].info.step}" if there else ""
                raise survey.retold(
                    f"{survey}. It may hold a newer checkpoint than the other tiers{newest}. Nothing was "
                    "loaded, for to go on from an older one would lose work; try again when it can be "
                    "reached, or load a checkpoint of another tier by its step or path"
                )
        for tier, survey in zip(self._tiers, complete, strict=True):
            for name, error in survey.unreadable.items():
                if isinstance(error, OSError) and not isinstance(error, ArchivedError):
                    raise LoadError(
                        f"{tier.label}/{name} may hold the newest checkpoint, and rank 0 could not read it: "
                        f"{failure_text(error)}. Nothing was loaded, for to go on from an older one would "
                        "lose work; make it readable for this user, or move it out of the root"
                    ) from error
        return complete

    def _existing(self, storage: Storage, step: int | None, name: str | None) -> CheckpointInfo | str:
        try:
            if (
                name is not None
                and not (is_incomplete(name) or is_trash(name))
                and not storage.exists(f"{name}/{MARKER}")
                and is_stock(storage, name)
            ):
                return name
            return Catalog(storage).find(step=step, name=name)
        except CheckpointNotFoundError as error:
            found = [describe(storage, name)] if name is not None and step is None else []
            advice = [each for each in found if each] or look_around(storage).advice(storage.url)
            raise CheckpointNotFoundError("; ".join([str(error), *advice])) from error
        except NotADirectoryError:
            if name is not None and (what := describe(storage, name)):
                raise CheckpointNotFoundError(f"{storage.url}/{name} is no checkpoint: {what}") from None
            raise file_as_root(storage.url) from None

    def _candidates(
        self, surveys: Sequence[Survey], union: United, passed_over: _PassedOver
    ) -> Iterator[Held]:
        """Yield the present lineage's checkpoints, newest first, but those marked as bad."""
        for tier, damaged in enumerate(passed_over.damaged):
            for name, problem in damaged.items():
                self._report(tier, name, problem, step=parse_step_name(name))
        for held in reversed(union.committed):
            info = held.info
            if info.bad is None:
                self._refuse_newer(surveys, than=info.step)
                yield held
                continue
            self._telemetry.point("load.rejected", name=info.name, step=info.step, failures=info.bad)
            if self._coordinator.is_coordinator:
                marked = next(copy for copy in held.copies if copy.info.bad is not None)
                place = f"{self._tiers[marked.tier].storage.url}/{marked.info.name}"
                _logger.warning("%s is marked as bad (%s) and is passed over", place, info.bad)
        self._refuse_newer(surveys, than=-1)

    def _mark(
        self, union: United, passed_over: _PassedOver, note_nearest: Callable[[Mapping[str, str]], None]
    ) -> None:
        """Mark damage in each tier, and every copy of what is marked as bad."""
        if passed_over.damaged[0]:
            note_nearest(passed_over.damaged[0])
        if not self._coordinator.is_coordinator:
            return
        for tier, damaged in zip(self._tiers[1:], passed_over.damaged[1:], strict=True):
            for name, problem in damaged.items():
                Catalog(tier.storage).remark(name, problem)
        for held in union.everything:
            for copy in held.copies if held.info.bad is not None else ():
                if copy.info.bad is None and not copy.part:
                    catalog = Catalog(self._tiers[copy.tier].storage)
                    catalog.remark(copy.info.name, str(held.info.bad), bad=True)

    def _note_parts(self, surveys: Sequence[Survey], loaded: Loaded | None) -> None:
        """Refuse to start afresh where parts of checkpoints are; log those passed over."""
        parts = (
            (name, error)
            for survey in surveys
            for name, error in sorted(survey.unreadable.items(), reverse=True)
            if isinstance(error, PartialCheckpointError)
        )
        for name, part in parts:
            if loaded is None:
                raise part.retold(
                    f"{self._url}/{name} is {part}. Nothing was loaded: start on the nodes that saved it, or "
                    "in another root"
                )
            newer = (parse_step_name(name) or 0) > loaded.info.step
            if newer and self._coordinator.is_coordinator:
                _logger.error("%s/%s is %s; it is passed over", self._url, name, part)

    def _refuse_newer(self, surveys: Sequence[Survey], *, than: int) -> None:
        """Refuse to pass over whole checkpoints of a newer version or in an archive."""
        for tier, survey in zip(self._tiers, surveys, strict=True):
            for name, error in survey.unreadable.items():
                place, step = f"{tier.storage.url}/{name}", parse_step_name(name)
                if step is not None and step <= than:
                    continue
                if isinstance(error, IncompatibleCheckpointError):
                    raise IncompatibleCheckpointError(f"{place}: {error}. Nothing was loaded") from error
                if isinstance(error, ArchivedError):
                    raise _archived(place, error) from error

    def _load(
        self, held: Held, request: LoadRequest, source: StateSource, passed_over: _PassedOver | None = None
    ) -> Loaded:
        """Load a checkpoint from the nearest copy, what is damaged there from the next."""
        found = passed_over or _PassedOver([{} for _ in self._tiers])
        errors: list[CheckpointError] = []

        def same(copy: TierCopy) -> tuple[str, str]:
            return copy.info.name, copy.info.manifest_sha256

        for copies in (list(equal) for _, equal in groupby(held.copies, key=same)):
            storages = [self._tiers[c.tier].reading(c.info, self._coordinator) for c in copies]
            reading = Reading(copies[0].info.name, storages, part=copies[0].part)
            there = True
            while there:
                copy = copies[reading.nearest]
                one = replace(request, directory=copy.info.name, committed=copy.info)
                try:
                    with self._telemetry.span(
                        "load",
                        step=copy.info.step,
                        name=copy.info.name,
                        size_bytes=copy.info.size_bytes,
                        tier=self._tiers[copy.tier].label,
                        rank=self._coordinator.rank,
                    ):
                        saved = self._load_directory(one, source, reading.storage)
                except (CorruptCheckpointError, UntrustedCheckpointError, CheckpointNotFoundError) as error:
                    _release(error)
                    errors.append(error)
                    # Without a record the only copy's error is all there is to say.
                    noted = found if passed_over is not None or len(held.copies) > 1 else None
                    there = self._pass_over(copies, reading, error, noted)
                else:
                    near = held.copies[0].tier == 0
                    damaged = {
                        each.tier: found.damaged[each.tier][each.info.name]
                        for each in held.copies
                        if each.info.name in found.damaged[each.tier]
                    }
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
        # The nearest copy's error; one of damage before one of a prune.
        raise next((e for e in errors if not isinstance(e, CheckpointNotFoundError)), errors[0])

    def _load_directory(self, request: LoadRequest, source: StateSource, storage: Storage) -> SavedState:
        """Load one checkpoint directory; tell damage from a prune meanwhile."""
        job = replace(self._job, storage=storage)
        place = f"{job.storage.url}/{request.directory}"
        try:
            request = replace(request, manifest_sha256=self._accepted(job.storage, request.directory))
            return self._run(request, source, job)
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            if request.committed is None or self._is_there(job.storage, request.committed):
                raise
            raise CheckpointNotFoundError(
                f"{place} was pruned or replaced while it was being read; "
                "nothing was loaded. Load another one, or pin a checkpoint to keep it"
            ) from error
        except ArchivedError as error:
            raise _archived(place, error) from error

    def _run(self, request: LoadRequest, source: StateSource, job: Job) -> SavedState:
        """Load; what is damaged on arrival once more, verified first."""
        try:
            return Load(request, source, job, self.overwritten).run()
        except OverwrittenError as error:
            _release(error)
            if not error.damaged:
                raise
            text = str(error)
        if self._coordinator.is_coordinator:
            _logger.error("%s; loading it once more, verified first", text)
        verification: Verify = "full" if request.verification == "full" else "read"
        try:
            return Load(replace(request, verification=verification), source, job, self.overwritten).run()
        except OverwrittenError as error:
            _release(error)
            if error.damaged:
                raise CorruptCheckpointError(str(error), failures=tuple(error.failures)) from error
            raise

    def _accepted(self, storage: Storage, name: str) -> str | None:
        """Return the SHA-256 of the trusted manifest; None without a judge."""
        if self._verify_manifest is None:
            return None
        return self._coordinator.run_on_coordinator(
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

        return self._coordinator.run_on_coordinator(find, what="looking for a checkpoint")

    def _pass_over(
        self, copies: Sequence[TierCopy], reading: Reading, error: CheckpointError, noted: _PassedOver | None
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
            name, step = nearest.info.name, nearest.info.step
            url = self._tiers[nearest.tier].storage.url
            noted.untrusted[name if len(self._tiers) == 1 else f"{url}/{name}"] = error.why
            self._report(nearest.tier, name, error.why, step=step, what="not trusted")
        elif isinstance(error, CorruptCheckpointError):
            for copy, of_copy in [(copies[each], listed) for each, listed in found.items()] or [
                (nearest, [])
            ]:
                problem = "; ".join(map(str, of_copy[:_MOST_LISTED])) or str(error)
                if not copy.tier:
                    noted.suspects.update(failure.path for failure in of_copy)
                before = noted.damaged[copy.tier].get(copy.info.name)
                noted.damaged[copy.tier][copy.info.name] = f"{before}; {problem}" if before else problem
                self._report(copy.tier, copy.info.name, problem, step=copy.info.step)
        return there

    def _report(self, tier: int, name: str, problem: str, *, step: int | None, what: str = "damaged") -> None:
        """Log on the coordinator, and in telemetry, that a copy is passed over."""
        which = {} if len(self._tiers) == 1 else {"tier": self._tiers[tier].label}
        self._telemetry.point("load.rejected", name=name, step=step, failures=problem, **which)
        if self._coordinator.is_coordinator:
            url = self._tiers[tier].storage.url
            _logger.error("%s/%s is committed but %s (%s) and is passed over", url, name, what, problem)


def find_source(place: str | os.PathLike[str], options: Mapping[str, Any]) -> tuple[str, str, str]:
    """Find the newest checkpoint of a run of ours, or what others wrote; as `around`.

    Raises:
        CheckpointNotFoundError: there is nothing, or a checkpoint that was never committed.
    """
    root, directory, file = around(place, options)
    storage = open_storage(root, options)
    kind = Occupant.FILES if file else content_of(storage, directory)
    # An export for DCP has small files of ranks, too. Each save of ours has chunk tables, before its index.
    torn = kind is Occupant.TORN and storage.exists(f"{directory}/{chunks_name(0)}")
    if torn or not can_count(directory):
        raise CheckpointNotFoundError(
            f"{storage.url}/{directory} is a checkpoint that was never committed: its save was interrupted, "
            "or goes on. Nothing was read"
        )
    if kind is not Occupant.COMMITTED and not file:
        run = f"{root}/{directory}"
        if (newest := Catalog(open_storage(run, options)).latest()) is not None:
            return run, newest.name, ""
    return root, directory, file


@contextmanager
def _misfits_of(held: Held, job: Job, overwritten: Overwritten) -> Generator[None]:
    """Pass over a checkpoint that does not fit, if any is better than what is live."""
    left = overwritten.error is not None
    try:
        yield
    except IncompatibleCheckpointError as error:
        if not any(job.coordinator.gather(left, what="passing over a checkpoint")):
            raise
        info = held.info
        job.telemetry.point("load.rejected", name=info.name, step=info.step, failures=str(error))
        if job.coordinator.is_coordinator:
            _logger.error("%s is passed over: %s", info.name, error)  # noqa: TRY400 - another is tried


@contextmanager
def _telling(overwritten: Overwritten) -> Generator[None]:
    """Tell in every error of a load what one that failed half-way has left."""
    try:
        yield
    except (ConfigError, CoordinationError, OverwrittenError):
        raise
    except CheckpointError as error:
        if (left := overwritten.error) is None:
            raise
        raise left.retold(f"{left}; and nothing could be loaded in its place: {error}") from error


def _log_newer(storage: Storage, step: int, survey: Survey) -> None:
    """Warn of what may have been a newer checkpoint than the one of a step."""
    survey.log_unreadable(storage.url)
    around = look_around(storage, known=[info.name for info in survey.everything])
    for names, why in (
        (around.unmarked, f"without {MARKER}: torn, or it was lost"),
        (around.links, "a symbolic link, which does not count"),
    ):
        newer = [name for name in names if (parse_step_name(name) or 0) > step]
        if newer:
            _logger.warning(
                "step %d was resumed, although %s holds %s, newer but %s",
                step, storage.url, ", ".join(newer), why,
            )  # fmt: skip


def _unreadable(survey: Survey) -> dict[str, str]:
    """List checkpoints with damaged markers; for others see `_refuse_newer`."""
    return {
        name: str(error)
        for name, error in survey.unreadable.items()
        if not isinstance(error, ArchivedError | IncompatibleCheckpointError | PartialCheckpointError)
    }


def _nothing_usable(url: str, union: United, passed_over: _PassedOver) -> str:
    damaged = list(dict.fromkeys(name for of_tier in passed_over.damaged for name in of_tier))
    untrusted = passed_over.untrusted
    bad = [held.info.name for held in union.committed if held.info.bad is not None]
    weights = [held.info.name for held in union.weights]
    groups = {
        "damaged": damaged,
        "not trusted": list(untrusted),
        "marked as bad": bad,
        "weights alone": weights,
    }
    what = " or ".join(word for word, some in groups.items() if some)
    named = ", ".join(name for some in groups.values() for name in some)
    text = (
        f"every committed checkpoint in {url} is {what}: {named}. Nothing was loaded; look at each "
        "with `ckpt verify`, restore one from a copy, or start in another root"
    )
    if untrusted:
        text += f". Why it is not trusted: {next(iter(untrusted.values()))}"
    if bad:
        text += ", or remove a mark with `ckpt mark ROOT@STEP good`"
    if weights:
        text += f", with the weights as init_from={f'{url}/{weights[-1]}'!r}"
    abandoned = ", ".join(info.name for info in union.infos if info.abandoned)
    return text + (f". An earlier run left {abandoned}, each to be loaded by its name" if abandoned else "")


def _archived(place: str, error: ArchivedError) -> ArchivedError:
    """Tell what an archived checkpoint means for a load."""
    return error.retold(
        f"{place}: {error}. Nothing was loaded, and nothing older was tried, because this one is whole; to "
        "continue from an older one nevertheless, load it by step= or name="
    )


def _release(error: BaseException | None) -> None:
    """Free the memory that an exception, and those before it, keep in their frames."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
