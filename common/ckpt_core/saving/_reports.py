"""Reports of ranks to the coordinator, and caches that keep repeated ones small.

A rank sends its chunk table only when its layout has changed since the last commit. The coordinator keeps
every rank's last table, and the bytes of `.metadata` made from them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, final

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckpt_core.dcp import check_metadata, encode_metadata, places_in
from ckpt_core.errors import CorruptCheckpointError, SaveError
from ckpt_core.formats.checksums import CRC32, checksum
from ckpt_core.formats.chunks import ChunkTable, TableEntry, encode_table
from ckpt_core.messages import message
from ckpt_core.names import METADATA, chunks_name
from ckpt_core.saving._replicas import Findings
from ckpt_core.storage import Pace
from ckpt_core.types import FileEntry

_Layout: TypeAlias = tuple[tuple[str, bytes], ...]
_PIECE_BYTES: Final = 16 << 20


@message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """One rank's message to the coordinator about the files that it wrote.

    Attributes:
        table: the chunk table, with zeros for checksums; None if its layout is that of the last committed
            report.
        evidence: fingerprints of the rank's replicas; None if they are not compared.
        place: the rank's root and machine.
        trained: see `trained_digests`.
    """

    files: Sequence[FileEntry] = ()
    num_chunks: int = 0
    table: bytes | None = None
    evidence: Findings | None = None
    place: tuple[str, str] = ("", "")
    trained: Mapping[str, str] = field(default_factory=dict[str, str])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class KeptContent:
    """Content on a page boundary, as direct writes need it, with its checksum.

    That of `.metadata` is kept from save to save: at thousands of ranks it takes hundreds of megabytes.
    """

    memory: memoryview
    checksum: str

    @classmethod
    def of(cls, content: bytes, algorithm: str = CRC32) -> KeptContent:
        """Keep a copy of `content`."""
        kept = mmap.mmap(-1, max(1, len(content)))
        kept.write(content)
        return cls(memory=memoryview(kept)[: len(content)], checksum=checksum(content, algorithm))

    def pieces(self) -> Iterator[memoryview]:
        """Yield the content, in pieces for `Storage.write_pieces`."""
        for start in range(0, len(self.memory), _PIECE_BYTES):
            yield self.memory[start : start + _PIECE_BYTES]


@final
class ReportCache:
    """Caches for the writing of one rank, kept for the life of its manager.

    Concurrency: used by one save at a time, on its background thread.

    Args:
        pace: limits the rate of tensor writes; None for full speed.
        algorithm: of the checksums of files.
    """

    def __init__(self, *, pace: Pace | None = None, algorithm: str = CRC32) -> None:
        self.pace = pace
        self.algorithm = algorithm
        self._reported: _Layout | None = None
        self._pending: _Layout | None = None
        self._tables: dict[int, bytes] = {}
        self._metadata: dict[str, tuple[Metadata, KeptContent]] = {}

    def report(self, files: Iterable[FileEntry], entries: Sequence[TableEntry]) -> RankReport:
        """Make the report of this rank's files; omit a chunk table that is already known."""
        layout = tuple((entry.path, entry.columns) for entry in entries)
        known = layout == self._reported
        # Until the commit is known, it is uncertain whether the coordinator has kept the table.
        self._reported, self._pending = None, layout
        return RankReport(
            files=list(files),
            num_chunks=sum(entry.num_chunks for entry in entries),
            # Random bits would be most of the compressed message.
            table=None
            if known
            else encode_table(
                replace(each, crcs=bytes(len(each.crcs)), block_crcs=bytes(len(each.block_crcs)))
                for each in entries
            ),
        )

    def committed(self) -> None:
        """Note the commit of the last report, whose layout the coordinator now knows."""
        self._reported, self._pending = self._pending, None

    def take(self, reports: Sequence[RankReport]) -> None:
        """Keep the chunk tables of the reports, one per rank, in order. Coordinator only.

        Raises:
            SaveError: a rank has never sent its chunk table.
        """
        changed = {rank: report.table for rank, report in enumerate(reports) if report.table is not None}
        if changed:
            self._metadata = {}
        self._tables |= changed
        unknown = [rank for rank in range(len(reports)) if rank not in self._tables]
        if unknown:
            raise SaveError(
                f"ranks {unknown} did not send their chunk tables, and the coordinator has none from before: "
                "was it restarted alone? Restart all ranks together"
            )

    def metadata(self, plans: Mapping[str, Metadata]) -> dict[str, KeptContent]:
        """Return the content of every part's `.metadata`, from the cache unless stale."""
        known = self._metadata
        stale = [part for part, plan in plans.items() if part not in known or known[part][0] is not plan]
        if stale:
            tables = [
                ChunkTable.from_bytes(self._tables[rank], source=chunks_name(rank))
                for rank in sorted(self._tables)
            ]
            sizes = {path: each.size_bytes for table in tables for path, each in table.files.items()}
            for part in stale:
                places = dict(place for table in tables for place in places_in(table, part))
                _check_loadable(plans[part], places, part, sizes)
                content = KeptContent.of(encode_metadata(plans[part], places), self.algorithm)
                known[part] = plans[part], content
        return {part: known[part][1] for part in plans}


def _check_loadable(
    plan: Metadata, places: Mapping[MetadataIndex, Any], part: str, sizes: Mapping[str, int]
) -> None:
    """Refuse to commit a checkpoint that a load would report as damaged."""
    try:
        check_metadata(
            replace(plan, storage_data=places),
            METADATA,
            lambda path: sizes[f"{part}/{path}" if part else path],
        )
    except CorruptCheckpointError as error:
        raise SaveError(f"the written files could not be loaded: {error}") from error
