"""Reports of ranks to the coordinator: their files, and fingerprints of replicas.

A rank tells the lengths of its chunks only when they have changed since the last commit: names and boxes are
those of the plan. The coordinator keeps every rank's last ones, and the bytes of `.metadata` made from them.

Values of one name on several ranks must be equal. In the first save of a plan every rank takes a fingerprint
of every byte of its replicas; in each later one, of a few elements of a few tensors, different ones in each
save. They travel with the report, and the coordinator compares them before it commits.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, TypeAlias, final

import numpy as np

from ckpt_core.dcp import Fingerprints, Part, PlannedIndex, Replicas, sample
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import OWN_NAMES, CorruptCheckpointError, DivergenceError, SaveError, first_of
from ckpt_core.formats.checksums import CRC32, Checksum
from ckpt_core.formats.chunks import TableEntry
from ckpt_core.formats.consistency import check
from ckpt_core.formats.index import Index, Ints
from ckpt_core.formats.index import encode as encode_index
from ckpt_core.messages import decode, encode, message
from ckpt_core.names import METADATA, data_name
from ckpt_core.options import OnDivergence
from ckpt_core.storage import Pace
from ckpt_core.types import FileEntry

SAMPLED: Final = 16
"""Tensors of each group of ranks that are compared in each save after the first of a plan."""
_WIDTH: Final = 4
_MOST_NAMED: Final = 5

_Groups: TypeAlias = Mapping[str, Sequence[Replicas]]

_logger = logger_of(__name__)


@message
@dataclass(frozen=True, slots=True)
class Findings:
    """One rank's fingerprints by part and group of ranks, and digests of shared items.

    `turn` is the number of earlier saves of the same plans.
    """

    turn: int
    groups: Mapping[str, Mapping[int, bytes]]
    shared: Mapping[str, int]


@final
class Evidence:
    """Fingerprints of one rank's replicas; live values are read on construction.

    In the first `turn` of a plan, 0, everything is read.
    """

    def __init__(self, parts: Mapping[str, Part], turn: int, shared: Mapping[str, int]) -> None:
        self._turn = turn
        self._shared = shared
        self._found = {
            name: {
                group: Fingerprints(values if turn == 0 else [sample(value, turn) for value in values])
                for group, values in part.replicas(lambda count: chosen(turn, count), whole=turn == 0).items()
            }
            for name, part in parts.items()
        }

    def findings(self, written: Mapping[str, Sequence[int]]) -> Findings:
        """Return what the coordinator compares, small after the first save of a plan.

        `written` has by part the CRC-32 of every slot of this rank's data file.
        """
        groups = {
            part: {group: prints.encode(written[part]) for group, prints in found.items()}
            for part, found in self._found.items()
            if found
        }
        return Findings(self._turn, groups, self._shared)


def chosen(turn: int, count: int) -> Sequence[int]:
    """Choose the replicas, of `count`, to compare in a save."""
    if turn == 0 or count <= SAMPLED:
        return range(count)
    start = (turn - 1) * SAMPLED
    return [(start + at) % count for at in range(SAMPLED)]


@final
class Judge:
    """Comparison of all ranks' fingerprints. Coordinator only, one save at a time."""

    def __init__(self, policy: OnDivergence) -> None:
        self._policy = policy
        self._generation = 0
        self._described = ""

    def judge(self, messages: Sequence[Findings], replicas: _Groups, *, generation: int, step: int) -> None:
        """Compare fingerprints of all ranks; what was found stays true of a generation.

        Raises:
            DivergenceError: ranks hold different values under one name, and that is refused.
        """
        if self._policy == "keep-each":
            return
        if generation != self._generation:
            self._generation, self._described = generation, ""
        differing = dict(_differing(messages, replicas))
        if differing and not self._described:
            self._described = _describe(differing)
            if self._policy == "warn":
                _logger.warning(
                    "step %d: %s; the lowest rank's values are saved. %s", step, self._described, OWN_NAMES
                )
        if self._described and self._policy == "refuse":
            raise DivergenceError(
                f"step {step} was not saved: {self._described}. If they should be equal, the training has "
                "gone wrong: look for values that are not synchronised. "
                f"{OWN_NAMES}. Or choose on_divergence='warn' (the lowest rank's values are saved) or "
                "'keep-each' (every rank's own are)",
                step=step,
                phase="commit",
                differing=differing,
            )


