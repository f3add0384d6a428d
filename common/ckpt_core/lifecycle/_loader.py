"""Which checkpoint to load: the newest committed one that verifies, the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

from ckpt_core.commit import Catalog, Survey, describe, file_as_root, look_around, require_trusted
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    ArchivedError,
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    UntrustedCheckpointError,
)
from ckpt_core.lifecycle._load import LoadRequest, load
from ckpt_core.lifecycle._open import is_stock
from ckpt_core.names import MARKER, is_incomplete, is_trash, parse_step_name
from ckpt_core.options import VerifyManifest
from ckpt_core.state import StateSource
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CheckpointInfo, SavedState

_logger = logger_of(__name__)

_MOST_PRUNED: Final = 8
"""So often what was chosen may be pruned before it is read."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What `Loader.newest` has loaded."""

    info: CheckpointInfo
    saved: SavedState


@final
class Loader:
    """Finds, verifies and loads checkpoints. Every method is collective.

    Args:
        storage: the root.
        coordinator: the ranks of the job.
        telemetry: receives spans.
        verify_manifest: judges every checkpoint before it is read; None if none is judged.
    """

    def __init__(
        self,
        storage: Storage,
        coordinator: Coordinator,
        telemetry: Telemetry,
        *,
        verify_manifest: VerifyManifest | None = None,
    ) -> None:
        self._storage = storage
        self._verify_manifest = verify_manifest
        self._coordinator = coordinator
        self._telemetry = telemetry

    def newest(
        self,
        request: LoadRequest,
        source: StateSource,
        *,
        note_damaged: Callable[[Mapping[str, str]], None] | None = None,
    ) -> Loaded | None:
        """Load the newest committed checkpoint that verifies; one that does not is reported and passed over.

        So is one that is not trusted.

        A checkpoint that was marked as damaged before is tried as any other: a mark may be wrong. If the
        job that owns the root prunes one while it is being read, there is a newer one: that is looked for.

        Args:
            request: how to load; its directory does not count.
            source: what to load into.
            note_damaged: told which checkpoints did not verify, and why.

        Returns:
            What was loaded; None if nothing has been committed.

        Raises:
            CorruptCheckpointError: checkpoints are there, and every one is damaged; nothing was touched.
            UntrustedCheckpointError: the same, and some of them are whole but not trusted.
            LoadError: nobody could tell whether one is trusted; nothing was touched.
            IncompatibleCheckpointError: the newest is of another state, or what may be the newest was written
                by a newer version; nothing was touched.
            CheckpointNotFoundError: time and again what was chosen was pruned; nothing was touched.
        """
        for _ in range(_MOST_PRUNED):
            try:
                return self._newest(request, source, note_damaged)
            except CheckpointNotFoundError as error:
                _logger.warning("%s; looking for a newer one", error)
        return self._newest(request, source, note_damaged)

    def _newest(
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
                return Loaded(info=info, saved=saved)
        _refuse_newer(survey, self._storage.url, than=-1)
        if damaged and note_damaged is not None:
            note_damaged(damaged)
        if damaged or survey.committed:
            kind = UntrustedCheckpointError if untrusted else CorruptCheckpointError
            raise kind(_nothing_usable(self._storage.url, survey, damaged, untrusted))
        return None

    def locate(self, request: LoadRequest, *, step: int | None, name: str | None) -> LoadRequest:
        """The request, for the directory of the checkpoint asked for.

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
        """Load one checkpoint directory; see `load`.

        Raises:
            CorruptCheckpointError: it does not verify; nothing was touched.
            UntrustedCheckpointError: it is not trusted; nothing was touched.
            CheckpointNotFoundError: it was pruned while it was being read; nothing was touched.
        """
        try:
            return load(
                replace(request, manifest_sha256=self._accepted(request.directory)),
                source,
                storage=self._storage,
                coordinator=self._coordinator,
                telemetry=self._telemetry,
            )
        except (CorruptCheckpointError, CheckpointNotFoundError) as error:
            if request.committed is None or self._is_there(request.committed):
                raise
            raise CheckpointNotFoundError(
                f"{self._storage.url}/{request.directory} was pruned or replaced while it was being read; "
                "nothing was loaded. Load another, or pin what is to stay"
            ) from error
        except ArchivedError as error:
            raise _archived(f"{self._storage.url}/{request.directory}", error) from error

    def _accepted(self, name: str) -> str | None:
        """SHA-256 of the manifest, if it was judged and may be used; see `require_trusted`."""
        if self._verify_manifest is None:
            return None
        return self._coordinator.run_on_coordinator(
            lambda: require_trusted(self._storage, name, self._verify_manifest),
            what="asking whether a checkpoint is trusted",
        )

    def _is_there(self, info: CheckpointInfo) -> bool:
        """Whether the name still leads to that checkpoint."""

        def look() -> bool:
            try:
                return Catalog(self._storage).marker(info.name).created == info.created
            except CheckpointNotFoundError:
                return False
            except CheckpointError:
                return True  # then it is damaged, as was found

        return self._coordinator.run_on_coordinator(look, what="looking for a checkpoint")

    def tell_surroundings(self, loaded: Loaded | None) -> None:
        """Log what else the root holds, if nothing, or something older, was resumed."""
        if not self._coordinator.is_coordinator:
            return
        url = self._storage.url
        try:
            known = [info.name for info in Catalog(self._storage).committed(abandoned=True)] if loaded else ()
            around = look_around(self._storage, known=known)
        except (CheckpointError, OSError) as error:
            _logger.warning("%s could not be looked through: %s", url, error)
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

    def nothing_there(self) -> CheckpointNotFoundError:
        """The error for a root without checkpoints, saying what is there instead; not collective."""
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
                # Not damage: storage is unwell. An older checkpoint instead would lose work silently.
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
            told = [each for each in found if each] or look_around(storage).advice(storage.url)
            raise CheckpointNotFoundError("; ".join([str(error), *told])) from error
        except NotADirectoryError:
            if name is not None and (what := describe(storage, name)):
                raise CheckpointNotFoundError(f"{storage.url}/{name} is no checkpoint: {what}") from None
            raise file_as_root(storage.url) from None

    def _not_bad(self, survey: Survey) -> Iterator[CheckpointInfo]:
        """The checkpoints of the present lineage, newest first; those marked as bad are passed over."""
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
        """Tell why a checkpoint is not taken; others may trust one that is not trusted: it is not marked."""
        if isinstance(error, UntrustedCheckpointError):
            untrusted[info.name] = error.why
            self._report(info.name, info.step, error.why, what="not trusted")
        else:
            damaged[info.name] = _shorten(error.failures) or str(error)
            self._report(info.name, info.step, damaged[info.name])

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
        "was loaded; look at each with `ckpt verify`, bring one back from a copy, or start in another root"
    )
    if untrusted:
        text += f". Why it is not trusted: {next(iter(untrusted.values()))}"
    if bad:
        text += ", or take a mark away with `ckpt mark ROOT@STEP good`"
    left = ", ".join(info.name for info in survey.abandoned)
    return text + (f". An earlier run left {left}, each to be loaded by its name" if left else "")


def _unreadable(survey: Survey) -> dict[str, str]:
    """What is damaged so that its marker cannot be read; what is archived is whole: see `_refuse_newer`."""
    return {
        name: str(error) for name, error in survey.unreadable.items() if not isinstance(error, ArchivedError)
    }


def _refuse_newer(survey: Survey, url: str, *, than: int) -> None:
    """Refuse to pass over what a newer version wrote or an archive holds: it is whole, its work not lost."""
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
        "go on from an older one all the same, load it by step= or name="
    )


def _shorten(failures: Sequence[FileFailure]) -> str:
    return "; ".join(str(failure) for failure in failures[:5])
