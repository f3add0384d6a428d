"""The second half of a save, on the background thread: one rank's files, then the commit of all of them."""

from __future__ import annotations

import pickle
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_core._version import __version__
from ckpt_core.checksums import checksum
from ckpt_core.commit import ItemKind, Manifest, commit
from ckpt_core.dcp import ShardWriter
from ckpt_core.lifecycle._prepare import Assignment, PreparedSave
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo, ChunkEntry, FileEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank wrote: files and chunks for the manifest, write results per part for DCP's metadata."""

    files: Sequence[FileEntry]
    chunks: Sequence[ChunkEntry]
    results: Mapping[str, Sequence[WriteResult]]


def write_rank(storage: Storage, prepared: PreparedSave, small: Mapping[str, bytes]) -> bytes:
    """Write this rank's files durably and report them, as a message to the coordinator."""
    assignment = prepared.assignment
    files: list[FileEntry] = []
    chunks: list[ChunkEntry] = []
    results: dict[str, Sequence[WriteResult]] = {}
    for part, image in prepared.staged.images.items():
        writer = ShardWriter(storage, assignment.working, part=part, rank=prepared.rank)
        results[part] = writer.write_image(image) + writer.write_values(prepared.staged.values[part])
        files += writer.files
        chunks += writer.chunks
    for name, content in small.items():
        storage.write_bytes(f"{assignment.working}/{name}", content)
        files.append(FileEntry(path=name, size_bytes=len(content), checksum=checksum(content)))
    for directory in _directories(assignment, files):
        storage.sync_directory(directory)
    return pickle.dumps(RankReport(files=files, chunks=chunks, results=results))


def _directories(assignment: Assignment, files: Sequence[FileEntry]) -> list[str]:
    inner = {entry.path.rpartition("/")[0] for entry in files}
    return sorted(f"{assignment.working}/{path}" if path else assignment.working for path in inner)


def commit_all(storage: Storage, prepared: PreparedSave, reports: Sequence[bytes]) -> CheckpointInfo:
    """Turn the ranks' files into a checkpoint; on the coordinator only, when all ranks have reported."""
    opened: list[RankReport] = [pickle.loads(report) for report in reports]  # noqa: S301 - from our own ranks
    files = [entry for report in opened for entry in report.files]
    for part, metadata in prepared.metadata.items():
        writer = ShardWriter(storage, prepared.assignment.working, part=part)
        writer.finish(metadata, [list(report.results.get(part, ())) for report in opened])
        files += writer.files
    request = prepared.request
    manifest = Manifest(
        save_id=prepared.assignment.save_id,
        step=request.step,
        created=prepared.assignment.created,
        world_size=len(opened),
        items=cast("Mapping[str, ItemKind]", prepared.items),
        metrics=request.metrics,
        annotations=request.annotations,
        producer=_producer(),
        files=tuple(sorted(files, key=lambda entry: entry.path)),
        chunks=tuple(chunk for report in opened for chunk in report.chunks),
    )
    return commit(storage, prepared.assignment.working, request.name, manifest, replace=request.replace)


def _producer() -> dict[str, Any]:
    return {"ckpt_suite": __version__, "torch": torch.__version__, "python": platform.python_version()}
