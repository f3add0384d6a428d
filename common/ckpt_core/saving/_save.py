"""One save on one rank, from staged to committed, on the save thread."""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, cast, final

import torch

from ckpt_core._version import __version__
from ckpt_core.commit import ItemKind, Manifest, abandon, begin, commit, write_signature
from ckpt_core.coordination import CommitChannel
from ckpt_core.crew import settle
from ckpt_core.dcp import PlannedIndex, Replicas
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CoordinationError,
    DeadlineError,
    DivergenceError,
    Failure,
    SaveError,
    SavePhase,
)
from ckpt_core.formats.chunks import TableEntry, encode_table
from ckpt_core.groups import holders
from ckpt_core.names import MANIFEST, METADATA, SIGNATURE, chunks_name, is_own_file, twin_name
from ckpt_core.options import CheckpointOptions
from ckpt_core.provenance import code_version, software_versions
from ckpt_core.root import Job, Ownership, Pruner
from ckpt_core.saving._checks import StaleJudge, TrainedSlots, refuse_non_finite, trained_digests
from ckpt_core.saving._disk_space import DiskSpace, SpaceNeeded
from ckpt_core.saving._files import RankFiles
from ckpt_core.saving._in_flight import SaveHandle, SaveRequest, SaveThread, Task, failed_in, save_error
from ckpt_core.saving._plan_cache import KeepOwn, PlanCache
from ckpt_core.saving._reports import Evidence, Judge, RankReport, ReportCache
from ckpt_core.saving._stager import StagedParts
from ckpt_core.saving._twins import Partners, TwinSession
from ckpt_core.state import RankBuffers
from ckpt_core.storage import Throttle
from ckpt_core.types import CheckpointInfo, FileEntry, Lineage, Provenance

_logger = logger_of(__name__)


@final
class Means:
    """What the saves of one manager share.

    `held_back` is the checkpoint whose prune left out what uploads hold.
    """

    def __init__(
        self,
        job: Job,
        thread: SaveThread,
        options: CheckpointOptions,
        *,
        ownership: Ownership,
        pruner: Pruner,
    ) -> None:
        self.storage, self.telemetry = job.storage, job.telemetry
        self.thread, self.options, self.ownership, self.pruner = thread, options, ownership, pruner
        rate = options.write_bytes_per_second
        self.reports = ReportCache(pace=None if rate is None else Throttle(rate), algorithm=options.checksum)
        self.partners = (
            None if options.replicas == 1 else Partners(job.storage, self.reports, options.deadline_seconds)
        )
        self.plans = PlanCache(options.on_divergence)
        self.judge, self.stale = Judge(options.on_divergence), StaleJudge(options.on_stale)
        self.sign = options.manifest_signer
        self.space = DiskSpace(job.storage, options, ownership, pruner)
        self.held_back: CheckpointInfo | None = None
        self.last: int | None = None

    def prune(self, info: CheckpointInfo) -> None:
        deadline = time.monotonic() + self.options.deadline_seconds / 2

        def go_on() -> bool:
            self.thread.heartbeat("verifying the checkpoints to keep before older ones are removed")
            return not self.thread.waiting and time.monotonic() < deadline

        self.held_back, self.last = info if self.ownership.held else None, info.step
        self.apply_retention(info, go_on)

    def apply_retention(
        self, newest: CheckpointInfo | None, go_on: Callable[[], bool], *, until: float = 0.0
    ) -> None:
        """Remove what the policy does not keep; log what fails."""
        last = self.last if newest is None else newest.step
        try:
            self.pruner.apply(newest=last, go_on=go_on, until=until)
        except (OSError, CheckpointError) as error:
            # The checkpoint is committed nevertheless; the next prune removes the rest.
            self.telemetry.point("prune.failed", error=str(error))
            _logger.warning("old checkpoints in %s were not all removed: %s", self.storage.url, error)


