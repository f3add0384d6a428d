"""The comparison of two checkpoints, from top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import final

from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ckpt_core.comparison._directory_contents import Contents, StoredChunk
from ckpt_core.comparison._tensor_pairs import TensorDifference, equal_by_checksums, figures, whole_tensor
from ckpt_core.comparison._values import MISSING, ValueDifference, value_differences
from ckpt_core.dcp import ChunkLocation, checked_zip, load_value
from ckpt_core.errors import ConfigError, UnsafeCheckpointError
from ckpt_core.formats.checksums import crc32
from ckpt_core.formats.zips import payload_offset, read_directory
from ckpt_core.storage import Storage
from ckpt_core.types import FileEntry, SavedTensor

_OF_THE_WRITER = frozenset({".format_version", ".storage_alignment", ".data/serialization_id"})
"""Records of a torch zip that say how it was written."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The differences of two checkpoints, and how much was compared.

    Attributes:
        tensors: those that differ.
        values: plain values that differ, and files of a host that hold none.
        num_tensors: tensors in either.
        num_read: tensors that were read, because checksums did not decide.
        undecided: names of tensors that cannot be compared: made of others, and divided otherwise.
    """

    tensors: Sequence[TensorDifference] = field(default_factory=tuple[TensorDifference, ...])
    values: Sequence[ValueDifference] = field(default_factory=tuple[ValueDifference, ...])
    undecided: Sequence[str] = ()
    num_tensors: int = 0
    num_read: int = 0

    @property
    def equal(self) -> bool:
        """Whether everything was compared, and nothing differs."""
        return not (self.tensors or self.values or self.undecided)


def compare(
    a: tuple[Storage, str],
    b: tuple[Storage, str],
    *,
    only: Collection[str] = (),
    quick: bool = False,
    seen: Callable[[int], None] = lambda _: None,
    expect: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Compare two checkpoints of ours or of stock DCP.

    Args:
        a: root and name of the first.
        b: of the second.
        only: patterns of names, as by `fnmatch`; everything if empty.
        quick: whether checksums that differ are enough: no figures are computed then.
        seen: called with a number of bytes read.
        expect: called once, before tensors are read, with how many bytes they are.

    Raises:
        CheckpointError: one of them is missing or damaged.
        ConfigError: a pattern of `only` names nothing in either.
        OSError: storage failed.
    """
    with closing(Contents(*a)) as one, closing(Contents(*b)) as other:
        return _Comparing(one, other, only=only, quick=quick, seen=seen).run(expect)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _TensorPair:
    """A tensor of the same form in both, whose bytes decide."""

    name: str
    form: SavedTensor
    chunks: tuple[Sequence[StoredChunk], Sequence[StoredChunk]]

    @property
    def is_wrapped(self) -> bool:
        """Whether it is made of others in one of them."""
        return any(each.place.wrapped for side in self.chunks for each in side)

    @property
    def size_bytes(self) -> int:
        """What reading both takes."""
        places = [each.place for side in self.chunks for each in side]
        return sum(
            place.size_bytes if place.wrapped or place.payload is None else place.payload.size_bytes
            for place in places
        )

    @property
    def differs(self) -> TensorDifference:
        """The difference, without figures."""
        return TensorDifference(name=self.name, difference="content", a=self.form, b=self.form)


