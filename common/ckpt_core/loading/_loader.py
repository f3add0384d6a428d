"""The choice of a checkpoint, the newest that verifies, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from ckpt_core.commit import Catalog, Survey, describe, file_as_root, look_around, require_trusted
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    PartialCheckpointError,
    UntrustedCheckpointError,
)
from ckpt_core.loading._checkpoint import is_stock
from ckpt_core.loading._load import Load, LoadRequest
from ckpt_core.names import MARKER, is_incomplete, is_trash, parse_step_name
from ckpt_core.options import VerifyManifest
from ckpt_core.root import Job
from ckpt_core.state import StateSource
from ckpt_core.types import CheckpointInfo, SavedState

_logger = logger_of(__name__)

_MOST_PRUNED: Final = 8
"""Attempts, each ended by a prune of the chosen checkpoint, before the last one."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """The result of `Loader.newest`."""

    info: CheckpointInfo
    saved: SavedState


@final
class Loader:
    """The loads of one manager. Methods are collective unless they say otherwise.

    Args:
        job: storage, ranks and telemetry.
        verify_manifest: judges every checkpoint before it is read; None to trust all.
    """

    def __init__(self, job: Job, *, verify_manifest: VerifyManifest | None = None) -> None:
        self._job = job
        self._storage = job.storage
        self._coordinator = job.coordinator
        self._telemetry = job.telemetry
        self._verify_manifest = verify_manifest

    def newest(
        self,
        request: LoadRequest,
        source: StateSource,
        *,
        note_damaged: Callable[[Mapping[str, str]], None] | None = None,
    ) -> Loaded | None:
        """Load the newest committed checkpoint that verifies and is trusted.

        Others are reported and passed over. A checkpoint that was marked as damaged before is tried as any
        other: a mark may be wrong. If the job that owns the root prunes one while it is being read, there is
        a newer one, which is tried next.

        Args:
            request: the options; its directory is ignored.
            source: the live state to load into.
            note_damaged: called with the names of checkpoints that did not verify, and their problems.

        Returns:
            The loaded checkpoint; None if nothing has been committed.

        Raises:
            CorruptCheckpointError: every committed checkpoint is damaged; nothing was touched.
            UntrustedCheckpointError: the same, and some of them are whole but not trusted.
            LoadError: a checkpoint could not be judged; nothing was touched.
            IncompatibleCheckpointError: the newest is of another state, or a possibly newer one was written
                by a newer version; nothing was touched.
            CheckpointNotFoundError: the chosen checkpoint was pruned too often; nothing was touched.
        """
        for _ in range(_MOST_PRUNED):
            try:
                return self._try_newest(request, source, note_damaged)
            except CheckpointNotFoundError as error:
                _logger.warning("%s; looking for a newer one", error)
        return self._try_newest(request, source, note_damaged)

    def _try_newest(
        self,
        request: LoadRequest,
        source: StateSource,
        note_damaged: Callable[[Mapping[str, str]], None] | None,
    ) -> Loaded | None:
        survey: Survey = self._coordinator.run_on_coordinator(self._survey, what="looking for checkpoints")
        damaged, untrusted = _unreadable(survey), dict[str, str]()
        for name, problem in damaged.items():
            self._report(name, parse_step_name(name), problem)
        for info in self._not_bad(survey):
            _refuse_newer(survey, self._storage.url, than=info.step)
            try:
                saved = self.load(replace(request, directory=info.name, committed=info), source)
            except (CorruptCheckpointError, UntrustedCheckpointError) as error:
                self._pass_over(info, error, damaged, untrusted)
            else:
                if damaged and note_damaged is not None:
                    note_damaged(damaged)
                self._report_parts(survey, newer_than=info.step)
                return Loaded(info=info, saved=saved)
        _refuse_newer(survey, self._storage.url, than=-1)
        if damaged and note_damaged is not None:
            note_damaged(damaged)
        if damaged or survey.committed:
            kind = UntrustedCheckpointError if untrusted else CorruptCheckpointError
            raise kind(_nothing_usable(self._storage.url, survey, damaged, untrusted))
        _refuse_parts(survey, self._storage.url)
        return None

    def locate(self, request: LoadRequest, *, step: int | None, name: str | None) -> LoadRequest:
        """Set the request's directory to that of a checkpoint by step or name.

        Raises:
            CheckpointNotFoundError: there is no such checkpoint.
        """
        found = self._coordinator.run_on_coordinator(
            lambda: self._existing(step, name), what="looking for a checkpoint"
        )
        if isinstance(found, CheckpointInfo):
            return replace(request, directory=found.name, committed=found)
        return replace(request, directory=found)

    def load(self, request: LoadRequest, source: StateSource) -> SavedState:
        """Load one checkpoint directory; see `Load.run`.

        Raises:
            CorruptCheckpointError: it does not verify; nothing was touched.
            UntrustedCheckpointError: it is not trusted; nothing was touched.
            CheckpointNotFoundError: it was pruned while it was being read; nothing was touched.
        """
        try:
            request = replace(request, manifest_sha256=self._accepted(request.directory))
            return Load(request, source, self._job).run()
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            if request.committed is None or self._is_there(request.committed):
                raise
            raise CheckpointNotFoundError(
                f"{self._storage.url}/{request.directory} was pruned or replaced while it was being read; "
                "nothing was loaded. Load another one, or pin a checkpoint to keep it"
            ) from error
        except ArchivedError as error:
            raise _archived(f"{self._storage.url}/{request.directory}", error) from error

    def _accepted(self, name: str) -> str | None:
        """Return the SHA-256 of the trusted manifest; None without a judge."""
        if self._verify_manifest is None:
            return None
        return self._coordinator.run_on_coordinator(
            lambda: require_trusted(self._storage, name, self._verify_manifest),
            what="asking whether a checkpoint is trusted",
        )

    def _is_there(self, info: CheckpointInfo) -> bool:
        """Return whether that checkpoint still has its name."""

        def find() -> bool:
            try:
                return Catalog(self._storage).marker(info.name).created == info.created
            except CheckpointNotFoundError:
                return False
            except CheckpointError:
                return True  # damaged, as the load found it

        return self._coordinator.run_on_coordinator(find, what="looking for a checkpoint")

    def log_surroundings(self, loaded: Loaded | None) -> None:
        """Log other content of the root if nothing, or an older checkpoint, was resumed."""
        if not self._coordinator.is_coordinator:
            return
        url = self._storage.url
        try:
            known = [info.name for info in Catalog(self._storage).committed(abandoned=True)] if loaded else ()
            around = look_around(self._storage, known=known)
        except (CheckpointError, OSError) as error:
            _logger.warning("%s could not be listed: %s", url, error)
            return
        if loaded is None:
            if advice := around.advice(url):
                _logger.warning(
                    "training starts afresh, because nothing is committed in %s; but %s",
                    url,
                    "; ".join(advice),
                )
            else:
                _logger.info("training starts afresh: %s holds no checkpoint yet", url)
            return
        for names, why in (
            (around.unmarked, f"without {MARKER}: torn, or it was lost"),
            (around.links, "a symbolic link, which does not count"),
        ):
            newer = [name for name in names if (parse_step_name(name) or 0) > loaded.info.step]
            if newer:
                _logger.warning(
                    "step %d was resumed, although %s holds %s, newer but %s",
                    loaded.info.step, url, ", ".join(newer), why,
                )  # fmt: skip

    def not_found_error(self) -> CheckpointNotFoundError:
        """Make the error of a root without checkpoints, with its content. Not collective."""
        text = f"nothing has been committed to {self._storage.url} yet"
        return CheckpointNotFoundError(
            "; ".join([text, *look_around(self._storage).advice(self._storage.url)])
        )

    def _survey(self) -> Survey:
        try:
            survey = Catalog(self._storage).survey()
        except NotADirectoryError:
            raise file_as_root(self._storage.url) from None
        for error in survey.unreadable.values():
            if isinstance(error, OSError) and not isinstance(error, ArchivedError):
                # A failure of storage, not damage. An older checkpoint instead would lose work silently.
                raise error
        return survey

    def _existing(self, step: int | None, name: str | None) -> CheckpointInfo | str:
        storage = self._storage
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

    def _not_bad(self, survey: Survey) -> Iterator[CheckpointInfo]:
        """Yield the present lineage's checkpoints, newest first, but those marked as bad."""
        for info in reversed(survey.committed):
            if info.bad is None:
                yield info
                continue
            self._telemetry.point("load.rejected", name=info.name, step=info.step, failures=info.bad)
            if self._coordinator.is_coordinator:
                _logger.warning(
                    "%s/%s is marked as bad (%s) and is passed over", self._storage.url, info.name, info.bad
                )

    def _pass_over(
        self,
        info: CheckpointInfo,
        error: CorruptCheckpointError | UntrustedCheckpointError,
        damaged: dict[str, str],
        untrusted: dict[str, str],
    ) -> None:
        """Report why a checkpoint is passed over, and record it as damaged or untrusted."""
        if isinstance(error, UntrustedCheckpointError):
            # Other jobs may trust it, so it is not marked.
            untrusted[info.name] = error.why
            self._report(info.name, info.step, error.why, what="not trusted")
        else:
            damaged[info.name] = _shorten(error.failures) or str(error)
            self._report(info.name, info.step, damaged[info.name])

    def _report_parts(self, survey: Survey, *, newer_than: int) -> None:
        """Log newer checkpoints of which the disks of these nodes hold a part only."""
        for name, part in _parts(survey).items():
            if (parse_step_name(name) or 0) > newer_than and self._coordinator.is_coordinator:
                _logger.error("%s/%s is %s; it is passed over", self._storage.url, name, part)

    def _report(self, name: str, step: int | None, problem: str, *, what: str = "damaged") -> None:
        self._telemetry.point("load.rejected", name=name, step=step, failures=problem)
        if self._coordinator.is_coordinator:
            _logger.error(
                "%s/%s is committed but %s (%s) and is passed over", self._storage.url, name, what, problem
            )