def _differing(messages: Sequence[Findings], replicas: _Groups) -> Iterator[tuple[str, list[int]]]:
    """Yield names with different values, and the ranks that differ from the first."""
    for part, groups in replicas.items():
        for number, group in enumerate(groups):
            found = {rank: messages[rank].groups[part][number] for rank in group.ranks}
            places = chosen(messages[group.ranks[0]].turn, len(group.names))
            yield from _unlike(found, [group.names[place] for place in places])
    for name in dict.fromkeys(name for each in messages for name in each.shared):
        having = {rank: each.shared[name] for rank, each in enumerate(messages) if name in each.shared}
        first = next(iter(having.values()))
        if others := [rank for rank, digest in having.items() if digest != first]:
            yield name, others


def _unlike(found: Mapping[int, bytes], names: Sequence[str]) -> Iterator[tuple[str, list[int]]]:
    first = next(iter(found.values()))
    others = [
        (rank, each)
        for rank, each in found.items()
        # Fingerprints of different kinds of devices cannot be compared.
        if each != first and each[:_WIDTH] == first[:_WIDTH]
    ]
    if not others:
        return
    for at, name in enumerate(names, start=1):
        place = slice(at * _WIDTH, (at + 1) * _WIDTH)
        ranks = [rank for rank, each in others if each[place] != first[place]]
        if ranks:
            yield name, ranks


def _describe(differing: Mapping[str, Sequence[int]]) -> str:
    by_ranks: dict[tuple[int, ...], list[str]] = {}
    for name, ranks in differing.items():
        by_ranks.setdefault(tuple(ranks), []).append(name)
    return "ranks hold different values under the same name: " + "; ".join(
        f"{_ranks(ranks)} in {first_of(names, _MOST_NAMED)}"
        for ranks, names in list(by_ranks.items())[:_MOST_NAMED]
    )


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_MOST_NAMED])) + (", …" if len(ranks) > _MOST_NAMED else "")
    return f"rank {listed} differs" if len(ranks) == 1 else f"ranks {listed} differ"


_Layout: TypeAlias = tuple[tuple[str, bytes], ...]
_PIECE_BYTES: Final = 16 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """What one rank tells the coordinator about the files that it wrote.

    Thousands arrive at one rank: what only that one tells is read for all at once, equal bytes once.

    Attributes:
        lengths: data file -> bytes of its chunks, int64, compressed; None if they are those of the last
            committed report.
        evidence: fingerprints of the rank's replicas; None if they are not compared.
        place: the rank's root and machine.
        trained: see `trained_digests`.
    """

    files: Sequence[FileEntry] = ()
    num_chunks: int = 0
    lengths: Mapping[str, bytes] | None = None
    evidence: Findings | None = None
    place: tuple[str, str] = ("", "")
    trained: Mapping[str, str] = field(default_factory=dict[str, str])

    def to_bytes(self) -> bytes:
        """Encode it: as JSON, and behind a zero what is equal on many ranks."""
        files = chain.from_iterable((each.path, each.size_bytes, each.checksum) for each in self.files)
        own = json.dumps((self.num_chunks, *self.place, self.trained, *files), separators=(",", ":"))
        return own.encode() + b"\0" + encode((self.lengths, self.evidence))

    @classmethod
    def read_all(cls, messages: Sequence[bytes]) -> list[RankReport]:
        """Decode the reports of all ranks."""
        parts = [message.partition(b"\0") for message in messages]
        known = {rest: decode(rest) for rest in {rest for _, _, rest in parts}}
        owns = json.loads(b"[" + b",".join([own for own, _, _ in parts]) + b"]")
        return [
            cls(
                files=[
                    FileEntry(path=path, size_bytes=size, checksum=crc)
                    for path, size, crc in zip(files[::3], files[1::3], files[2::3], strict=True)
                ],
                num_chunks=num_chunks,
                lengths=known[rest][0],
                evidence=known[rest][1],
                place=(root, machine),
                trained=trained,
            )
            for (num_chunks, root, machine, trained, *files), (_, _, rest) in zip(owns, parts, strict=True)
        ]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class KeptContent:
    """Content with its checksum, in pieces on pages, as direct writes need it.

    That of `.metadata` is kept from save to save: at thousands of ranks it takes hundreds of megabytes.
    """

    pieces: Sequence[memoryview]
    checksum: str

    @classmethod
    def of(cls, content: Iterable[bytes | memoryview], algorithm: str = CRC32) -> KeptContent:
        running, kept, room = Checksum(algorithm), list[mmap.mmap](), 0
        for each in content:
            running.update(each)
            rest = memoryview(each)
            while rest:
                if not room:
                    kept.append(mmap.mmap(-1, _PIECE_BYTES))
                    room = _PIECE_BYTES
                room -= (taken := kept[-1].write(rest[:room]))
                rest = rest[taken:]
        return cls(pieces=[memoryview(each)[: each.tell()] for each in kept], checksum=str(running))

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.pieces))


