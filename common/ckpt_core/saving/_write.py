"""The second half of a save: each rank's files, then the commit. Save thread."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from typing import Any, cast, final

import torch

from ckpt_core._version import __version__
from ckpt_core.commit import ItemKind, Manifest, commit, write_signature
from ckpt_core.errors import SaveError
from ckpt_core.formats.chunks import TableEntry, encode_table
from ckpt_core.groups import holders
from ckpt_core.names import MANIFEST, METADATA, SIGNATURE, chunks_name, is_own_file, twin_name
from ckpt_core.options import SignManifest
from ckpt_core.provenance import software_versions
from ckpt_core.saving._checks import StaleJudge, trained_digests
from ckpt_core.saving._files import RankFiles
from ckpt_core.saving._handle import failed_in
from ckpt_core.saving._prepared import PreparedSave
from ckpt_core.saving._replicas import Judge
from ckpt_core.saving._reports import RankReport, ReportCache
from ckpt_core.saving._stager import StagedParts
from ckpt_core.saving._twins import TwinSession
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo, FileEntry, Provenance


def write_rank(
    storage: Storage,
    prepared: PreparedSave,
    small: Mapping[str, bytes],
    memory: ReportCache,
    *,
    progress: Callable[[str], None],
    twins: TwinSession | None = None,
) -> bytes:
    """Write this rank's files durably; return the report for the coordinator.

    Writing begins while copies are still being made; when this returns, all are made and written. `progress`
    is called with a description of each next step.

    Raises:
        SaveError: a tensor could not be copied, or was changed meanwhile.
        OSError: storage failed.
    """
    working, staged = prepared.working, prepared.staged
    with RankFiles(storage, working, prepared.rank, reports=memory, twins=twins) as written:
        for part, image in staged.images.items():
            written.write_image(part, image, partial(_next_slot, staged, part, progress))
            progress(f"writing the values in {working}")
            written.write_values(part, staged.values[part])
        _finish_copies(staged)
        table = _table(storage, prepared.rank, written.tables, small, twins=twins is not None)
        for name, content in {**table, **small}.items():
            progress(f"writing {working}/{name}")
            written.write(name, content)
        files = written.entries
    for directory in sorted({f"{working}/{entry.path}".rpartition("/")[0] for entry in files}):
        progress(f"writing {directory}")
        storage.sync_directory(directory)
    if twins is not None:
        files += twins.finish(files, progress)
    digests = trained_digests(prepared.trained, staged.images)
    place = storage.url, platform.node()
    report = replace(memory.report(files, written.tables), place=place, trained=digests)
    if prepared.evidence is not None:
        crcs = {part: image.chunk_crcs for part, image in staged.images.items()}
        report = replace(report, evidence=prepared.evidence.message(crcs))
    return report.encode()


def _table(
    storage: Storage, rank: int, entries: Sequence[TableEntry], small: Mapping[str, bytes], *, twins: bool
) -> dict[str, bytes]:
    """Encode the chunk table, by file name."""
    # It is written before the small files: without renames, it proves that the files of a torn save are ours.
    beside = [] if storage.supports_rename else [path for path in small if not is_own_file(path)]
    beside += map(twin_name, beside if twins else ())
    return {chunks_name(rank): encode_table(entries, beside=beside)} if entries or beside else {}


def _next_slot(staged: StagedParts, part: str, progress: Callable[[str], None], slot: int) -> None:
    progress("writing the tensors")
    staged.wait_for(part, slot)


def _finish_copies(staged: StagedParts) -> None:
    if staged.deferred is None:
        return
    try:
        staged.deferred.finish()
    except Exception as error:
        raise failed_in("stage", error) from error


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Conditions of the commits of one manager.

    Attributes:
        check: see `commit`.
        judge: compares the replicas of all ranks.
        stale: compares what is trained with the last commit.
        sign: signs the manifest; None to leave it unsigned.
        origin: adds to a state's provenance what concerns the job.
    """

    check: Callable[[], None] = lambda: None
    judge: Judge | None = None
    stale: StaleJudge = field(default_factory=partial(StaleJudge, "ignore"))
    sign: SignManifest | None = None
    origin: Callable[[Provenance], Provenance] = lambda known: known


def commit_all(
    storage: Storage,
    prepared: PreparedSave,
    messages: Sequence[bytes],
    memory: ReportCache,
    *,
    terms: Terms | None = None,
    twins: TwinSession | None = None,
) -> CheckpointInfo:
    """Commit the files of all ranks as one checkpoint. Coordinator only.

    Raises:
        DivergenceError: ranks hold different values under one name, and that is refused.
        SaveError: the manifest could not be signed, or nothing was trained, and that is refused.
        CheckpointError: see `commit`.
    """
    terms = terms or Terms()
    reports = [RankReport.decode(message) for message in messages]
    shown = [report.evidence for report in reports if report.evidence is not None]
    if terms.judge is not None and len(shown) == len(reports):
        terms.judge.judge(
            shown, prepared.replicas, generation=prepared.generation, step=prepared.request.step
        )
    found = [report.trained for report in reports]
    terms.stale.judge(found, prepared.trained, generation=prepared.generation, step=prepared.request.step)
    memory.take(reports)
    working, request = prepared.working, prepared.request
    files = [entry for report in reports for entry in report.entries()]
    for part, content in memory.metadata(prepared.metadata).items():
        path = f"{part}/{METADATA}" if part else METADATA
        pieces = content.pieces() if twins is None else twins.follow(path, content.pieces())
        storage.write_pieces(f"{working}/{path}", pieces)
        entry = FileEntry(path=path, size_bytes=len(content.memory), checksum=content.checksum)
        files += [entry] if twins is None else [entry, *twins.finish([entry])]
    files.sort(key=lambda entry: entry.path)
    manifest = Manifest(
        save_id=prepared.save_id,
        step=request.step,
        created=prepared.created,
        world_size=len(reports),
        items=cast("Mapping[str, ItemKind]", prepared.items),
        metrics=request.metrics,
        annotations=request.annotations,
        producer=_producer(),
        num_chunks=sum(report.num_chunks for report in reports),
        lineage=prepared.lineage,
        provenance=terms.origin(prepared.provenance),
        replicas=1 if twins is None else 2,
        files=tuple(files),
        groups=holders(storage, working, files),
    )
    if terms.sign is not None:
        signature = write_signature(storage, working, manifest, partial(terms.sign, request.name))
        if twins is not None:
            twins.add(SIGNATURE, signature)
    if twins is not None:
        twins.add(MANIFEST, manifest.to_bytes())
        twins.finish()
    try:
        info = commit(storage, working, request.name, manifest, replace=request.replace, check=terms.check)
    except SaveError as error:
        if error.in_doubt or not (hint := _apart([report.place for report in reports], storage.num_disks)):
            raise
        raise error.retold(f"{error}. {hint}") from error
    terms.stale.committed()
    return info


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


def _producer() -> dict[str, Any]:
    own = {"ckpt_suite": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return {**own, **software_versions()}
