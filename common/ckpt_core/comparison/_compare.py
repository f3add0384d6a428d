"""The comparison of two checkpoints, from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, TypeAlias, final

import torch

from ckpt_core.comparison._one_side import Contents, LocatedTensor
from ckpt_core.comparison._values import MISSING, ValueDifference, value_differences
from ckpt_core.dcp import load_value
from ckpt_core.errors import ConfigError, UnsafeCheckpointError
from ckpt_core.storage import Storage
from ckpt_core.types import FileEntry, SavedTensor

_PIECE: Final = 1 << 20
"""Elements whose figures are computed at a time: they need 8 bytes for each, several times."""
_NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Difference: TypeAlias = Literal["added", "removed", "shape", "dtype", "content"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        name: DCP's, with its part in front; of a file of safetensors with the file in front.
        difference: the kind; `added` is in the second checkpoint only.
        a, b: its form in either; None where it is not.
        changed: elements with other bytes; None if they were not counted.
        max_abs: the largest absolute difference of floating numbers; None if there are no figures.
        relative_norm: the norm of the difference over the norm of the first tensor; likewise.
    """

    name: str
    difference: Difference
    a: SavedTensor | None = None
    b: SavedTensor | None = None
    changed: int | None = None
    max_abs: float | None = None
    relative_norm: float | None = None


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
    one, other = Contents(*a), Contents(*b)
    names = list({**one.tensors, **other.tensors})
    _refuse_vain_patterns(only, names, one, other)

    def wanted(name: str) -> bool:
        return not only or any(fnmatchcase(name, pattern) for pattern in only)

    names = [name for name in names if wanted(name)]
    decided = {name: _decided(name, one, other, quick=quick) for name in names}
    pairs = [each for each in decided.values() if isinstance(each, tuple)]
    found = {name: None if isinstance(each, tuple) else each for name, each in decided.items()}
    expect(sum(tensor.size_bytes for pair in pairs for tensor in pair))
    undecided: list[str] = []
    for first, second in pairs:
        if not (first.is_wrapped or second.is_wrapped):
            found[first.name] = _figures(first, second, seen)
        elif first.boxes.keys() != second.boxes.keys():
            undecided.append(first.name)
        elif any(first.records(box, seen) != second.records(box, seen) for box in first.boxes):
            found[first.name] = _content(first)
    return Comparison(
        tensors=[each for each in found.values() if each is not None],
        values=[each for each in _values(one, other, wanted) if wanted(each.name)],
        num_tensors=len(names),
        num_read=len(pairs) - len(undecided),
        undecided=undecided,
    )


def _decided(
    name: str, one: Contents, other: Contents, *, quick: bool
) -> TensorDifference | tuple[LocatedTensor, LocatedTensor] | None:
    """Compare a tensor without its bytes; return both if they have to be read."""
    a, b = one.tensors.get(name), other.tensors.get(name)
    files = [each.file.path for each in (a, b) if each and each.file]
    if len(files) == 2 and _same_file(one, other, files[0]):
        return None
    for contents in (one, other):
        if files and files[0] in contents.entries:
            contents.verify(files[0])
    if a is None or b is None or a.form != b.form:
        return _by_form(name, a, b)
    equal = None if a.is_wrapped or b.is_wrapped else _by_checksums(a, b)
    if equal is None or not (equal or quick):
        return a, b
    return None if equal else _content(a)


def _refuse_vain_patterns(only: Collection[str], tensors: Collection[str], *both: Contents) -> None:
    """Refuse patterns that match no name: a typing error would mean equal."""
    unmatched = {pattern for pattern in only if not any(fnmatchcase(name, pattern) for name in tensors)}
    for contents in both if unmatched else ():
        leaves = (
            leaf.name
            for path in contents.item_files
            for name, value in contents.items(path).items()
            for leaf in value_differences(name, value, MISSING)
        )
        for name in (*contents.byte_entries, *contents.host_files, *leaves):
            unmatched = {each for each in unmatched if not fnmatchcase(name, each)}
    if unmatched:
        shown = ", ".join(repr(pattern) for pattern in sorted(unmatched))
        example = f"such as {min(tensors)!r:.200}" if tensors else "of which neither has any tensor"
        places = " or ".join(contents.url for contents in both)
        raise ConfigError(f"--only {shown} names nothing in {places}: give dotted names, {example}")


def _by_form(name: str, a: LocatedTensor | None, b: LocatedTensor | None) -> TensorDifference:
    """Return what differs besides the bytes."""
    if a is None or b is None:
        return TensorDifference(
            name=name,
            difference="removed" if b is None else "added",
            a=None if a is None else a.form,
            b=None if b is None else b.form,
        )
    differs: Difference = "dtype" if a.form.shape == b.form.shape else "shape"
    return TensorDifference(name=name, difference=differs, a=a.form, b=b.form)


