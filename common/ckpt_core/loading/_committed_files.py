"""The small files of a checkpoint, compared with the manifest before use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeVar, final

from ckpt_core.commit import Manifest, read_entry, share, verify
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CorruptCheckpointError, FileFailure, damaged, lost
from ckpt_core.formats.checksums import combine_crc32, crc32, crc32_text, crc32_value
from ckpt_core.formats.chunks import ChunkTable, FileChunks
from ckpt_core.names import chunks_name, data_rank, is_own_file
from ckpt_core.reading import Payload, RangeRead
from ckpt_core.storage import ForeignFileError, RangeReader, Storage
from ckpt_core.types import FileEntry

T = TypeVar("T")

_logger = logger_of(__name__)
_MOST_NAMED: Final = 5
_LARGE_BYTES: Final = 64 << 10  # reading it takes longer than combining checksums without it
_BUFFER_BYTES: Final = 4 << 20


@final
class CommittedFiles:
    """The files of one checkpoint directory, read whole.

    Attributes:
        storage: that they are read from: of a compressed checkpoint, a view in which it is plain.
        inside: small files that are not in the directory, but inside one of others.
    """

    def __init__(self, storage: Storage, directory: str, manifest: Manifest | None) -> None:
        self.inside: Mapping[str, bytes] = {}
        self.storage = storage
        self.directory = directory
        self._manifest = manifest
        self._entries = {} if manifest is None else {entry.path: entry for entry in manifest.originals}
        self._twins = {} if manifest is None else manifest.twins()
        self._tables: dict[int, ChunkTable] = {}
        self._warned: set[str] = set()
        self._verified: set[str] = set()

    @property
    def url(self) -> str:
        """The directory's URL, for messages."""
        return f"{self.storage.url}/{self.directory}"

    @property
    def is_ours(self) -> bool:
        """Whether there is a manifest."""
        return self._manifest is not None

    @property
    def paths(self) -> Iterable[str]:
        """The committed files without their twins; none without a manifest."""
        return self._entries

    @property
    def entries(self) -> Sequence[FileEntry]:
        """The entries of these files in the manifest; empty without one."""
        return () if self._manifest is None else self._manifest.originals

    def others(self) -> Sequence[str]:
        """Return the files that are a host's or a user's."""
        if self.is_ours:
            return [path for path in self.paths if not is_own_file(path)]
        return [each.name for each in self.storage.list(self.directory) if not each.is_directory]

    @property
    def has_twins(self) -> bool:
        """Whether there are second files of the same bytes."""
        return bool(self._twins)

    def twin(self, path: str) -> str | None:
        """Return the second file of the same bytes as `path`; None if there is none."""
        found = self._twins.get(path)
        return None if found is None else found.path

    def has(self, path: str) -> bool:
        """Return whether the checkpoint has that file; an uncommitted one does not count."""
        if self.is_ours:
            return path in self._entries
        return path in self.inside or self.storage.exists(f"{self.directory}/{path}")

    def size(self, path: str) -> int:
        """Return the committed size of a file; without a manifest, its actual size."""
        if path in self._entries:
            return self._entries[path].size_bytes
        try:
            if not self.is_ours:
                return self.storage.size(f"{self.directory}/{path}")
        except FileNotFoundError:
            pass
        raise self.damaged(path, "missing")

    def read(self, path: str) -> bytes:
        """Read a file, or else its twin, and compare it with the manifest."""
        if path in self.inside:
            return self.inside[path]
        return self.whole_of(path, lambda found: self._read(found, path))

    def read_at(self, path: str, offset: int, size: int, storage: Storage | None = None) -> bytes:
        """Read a range of a file, unverified and at most what is there."""
        with (storage or self.storage).open(f"{self.directory}/{path}") as stream:
            stream.seek(offset)
            return stream.read(size)

    def whole_of(self, path: str, read: Callable[[str], T]) -> T:
        """Call `read` with a path, and if that is damaged, with the path of its twin."""
        try:
            return read(path)
        except CorruptCheckpointError as error:
            twin = self.twin(path)
            if twin is None:
                raise
            try:
                found = read(twin)
            except CorruptCheckpointError:
                raise error from None
            self.without_mended([replace(failure, twin=twin) for failure in error.failures])
            return found

    def intact(self, path: str) -> str:
        """Return the path of a committed file; of its twin, if only that is whole."""
        self.size(path)  # raises if it was never committed
        failures = verify(self.storage, self.directory, paths=[path]) if self.has_twins else []
        return failures[0].twin if failures and failures[0].twin else path

    def damaged_files(self, paths: Iterable[str]) -> list[FileFailure]:
        """Verify committed files whose tensors have no checksums of their own, each once."""
        paths = {*paths} - self._verified if self.is_ours else set[str]()
        failures = lost(verify(self.storage, self.directory, paths=paths) if paths else [])
        self._verified |= set() if failures else paths
        return failures

    def without_mended(self, failures: Sequence[FileFailure]) -> list[FileFailure]:
        """Return the failures for which no twin makes up; log the others, once per file."""
        found = {
            each.path: each for each in reversed(failures) if each.twin and each.path not in self._warned
        }
        self._warned |= found.keys()
        if found:
            _logger.warning(
                "%s is damaged, and what is lost is read from the second files: %s. Run `ckpt verify`, and "
                "repair it",
                self.url,
                "; ".join(map(str, list(found.values())[:_MOST_NAMED])),
            )
        return lost(failures)

    def _read(self, path: str, original: str) -> bytes:
        known = self._entries.get(original)
        entry = FileEntry(path=path, size_bytes=self.size(original), checksum=known.checksum if known else "")
        try:
            return read_entry(self.storage, self.directory, entry)
        except CorruptCheckpointError as error:
            raise error.retold(f"{error}. Nothing was loaded") from error

    def table(self, rank: int) -> ChunkTable:
        """Return the chunk table of a rank, read and parsed once."""
        if rank not in self._tables:
            name = chunks_name(rank)
            self._tables[rank] = ChunkTable.from_bytes(self.read(name), source=f"{self.url}/{name}")
        return self._tables[rank]

    def whole(self, rank: int, world_size: int) -> tuple[list[RangeRead], set[str]]:
        """Return reads of this rank's share of all files, and the paths without a CRC-32."""
        reads: list[RangeRead] = []
        others: set[str] = set()
        files = () if self._manifest is None else self._manifest.files
        entries = {entry.path: entry for entry in files}
        for path in share(files, rank, world_size):
            entry = entries[path]
            crc = crc32_value(entry.checksum)
            if crc is None:
                others.add(path)
                continue
            payload = Payload(path=path, key=path, offset=0, size_bytes=entry.size_bytes, crc32=crc)
            reads.append(RangeRead(payload=payload, start=0, stop=entry.size_bytes))
        return reads, others

    def around_payloads(self, rank: int, world_size: int) -> list[FileFailure]:
        """Check this rank's share of data files for damage around large payloads.

        A load does not use headers, padding and small entries, but stock tools need them. A file's CRC-32
        follows from theirs and from those of the payloads, which the load verifies anyway; so almost nothing
        must be read to know that a file is whole.
        """
        if not (self.is_ours and self.storage.rereads_from_memory):
            return []
        data = [entry for entry in self.entries if data_rank(entry.path) is not None]
        problems = {path: self._problem_around(path) for path in share(data, rank, world_size)}
        return self.without_mended(
            [
                FileFailure(path=path, problem=problem, twin=self.twin(path) or "")
                for path, problem in problems.items()
                if problem
            ]
        )

    def _problem_around(self, path: str) -> str:
        chunks = self.table(data_rank(path) or 0).files.get(path)
        if chunks is None or chunks.size_bytes != self.size(path):
            return "is not described by the chunk table of its rank"
        committed = crc32_value(self._entries[path].checksum)
        if committed is None:
            return ""
        try:
            with self.storage.open_ranges(f"{self.directory}/{path}") as reader:
                found = _crc_with_payloads(reader, chunks)
        except FileNotFoundError:
            return "missing"
        except (EOFError, ForeignFileError) as error:
            return str(error)
        if found == committed:
            return ""
        return (
            "the bytes around its tensors are not those that were committed: with them the checksum is "
            f"{crc32_text(found)}, {crc32_text(committed)} was committed"
        )

    def damaged(self, path: str, problem: str) -> CorruptCheckpointError:
        """Make the error of a damaged file."""
        error = damaged(self.url, path, problem)
        return error.retold(f"{error}. Nothing was loaded")

    def missing_or_truncated(self, rank: int, world_size: int) -> list[FileFailure]:
        """Check this rank's share of the files for missing ones and wrong sizes.

        A file whose twin is there is no failure.
        """
        listed = _listed_sizes(self.storage, self.directory) if self.is_ours else {}
        return [
            FileFailure(path=path, problem=problem)
            for path in list(self._entries)[rank::world_size]
            if (problem := self._size_problem(path, path, listed))
            and ((twin := self.twin(path)) is None or self._size_problem(twin, path, listed))
        ]

    def lacks_any(self) -> bool:
        """Return whether a file, twins aside, is missing or has another size."""
        listed = _listed_sizes(self.storage, self.directory) if self.is_ours else {}
        return any(self._size_problem(path, path, listed) for path in self._entries)

    def _size_problem(self, path: str, original: str, listed: Mapping[str, int]) -> str:
        try:
            size = listed[path] if path in listed else self.storage.size(f"{self.directory}/{path}")
        except FileNotFoundError:
            return "missing"
        committed = self.size(original)
        if size == committed:
            return ""
        disks = self.storage.parts if len(self.storage.parts) > 1 else ()
        if self._manifest is not None and self._manifest.is_everywhere(path):  # one whole is enough
            there = [disk.entry(f"{self.directory}/{path}") for disk in disks]
            if any(entry is not None and entry.size_bytes == committed for entry in there):
                return ""
        return f"has {size} bytes, {committed} were committed"


def _crc_with_payloads(reader: RangeReader, chunks: FileChunks) -> int:
    """Compute a file's CRC-32, with those of large payloads from the table."""
    buffer = memoryview(bytearray(_BUFFER_BYTES))
    columns, running, position = chunks.columns, 0, 0

    def read_to(stop: int) -> int:
        crc = running
        for begin in range(position, stop, _BUFFER_BYTES):
            piece = buffer[: min(_BUFFER_BYTES, stop - begin)]
            reader.read_into(begin, piece)
            crc = crc32(piece, crc)
        return crc

    for start, size, crc in zip(columns.payload_offset, columns.payload_bytes, chunks.crcs, strict=True):
        if start is not None and size is not None and size > _LARGE_BYTES:
            running = combine_crc32(read_to(start), crc, size)
            position = start + size
    return read_to(chunks.size_bytes)


def _listed_sizes(storage: Storage, directory: str) -> Mapping[str, int]:
    """Return the sizes of files where one listing is cheaper than a request for each."""
    if storage.rereads_from_memory:
        return {}
    return {entry.name: entry.size_bytes for entry in storage.list(directory) if not entry.is_directory}