@final
class ReportCache:
    """Caches for the writing of one rank, kept for the life of its manager.

    Concurrency: used by one save at a time, on its background thread.
    """

    def __init__(self, *, pace: Pace | None = None, algorithm: str = CRC32) -> None:
        self.pace = pace
        self.algorithm = algorithm
        self._reported: _Layout | None = None
        self._pending: _Layout | None = None
        self._lengths: dict[int, Mapping[str, bytes]] = {}
        self._metadata: dict[str, tuple[PlannedIndex, KeptContent]] = {}
        self._sizes: Mapping[str, int] = {}

    def report(self, files: Iterable[FileEntry], entries: Sequence[TableEntry]) -> RankReport:
        """Make the report of this rank's files; omit lengths that are already known."""
        layout = tuple((entry.path, entry.lengths) for entry in entries)
        known = layout == self._reported
        # Until the commit is known, it is uncertain whether the coordinator has kept them.
        self._reported, self._pending = None, layout
        return RankReport(
            files=list(files),
            num_chunks=sum(entry.num_chunks for entry in entries),
            lengths=None if known else {path: zlib.compress(lengths) for path, lengths in layout},
        )

    def committed(self) -> None:
        """Note the commit of the last report, whose layout the coordinator now knows."""
        self._reported, self._pending = self._pending, None

    def take(self, reports: Sequence[RankReport]) -> None:
        """Keep the lengths in the reports, one per rank, in order. Coordinator only.

        Raises:
            SaveError: a rank has never sent the lengths of its chunks.
        """
        changed = {rank: report.lengths for rank, report in enumerate(reports) if report.lengths is not None}
        if changed:
            self._metadata = {}
        self._lengths |= changed
        unknown = [rank for rank in range(len(reports)) if rank not in self._lengths]
        if unknown:
            raise SaveError(
                f"ranks {unknown} did not send the lengths of their chunks, and the coordinator has none of "
                "before: was it restarted alone? Restart all ranks together"
            )
        self._sizes = {entry.path: entry.size_bytes for report in reports for entry in report.files}

    def metadata(self, plans: Mapping[str, PlannedIndex]) -> dict[str, KeptContent]:
        """Return the content of every part's `.metadata`, from the cache unless stale.

        Raises:
            SaveError: a load would report what the ranks have written as damaged.
        """
        known = self._metadata
        for part, plan in plans.items():
            if part not in known or known[part][0] is not plan:
                known[part] = plan, KeptContent.of(encode_index(self._located(part, plan)), self.algorithm)
        return {part: known[part][1] for part in plans}

    def _located(self, part: str, plan: PlannedIndex) -> Index:
        prefix = f"{part}/" if part else ""
        lengths = [
            [_decoded(self._lengths[rank].get(f"{prefix}{data_name(rank, number)}")) for number in range(2)]
            for rank in sorted(self._lengths)
        ]
        try:
            index = plan.located(lengths)
            check(index, METADATA, lambda path: self._sizes[f"{prefix}{path}"])
        except (CorruptCheckpointError, ValueError) as error:
            raise SaveError(f"the written files could not be loaded: {error}") from error
        return index


def _decoded(lengths: bytes | None) -> Ints:
    return np.frombuffer(b"" if lengths is None else zlib.decompress(lengths), np.int64)