def _by_checksums(a: LocatedTensor, b: LocatedTensor) -> bool | None:
    """Return whether checksums say that two tensors are equal; None if they cannot."""
    sides: list[dict[Any, Any]] = []
    for tensor in (a, b):
        payloads = {box: place.payload for box, place in tensor.boxes.items() if math.prod(box[1])}
        if any(each is None or each.crc32 is None for each in payloads.values()):
            return None
        sides.append({box: (each.crc32, each.size_bytes) for box, each in payloads.items() if each})
    return None if sides[0].keys() != sides[1].keys() else sides[0] == sides[1]


def _content(tensor: LocatedTensor) -> TensorDifference:
    return TensorDifference(name=tensor.name, difference="content", a=tensor.form, b=tensor.form)


def _figures(
    first: LocatedTensor, second: LocatedTensor, seen: Callable[[int], None]
) -> TensorDifference | None:
    """Read and compare two tensors, piece by piece; None if their bytes are equal.

    Equal bytes are no difference, also those of infinities and NaN.
    """
    a, b = first.read(seen), second.read(seen)
    wide = torch.complex128 if a.is_complex() else torch.float64
    numeric = a.is_floating_point() or a.is_complex()
    changed, largest, squares, squares_of_a = 0, 0.0, 0.0, 0.0
    for start in range(0, a.numel(), _PIECE):
        one, other = a[start : start + _PIECE], b[start : start + _PIECE]
        differs = _differing(one, other)
        changed += (count := int(differs.sum()))
        if not numeric:
            continue
        try:
            of_a = one.to(wide)
            squares_of_a += float(torch.linalg.vector_norm(of_a)) ** 2
            if count:
                apart = other.to(wide).sub_(of_a).masked_fill_(~differs, 0).abs()
                most = float(apart.max())
                largest = most if math.isnan(most) else max(largest, most)
                squares += float(torch.linalg.vector_norm(apart)) ** 2
        except RuntimeError:
            numeric = False  # a dtype that torch does not convert, such as float4
    if not changed:
        return None
    norm, of = math.sqrt(squares), math.sqrt(squares_of_a)
    ratio = norm / of if of else (math.inf if norm else 0.0)  # 0.0 and -0.0 have other bytes
    return TensorDifference(
        name=first.name,
        difference="content",
        a=first.form,
        b=first.form,
        changed=changed,
        max_abs=largest if numeric else None,
        relative_norm=ratio if numeric else None,
    )


def _differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return which elements of two flat tensors have other bytes."""
    size = a.dtype.itemsize
    number = _NUMBERS.get(size)
    if number is not None:
        return a.view(number) != b.view(number)
    return (a.view(torch.uint8) != b.view(torch.uint8)).view(-1, size).any(1)


def _values(one: Contents, other: Contents, wanted: Callable[[str], bool]) -> Iterator[ValueDifference]:
    for name in sorted({*one.byte_entries, *other.byte_entries}):
        if wanted(name):
            yield from _entry(name, one, other)
    for path in sorted({*one.item_files, *other.item_files}):
        a, b = one.items(path), other.items(path)
        for name in {**a, **b}:
            yield from value_differences(name, a.get(name, MISSING), b.get(name, MISSING))
    for path in sorted({**one.host_files, **other.host_files}):
        first, second = one.host_files.get(path), other.host_files.get(path)
        if first and second and _same_file(one, other, path):
            continue
        values = (
            (one.host_values(first), other.host_values(second)) if first and second else (MISSING, MISSING)
        )
        if MISSING in values:
            yield ValueDifference(name=path, a=_file_text(first), b=_file_text(second))
        else:
            yield from value_differences(path, *values)


def _entry(name: str, *both: Contents) -> Iterator[ValueDifference]:
    """Compare a value among the tensors."""
    found = [each.byte_entry(name) for each in both]
    crcs = [None if each is None or each[1].payload is None else each[1].payload.crc32 for each in found]
    if crcs[0] is not None and crcs[0] == crcs[1]:
        return
    contents = [None if each is None else each[0].read_entry(each[1]) for each in found]
    if contents[0] == contents[1]:
        return
    try:
        values = [
            MISSING if content is None else load_value(content, name, allow_pickle=False)
            for content in contents
        ]
    except UnsafeCheckpointError:
        texts = [
            None if content is None else f"{len(content):,} bytes that only pickle reads"
            for content in contents
        ]
        yield ValueDifference(name=name, a=texts[0], b=texts[1])
        return
    yield from value_differences(name, *values)


def _same_file(one: Contents, other: Contents, path: str) -> bool:
    a, b = one.entries[path], other.entries[path]
    if a.size_bytes != b.size_bytes or a.checksum == b.checksum:
        return a.size_bytes == b.size_bytes
    if a.checksum.partition(":")[0] == b.checksum.partition(":")[0]:
        return False
    return all(map(bytes.__eq__, one.pieces(path), other.pieces(path)))


def _file_text(entry: FileEntry | None) -> str | None:
    return None if entry is None else f"file of {entry.size_bytes:,} bytes"