@final
@dataclass(kw_only=True, eq=False)
class Save(Task):
    """One save on one rank.

    Concurrency: `run` is called once, on the save thread, and uses no collective. `give_up` may be called on
    another thread meanwhile: from then on this rank reports its error and commits nothing.

    Attributes:
        working: the directory that it is written in; with the rest of its destination equal on every rank.
        created: when it was agreed on, Unix seconds on the coordinator's clock.
        files: name -> content of this rank's small files.
        metadata: part -> its index; on the coordinator only, like `lineage` and `replicas`.
        local: this rank's rank-local buffers, and `keeping` when it writes them.
        error: why this rank could not stage; it reports the error at the commit barrier instead of files.
        extra: upper bounds of what all ranks write beside planned tensors.
        evidence: fingerprints of this rank's replicas; None if they are not compared.
        replicas: part -> entries that several ranks hold.
        provenance: of the state; the commit adds what concerns the job.
        trained: what training changes of this rank's share; empty if it is not compared.
    """

    means: Means
    channel: CommitChannel
    request: SaveRequest
    save_id: str
    working: str
    created: float
    files: Mapping[str, bytes]
    metadata: Mapping[str, PlannedIndex]
    items: Mapping[str, str]
    local: RankBuffers = field(default_factory=lambda: RankBuffers({}))
    keeping: KeepOwn = KeepOwn.NEVER
    staged: StagedParts = field(default_factory=lambda: StagedParts(images={}, values={}, arena=None))
    optimizers: Sequence[Any] = ()
    lineage: Lineage = field(default_factory=Lineage)
    buffers: frozenset[tuple[str, str]] = frozenset()
    error: BaseException | None = None
    generation: int = 0
    extra: SpaceNeeded = field(default_factory=SpaceNeeded)
    evidence: Evidence | None = None
    replicas: Mapping[str, Sequence[Replicas]] = field(default_factory=dict[str, Sequence[Replicas]])
    provenance: Provenance = field(default_factory=Provenance)
    trained: TrainedSlots = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        super().__init__()
        self.handle = SaveHandle(self.request.step, self.request.name, self.created)
        self._storage, self._heartbeat = self.means.storage, self.means.thread.heartbeat
        self._deadline_seconds = self.means.thread.deadline_seconds
        # Exchanges with other ranks have their own deadlines; beyond this limit they count as hanging, too.
        self._patience_seconds = 3 * self._deadline_seconds + 10
        self._twins: TwinSession | None = None
        self._refusal: CheckpointError | None = None
        self._opened = False
        self._reference = b""
        self._silence: DeadlineError | None = None
        # The next phase, while an earlier save keeps this one from beginning.
        self._phase: SavePhase = "open"
        self._committing = False
        self._giving_up = threading.Lock()

    def run(self) -> None:
        """Write this rank's files, commit with all ranks and resolve the handle.

        Nothing is raised. A rank that failed still arrives at the commit barrier with its error, so that
        every rank learns of it.
        """
        means, partners = self.means, self.means.partners
        try:
            with nullcontext() if partners is None else partners.session(self.working) as self._twins:
                error = self._open(self._watch_copies())
                report = error or (self._write() if self._refusal is None else RankReport())
                self.staged.release()
                info = self._commit_with_all(report)
        except CheckpointError as error:
            settle(self.handle.committed, self._failed(error))
            return
        means.reports.committed()
        settle(self.handle.committed, info)
        if not self.channel.is_coordinator:
            return
        if partners is not None:
            partners.log_size(info.size_bytes // 2, self._storage.url)
        self._heartbeat("pruning")
        means.ownership.note_committed(info)
        means.space.record(info, self.generation, self.extra)
        if means.options.verification == "off":
            means.ownership.inventory.vouch(info)
        if means.options.keep is not None:
            means.prune(info)

    def give_up(self, reason: str) -> None:
        """Fail this save, here now and later on all ranks, because the save thread hangs."""
        rank, step = self.channel.rank, self.request.step
        with self._giving_up:
            # A thread that wakes up continues, and a commit cannot be undone.
            error = DeadlineError(
                f"rank {rank}: {reason}", failures={rank: reason}, in_doubt=self._committing
            )
            failed = save_error(self._storage.url, step, self._phase, error)
            settle(self.handle.staged, failed)
            self.staged.stop()
            in_time = settle(self.handle.committed, failed)
        if not in_time:
            _logger.error("after the commit of step %d: %s", step, error)

    def _watch_copies(self) -> BaseException | None:
        """Resolve the handle's `staged` once copies are made; return an earlier error."""
        error, deferred = self.error or self._given_up(), self.staged.deferred
        if deferred is None or error is not None:
            self._resolve_staged(error)
            return error
        try:
            # Writing begins while the rest is being copied, and fails at its end if a copy failed.
            deferred.when_done(self._resolve_staged)
        except Exception as caught:  # noqa: BLE001 - the commit barrier carries it to every rank
            return failed_in("stage", caught)
        return None

    def _resolve_staged(self, error: BaseException | None) -> None:
        settle(self.handle.staged, None if error is None else failed_in("stage", error))

    def _open(self, error: BaseException | None) -> BaseException | None:
        """Create the working directory, or wait until it is there; return an error.

        No rank writes before it exists. If the coordinator cannot create it, it reports that to all ranks.
        """
        lead = self.channel.is_coordinator
        if error is not None and not lead:
            return error
        self._heartbeat("opening", None if lead else self._patience_seconds)
        topic = f"open/{self.request.name}/{self.save_id}"
        try:
            self._reference = self.channel.broadcast(
                topic, lambda: self._create(error), deadline_seconds=self._deadline_seconds
            )
        except DeadlineError as silence:
            self._silence = silence
            return SaveError(f"while opening: {silence}", phase="open")
        except CheckpointError as refusal:
            self._refusal = refusal
        else:
            self._opened = True
        return None

    def _create(self, error: BaseException | None) -> bytes:
        if error is not None:
            found = Failure.of(error)
            raise CoordinationError(
                f"rank 0: {found.text}", failures={0: found.text}, causes={0: found}
            ) from error
        request, space = self.request, self.means.space
        self.means.ownership.check()
        coming = CheckpointInfo(
            step=request.step,
            name=request.name,
            created=self.created,
            metrics=request.metrics,
            lineage=self.lineage,
        )
        space.make(coming, space.predict(self.metadata, self.generation, self.extra))
        begin(self._storage, request.name, self.save_id, replace=request.replace)
        return self.local.digests()

    def _write(self) -> RankReport | BaseException:
        self._phase = "write"
        self._heartbeat("writing the tensors")
        try:
            with self._span("save.write", size_bytes=self.staged.size_bytes):
                report = self.write_files()
            if self.means.options.reject_non_finite:
                refuse_non_finite(self.staged, self.buffers)
        except Exception as caught:  # noqa: BLE001 - the commit barrier carries it to every rank
            if self._twins is not None:
                self._twins.stop()  # before the staged copies are released
            return failed_in("write", caught)
        return self._given_up() or report

    def write_files(self) -> RankReport:
        """Write this rank's files durably; return the report for the coordinator.

        Writing begins while copies are still being made; when this returns, all are made and written.

        Raises:
            SaveError: a tensor could not be copied, or was changed meanwhile; or the save was given up.
            OSError: storage failed.
        """
        storage, staged, rank, twins = self._storage.own, self.staged, self.channel.rank, self._twins
        reports, small = self.means.reports, self._small_files()
        with RankFiles(storage, self.working, rank, reports=reports, twins=twins) as written:
            for part, image in staged.images.items():

                def filled(piece: int, part: str = part) -> None:
                    self._progress("writing the tensors")
                    staged.wait_for(part, piece)

                written.write_image(part, image, filled)
                self._progress(f"writing the values in {self.working}")
                written.write_values(part, staged.values[part])
            if staged.deferred is not None and (error := staged.deferred.settle()) is not None:
                raise failed_in("stage", error) from error
            for name, content in {**self._table(written.tables, small), **small}.items():
                self._progress(f"writing {self.working}/{name}")
                written.write(name, content)
            files = written.entries
        for directory in sorted({f"{self.working}/{entry.path}".rpartition("/")[0] for entry in files}):
            self._progress(f"writing {directory}")
            storage.sync_directory(directory)
        if twins is not None:
            files += twins.finish(files, self._progress)
        trained, place = trained_digests(self.trained, staged.images), (storage.url, platform.node())
        report = replace(reports.report(files, written.tables), place=place, trained=trained)
        if self.evidence is None:
            return report
        crcs = {part: image.chunk_crcs for part, image in staged.images.items()}
        return replace(report, evidence=self.evidence.findings(crcs))

    def _small_files(self) -> Mapping[str, bytes]:
        """Return this rank's small files, with its rank-local buffers where necessary."""
        if self.keeping is KeepOwn.NEVER:
            return self.files
        keys = None if self.keeping is KeepOwn.ALWAYS else self.local.differing(self._reference)
        return {**self.files, **self.local.encode(self.channel.rank, keys)}

    def _table(self, entries: Sequence[TableEntry], small: Mapping[str, bytes]) -> dict[str, bytes]:
        # Written before the small files: without renames, it proves that a torn save's files are ours.
        beside = [] if self._storage.supports_rename else [path for path in small if not is_own_file(path)]
        beside += map(twin_name, beside if self._twins is not None else ())
        name = chunks_name(self.channel.rank)
        return {name: encode_table(entries, beside=beside)} if entries or beside else {}

    def _commit_with_all(self, report: RankReport | BaseException) -> CheckpointInfo:
        """Pass the commit barrier: the coordinator commits once every rank has reported."""
        name = f"save/{self.request.name}/{self.save_id}"
        self._phase = "commit"
        self._heartbeat("waiting for the other ranks", self._patience_seconds)
        # The error is for a coordinator that wakes up; another wait of the same length would be useless.
        deadline = self._deadline_seconds if self._silence is None else 0.0
        with self._span("save.commit") as details:
            told = report.to_bytes() if isinstance(report, RankReport) else report
            info = self.channel.commit_barrier(name, told, self._commit, deadline_seconds=deadline)
            details["size_bytes"] = info.size_bytes
        return info

    def _commit(self, reports: list[bytes]) -> CheckpointInfo:
        if self._refusal is not None:
            raise self._refusal
        self._begin_committing()
        try:
            self.means.ownership.check()
            return self.commit_files(RankReport.read_all(reports))
        finally:
            # Only the report is missing, for which a store may take its time.
            self._heartbeat("reporting to the other ranks", self._patience_seconds)

    def commit_files(self, reports: Sequence[RankReport]) -> CheckpointInfo:
        """Commit the files of all ranks as one checkpoint. Coordinator only.

        Raises:
            DivergenceError: ranks hold different values under one name, and that is refused.
            SaveError: the manifest could not be signed, or nothing was trained, and that is refused.
            CheckpointError: see `commit`.
        """
        means, request = self.means, self.request
        shown = [report.evidence for report in reports if report.evidence is not None]
        if len(shown) == len(reports):
            means.judge.judge(shown, self.replicas, generation=self.generation, step=request.step)
        trained = [report.trained for report in reports]
        means.stale.judge(trained, self.trained, generation=self.generation, step=request.step)
        means.reports.take(reports)
        manifest = self._manifest(reports, self._write_metadata())
        self._sign(manifest)
        try:
            info = commit(
                self._storage,
                self.working,
                request.name,
                manifest,
                replace=request.replace,
                check=means.ownership.check,
            )
        except SaveError as error:
            places = [report.place for report in reports]
            if error.in_doubt or not (hint := _apart(places, self._storage.num_disks)):
                raise
            raise error.retold(f"{error}. {hint}") from error
        means.stale.committed()
        return info

    def _write_metadata(self) -> list[FileEntry]:
        """Write DCP's index of every part, and its twin; return the entries."""
        files: list[FileEntry] = []
        for part, content in self.means.reports.metadata(self.metadata).items():
            path, pieces = f"{part}/{METADATA}" if part else METADATA, iter(content.pieces)
            if self._twins is not None:
                pieces = self._twins.follow(path, pieces)
            self._storage.write_pieces(f"{self.working}/{path}", pieces)
            files.append(FileEntry(path=path, size_bytes=content.size_bytes, checksum=content.checksum))
        return files if self._twins is None else [*files, *self._twins.finish(files)]

    def _manifest(self, reports: Sequence[RankReport], indexes: Sequence[FileEntry]) -> Manifest:
        files = [*indexes, *(entry for report in reports for entry in report.files)]
        files.sort(key=lambda entry: entry.path)
        code, ownership, python = code_version(), self.means.ownership, platform.python_version()
        return Manifest(
            save_id=self.save_id,
            step=self.request.step,
            created=self.created,
            world_size=len(reports),
            items=cast("Mapping[str, ItemKind]", self.items),
            metrics=self.request.metrics,
            annotations=self.request.annotations,
            producer={
                "ckpt_suite": __version__,
                "torch": torch.__version__,
                "python": python,
                **software_versions(),
            },
            num_chunks=sum(report.num_chunks for report in reports),
            lineage=self.lineage,
            epochs=self.request.progress.get("epochs"),
            total_steps=self.request.progress.get("total_steps"),
            provenance=replace(
                self.provenance,
                parent=ownership.line.parent,
                run_id=ownership.run_id,
                code_version=code.version,
                code_dirty=code.dirty,
            ),
            replicas=1 if self._twins is None else 2,
            files=tuple(files),
            groups=holders(self._storage, self.working, files),
        )

    def _sign(self, manifest: Manifest) -> None:
        """Write signature and twins; raise if the save was given up meanwhile."""
        twins, sign = self._twins, self.means.sign
        if sign is not None:

            def signed(content: bytes) -> bytes:
                self._committing = False
                self._heartbeat("signing the manifest")
                signature = sign(self.request.name, content)
                self._begin_committing()
                return signature

            signature = write_signature(self._storage, self.working, manifest, signed)
            if twins is not None:
                twins.add(SIGNATURE, signature)
        if twins is not None:
            twins.add(MANIFEST, manifest.to_bytes())
            twins.finish()

    def _begin_committing(self) -> None:
        """Note that from now on a save given up is in doubt: it may be committed."""
        with self._giving_up:
            if (late := self._given_up()) is not None:
                raise late
            self._committing = True
        self._heartbeat("committing")

    def _span(self, name: str, **attributes: Any) -> AbstractContextManager[dict[str, Any]]:
        return self.means.telemetry.span(name, step=self.request.step, rank=self.channel.rank, **attributes)

    def _progress(self, doing: str) -> None:
        """Record progress of the writing; raise if the save was given up meanwhile."""
        if (late := self._given_up()) is not None:
            raise late
        self._heartbeat(doing)

    def _given_up(self) -> SaveError | None:
        if not self.handle.done():
            return None
        return SaveError(f"while writing: given up before it ended ({self.handle.error})", phase="write")

    def _failed(self, error: CheckpointError) -> CheckpointError:
        """Remove the written files unless possibly committed; return the handle's error."""
        self._committing = False
        in_doubt = isinstance(error, SaveError | CoordinationError) and error.in_doubt
        if isinstance(error, DivergenceError):
            self.means.plans.distrust()
        if self.channel.is_coordinator and self._opened and not in_doubt:
            self._heartbeat("removing the written files")
            try:
                self.means.ownership.check()
                abandon(self._storage, self.working)
            except (OSError, CheckpointError) as lost:
                # On an object store the job that owns the root now may be writing under the very same name.
                _logger.warning(
                    "the files written to %s/%s were not removed: %s", self._storage.url, self.working, lost
                )
        raised = error
        if isinstance(error, CoordinationError):
            phase = "open" if self._silence else _phase_of(error, "open" if self._refusal else "commit")
            error = self._silence or error
            raised = save_error(self._storage.url, self.request.step, phase, error)
            raised.__cause__ = error
        _logger.error("%s", error)
        return raised


def _phase_of(error: CoordinationError, otherwise: SavePhase) -> SavePhase:
    if isinstance(error, DeadlineError) and error.awaited and not (error.in_doubt or error.failures):
        return "write"  # the missing ranks never reported their writes
    for cause in error.causes.values():
        if cause.phase:
            return cause.phase
    return otherwise


def _apart(places: Sequence[tuple[str, str]], disks: int) -> str:
    """Explain why the coordinator may not see other ranks' files; "" if unknown."""
    if disks > 1:
        return ""
    roots = {root: rank for rank, (root, _) in reversed(list(enumerate(places)))}
    if len(roots) > 1:
        named = ", ".join(f"rank {rank} to {root}" for root, rank in sorted(roots.items(), key=itemgetter(1)))
        return f"The ranks do not write to the same root: {named}; give all of them one that all can see"
    machines = {machine for _, machine in places}
    if len(machines) > 1:
        return (
            f"The ranks run on {len(machines)} machines: {places[0][0]} must be the same directory on all of "
            "them, not one on a disk of each"
        )
    return ""