def _nothing_usable(url: str, survey: Survey, damaged: Collection[str], untrusted: Mapping[str, str]) -> str:
    bad = [info.name for info in survey.committed if info.bad is not None]
    groups = (("damaged", damaged), ("not trusted", untrusted), ("marked as bad", bad))
    what = " or ".join(word for word, some in groups if some)
    text = (
        f"every committed checkpoint in {url} is {what}: {', '.join([*damaged, *untrusted, *bad])}. Nothing "
        "was loaded; look at each with `ckpt verify`, restore one from a copy, or start in another root"
    )
    if untrusted:
        text += f". Why it is not trusted: {next(iter(untrusted.values()))}"
    if bad:
        text += ", or remove a mark with `ckpt mark ROOT@STEP good`"
    abandoned = ", ".join(info.name for info in survey.abandoned)
    return text + (f". An earlier run left {abandoned}, each to be loaded by its name" if abandoned else "")


def _unreadable(survey: Survey) -> dict[str, str]:
    """List checkpoints with damaged markers; see also `_refuse_newer`, `_parts`."""
    return {
        name: str(error)
        for name, error in survey.unreadable.items()
        if not isinstance(error, ArchivedError | PartialCheckpointError)
    }


def _parts(survey: Survey) -> dict[str, PartialCheckpointError]:
    """List checkpoints of which the disks of these nodes hold a part only."""
    return {
        name: error for name, error in survey.unreadable.items() if isinstance(error, PartialCheckpointError)
    }


def _refuse_parts(survey: Survey, url: str) -> None:
    """Refuse to start afresh where only parts of checkpoints are found."""
    for name, part in reversed(_parts(survey).items()):
        raise part.retold(
            f"{url}/{name} is {part}. Nothing was loaded: start on the nodes that saved it, or in "
            "another root"
        )


def _refuse_newer(survey: Survey, url: str, *, than: int) -> None:
    """Refuse to pass over whole checkpoints of a newer version or in an archive."""
    for name, error in survey.unreadable.items():
        step = parse_step_name(name)
        if step is not None and step <= than:
            continue
        if isinstance(error, IncompatibleCheckpointError):
            raise IncompatibleCheckpointError(f"{url}/{name}: {error}. Nothing was loaded") from error
        if isinstance(error, ArchivedError):
            raise _archived(f"{url}/{name}", error) from error


def _archived(place: str, error: ArchivedError) -> ArchivedError:
    return error.retold(
        f"{place}: {error}. Nothing was loaded, and nothing older was tried, because this one is whole; to "
        "continue from an older one nevertheless, load it by step= or name="
    )


def _shorten(failures: Sequence[FileFailure]) -> str:
    return "; ".join(str(failure) for failure in failures[:5])