@final
class _Comparing:
    def __init__(
        self,
        a: Contents,
        b: Contents,
        *,
        only: Collection[str],
        quick: bool,
        seen: Callable[[int], None],
    ) -> None:
        self._a, self._b = a, b
        self._only = only
        self._quick = quick
        self._seen = seen
        self._num_read = 0
        self._undecided: list[str] = []

    def run(self, expect: Callable[[int], None]) -> Comparison:
        one, other = self._a.tensors(), self._b.tensors()
        self._refuse_vain_patterns({**one, **other})
        names = [name for name in {**one, **other} if self._wants(name)]
        decided = {name: self._decided(name, one.get(name), other.get(name)) for name in names}
        reads = [each for each in decided.values() if isinstance(each, _TensorPair)]
        expect(sum(each.size_bytes for each in reads))
        tensors = [self._read(each) if isinstance(each, _TensorPair) else each for each in decided.values()]
        return Comparison(
            tensors=[each for each in tensors if each is not None],
            values=[each for each in self._values() if self._wants(each.name)],
            num_tensors=len(names),
            num_read=self._num_read,
            undecided=self._undecided,
        )

    def _refuse_vain_patterns(self, tensors: Collection[str]) -> None:
        """Refuse patterns that match no name: a typing error would mean equal."""
        unmatched = {
            pattern for pattern in self._only if not any(fnmatchcase(name, pattern) for name in tensors)
        }
        for name in self._names_of_values() if unmatched else ():
            unmatched = {pattern for pattern in unmatched if not fnmatchcase(name, pattern)}
        if unmatched:
            shown = ", ".join(repr(pattern) for pattern in sorted(unmatched))
            example = f"such as {min(tensors)!r:.200}" if tensors else "of which neither has any tensor"
            raise ConfigError(
                f"--only {shown} names nothing in {self._a.url} or {self._b.url}: "
                f"give dotted names, {example}"
            )

    def _names_of_values(self) -> Iterator[str]:
        for contents in (self._a, self._b):
            yield from contents.byte_entries()
            yield from contents.files.host_files()
            for path in contents.files.item_files():
                for item, value in contents.files.items(path).items():
                    for leaf in value_differences(f"{_prefix_of(path)}{item}", value, MISSING):
                        yield leaf.name

    def _wants(self, name: str) -> bool:
        return not self._only or any(fnmatchcase(name, pattern) for pattern in self._only)

    def _decided(
        self, name: str, a: TensorStorageMetadata | None, b: TensorStorageMetadata | None
    ) -> TensorDifference | _TensorPair | None:
        """Compare a tensor without its bytes; return the pair that has to be read."""
        one, other = _form(a), _form(b)
        if one is None or other is None:
            return TensorDifference(
                name=name, difference="removed" if other is None else "added", a=one, b=other
            )
        if one.shape != other.shape:
            return TensorDifference(name=name, difference="shape", a=one, b=other)
        if one.dtype != other.dtype:
            return TensorDifference(name=name, difference="dtype", a=one, b=other)
        pair = _TensorPair(
            name=name,
            form=one,
            chunks=(self._a.chunks(name), self._b.chunks(name)),
        )
        if pair.is_wrapped:
            return pair
        equal = equal_by_checksums(*pair.chunks)
        if equal is None or not (equal or self._quick):
            return pair
        return None if equal else pair.differs

    def _read(self, pair: _TensorPair) -> TensorDifference | None:
        if not pair.is_wrapped:
            return self._measured(pair)
        equal = self._equal_archives(*pair.chunks)
        if equal is None:
            self._undecided.append(pair.name)
        return pair.differs if equal is False else None

    def _measured(self, pair: _TensorPair) -> TensorDifference | None:
        """Read both tensors; return their difference with its figures."""
        self._num_read += 1
        a, b = (
            whole_tensor(contents, each, pair.form, self._seen)
            for contents, each in zip((self._a, self._b), pair.chunks, strict=True)
        )
        return figures(pair.name, pair.form, a, b)

    def _equal_archives(self, one: Sequence[StoredChunk], other: Sequence[StoredChunk]) -> bool | None:
        """Compare a tensor made of others by its zips' records; None if divided otherwise."""
        first, second = (
            {(each.offsets, each.sizes): each.place for each in chunks} for chunks in (one, other)
        )
        if first.keys() != second.keys():
            return None
        self._num_read += 1
        return all(
            self._records(self._a, place) == self._records(self._b, second[box])
            for box, place in first.items()
        )

    def _records(self, contents: Contents, place: ChunkLocation) -> dict[str, tuple[int, int]]:
        """Return size and checksum of every record of a zip, whose padding may differ."""
        content = contents.read(place)
        checked_zip(content, f"{contents.url}/{place.path}: {place.key!r:.200}")
        self._seen(len(content))
        view = memoryview(content)

        def read_at(offset: int, size: int) -> bytes:
            return bytes(view[offset : offset + size])

        directory = read_directory(read_at, len(content))
        found: dict[str, tuple[int, int]] = {}
        for record in directory.records.values():
            start = payload_offset(read_at, directory, record)
            # Not the checksum in the directory: torch can be configured to write none.
            found[directory.inner_name(record)] = (
                record.size_bytes,
                crc32(view[start : start + record.size_bytes]),
            )
        return {name: each for name, each in found.items() if name not in _OF_THE_WRITER}

    def _values(self) -> Iterator[ValueDifference]:
        ours, theirs = set(self._a.byte_entries()), set(self._b.byte_entries())
        for name in sorted(ours | theirs):
            if self._wants(name):
                yield from self._entry(name, in_a=name in ours, in_b=name in theirs)
        files = set(self._a.files.item_files()), set(self._b.files.item_files())
        for path in sorted(files[0] | files[1]):
            one = self._a.files.items(path) if path in files[0] else {}
            other = self._b.files.items(path) if path in files[1] else {}
            for item in {**one, **other}:
                yield from value_differences(
                    f"{_prefix_of(path)}{item}", one.get(item, MISSING), other.get(item, MISSING)
                )
        yield from self._host_files()

    def _entry(self, name: str, *, in_a: bool, in_b: bool) -> Iterator[ValueDifference]:
        places = (
            self._a.byte_entry(name) if in_a else None,
            self._b.byte_entry(name) if in_b else None,
        )
        crcs = [None if place is None or place.payload is None else place.payload.crc32 for place in places]
        if crcs[0] is not None and crcs[0] == crcs[1]:
            return
        contents = [
            b"" if place is None else self._read_entry(holder, place)
            for holder, place in zip((self._a, self._b), places, strict=True)
        ]
        if in_a and in_b and contents[0] == contents[1]:
            return
        try:
            values = [
                MISSING if place is None else load_value(content, name, allow_pickle=False)
                for place, content in zip(places, contents, strict=True)
            ]
        except UnsafeCheckpointError:
            texts = [f"{len(content):,} bytes that only pickle reads" for content in contents]
            yield ValueDifference(name=name, a=texts[0] if in_a else None, b=texts[1] if in_b else None)
            return
        yield from value_differences(name, *values)

    def _read_entry(self, contents: Contents, place: ChunkLocation) -> bytes:
        content = contents.read(place)
        payload = place.payload
        if payload is not None and payload.crc32 not in {None, crc32(content)}:
            raise contents.damaged(place, "its checksum differs from that in the chunk table")
        checked_zip(content, f"{contents.url}/{place.path}: {place.key!r:.200}")
        return content

    def _host_files(self) -> Iterator[ValueDifference]:
        one, other = self._a.files.host_files(), self._b.files.host_files()
        for path in sorted({**one, **other}):
            a, b = one.get(path), other.get(path)
            if a is None or b is None:
                yield ValueDifference(name=path, a=_file_text(a), b=_file_text(b))
            elif not self._same_file(a, b):
                yield from self._host_file(a, b)

    def _host_file(self, a: FileEntry, b: FileEntry) -> Iterator[ValueDifference]:
        one, other = self._a.files.host_values(a), self._b.files.host_values(b)
        if one is MISSING or other is MISSING:
            yield ValueDifference(name=a.path, a=_file_text(a), b=_file_text(b))
        else:
            yield from value_differences(a.path, one, other)

    def _same_file(self, a: FileEntry, b: FileEntry) -> bool:
        if a.size_bytes != b.size_bytes or a.checksum == b.checksum:
            return a.size_bytes == b.size_bytes
        if a.checksum.partition(":")[0] == b.checksum.partition(":")[0]:
            return False
        pieces = zip(self._a.files.pieces(a.path), self._b.files.pieces(b.path), strict=False)
        return all(one == other for one, other in pieces)


def _prefix_of(path: str) -> str:
    """Return what stands before the names of the items of a file: its rank."""
    return "" if path.startswith("shared") else f"{path.removesuffix('.json')}: "


def _form(entry: TensorStorageMetadata | None) -> SavedTensor | None:
    if entry is None:
        return None
    return SavedTensor(shape=tuple(entry.size), dtype=str(entry.properties.dtype).removeprefix("torch."))


def _file_text(entry: FileEntry | None) -> str | None:
    return None if entry is None else f"file of {entry.size_bytes:,} bytes"
