"""What writing keeps from save to save, so that a save like the one before says and computes little.

Where a rank's chunks lie is told to the coordinator only when it has changed since the last commit: then the
report holds the rank's chunk table. The coordinator keeps every rank's last table, and the bytes of
`.metadata` that it made from them.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias, final

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ckpt_core.dcp import Pace, check_metadata, encode_metadata, places_in
from ckpt_core.errors import CorruptCheckpointError, SaveError
from ckpt_core.formats.checksums import CRC32, checksum
from ckpt_core.formats.chunks import ChunkTable, TableEntry, encode_table
from ckpt_core.names import METADATA, chunks_name
from ckpt_core.types import FileEntry

_Layout: TypeAlias = tuple[tuple[str, bytes], ...]
_END_OF_HEAD: Final = b"\n"
_PIECE_BYTES: Final = 16 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank wrote, as a message to the coordinator.

    Attributes:
        files: path, size in bytes and checksum of one file after another.
        num_chunks: in all data files.
        table: the chunk table, with zeros for checksums, if it is not laid out like that of the last report
            that ended in a commit.
        evidence: what the rank has to show of what others hold, too; None if nobody is to compare it.
        place: the root that it wrote to, and the machine.
    """

    files: Sequence[Any]
    num_chunks: int
    table: bytes | None
    evidence: Mapping[str, Any] | None = None
    place: tuple[str, str] = ("", "")

    def encode(self) -> bytes:
        """The message: a line of JSON, then the compressed table if there is one."""
        head = json.dumps(
            [self.place, self.evidence, self.num_chunks, *self.files], separators=(",", ":")
        ).encode()
        return head if self.table is None else head + _END_OF_HEAD + zlib.compress(self.table, level=1)

    def entries(self) -> Iterator[FileEntry]:
        """The files."""
        paths, sizes, checksums = (self.files[place::3] for place in range(3))
        for path, size, text in zip(paths, sizes, checksums, strict=True):
            yield FileEntry(path=path, size_bytes=size, checksum=text)

    @classmethod
    def decode(cls, message: bytes) -> RankReport:
        """Read a message."""
        head, found, table = message.partition(_END_OF_HEAD)
        (root, machine), evidence, num_chunks, *files = json.loads(head)
        return cls(
            files=files,
            num_chunks=num_chunks,
            table=zlib.decompress(table) if found else None,
            evidence=evidence,
            place=(root, machine),
        )


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class KeptContent:
    """A file that is written many times: at thousands of ranks, hundreds of megabytes that never change.

    Attributes:
        memory: the bytes, on a page boundary as direct writes need it.
        checksum: of them, taken once.
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
        """The content, in pieces for `Storage.write_pieces`."""
        for start in range(0, len(self.memory), _PIECE_BYTES):
            yield self.memory[start : start + _PIECE_BYTES]


@final
class ReportCache:
    """Kept by every rank for as long as its manager lives.

    Concurrency: used by one save at a time, on its background thread.

    Args:
        pace: slows the writing of tensors down; None to write as fast as storage takes it.
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
        """What to tell the coordinator of this rank's files, and of the entries of its chunk table."""
        layout = tuple((entry.path, entry.columns) for entry in entries)
        known = layout == self._reported
        # Until the commit is known, nobody can be sure that the coordinator has kept the table.
        self._reported, self._pending = None, layout
        return RankReport(
            files=[value for entry in files for value in (entry.path, entry.size_bytes, entry.checksum)],
            num_chunks=sum(entry.num_chunks for entry in entries),
            table=None if known else encode_table(map(_without_checksums, entries)),
        )

    def committed(self) -> None:
        """The save of the last report was committed, so that the coordinator knows what was in it."""
        self._reported, self._pending = self._pending, None

    def take(self, reports: Sequence[RankReport]) -> None:
        """Keep the tables that are in the reports of all ranks, in order of rank; coordinator only.

        Raises:
            SaveError: a rank did not say where its chunks lie, and never did before.
        """
        changed = {rank: report.table for rank, report in enumerate(reports) if report.table is not None}
        if changed:
            self._metadata = {}
        self._tables |= {rank: zlib.compress(table, level=1) for rank, table in changed.items()}
        unknown = [rank for rank in range(len(reports)) if rank not in self._tables]
        if unknown:
            raise SaveError(
                f"ranks {unknown} did not report where their chunks lie, and the coordinator never heard it "
                "before: was it restarted alone? Restart all ranks together"
            )

    def metadata(self, plans: Mapping[str, Metadata]) -> dict[str, KeptContent]:
        """Part -> content of its `.metadata`, made anew only if its plan or a rank's layout has changed."""
        stale = [part for part, plan in plans.items() if self._stale(part, plan)]
        if stale:
            tables = [
                ChunkTable.from_bytes(zlib.decompress(self._tables[rank]), source=chunks_name(rank))
                for rank in sorted(self._tables)
            ]
            sizes = {path: each.size_bytes for table in tables for path, each in table.files.items()}
            for part in stale:
                places = dict(place for table in tables for place in places_in(table, part))
                _check_loadable(plans[part], places, part, sizes)
                content = KeptContent.of(encode_metadata(plans[part], places), self.algorithm)
                self._metadata[part] = plans[part], content
        return {part: self._metadata[part][1] for part in plans}

    def _stale(self, part: str, plan: Metadata) -> bool:
        known = self._metadata.get(part)
        return known is None or known[0] is not plan


def _check_loadable(
    plan: Metadata, places: Mapping[MetadataIndex, Any], part: str, sizes: Mapping[str, int]
) -> None:
    """Refuse to commit what a load would call damaged."""
    try:
        check_metadata(
            replace(plan, storage_data=places),
            METADATA,
            lambda path: sizes[f"{part}/{path}" if part else path],
        )
    except CorruptCheckpointError as error:
        raise SaveError(f"what the ranks wrote could not be loaded: {error}") from error


def _without_checksums(entry: TableEntry) -> TableEntry:
    """The same layout; random bits would be most of what the message is after compression."""
    return replace(entry, crcs=bytes(len(entry.crcs)), block_crcs=bytes(len(entry.block_crcs)))
