"""The comparison of two checkpoints, from top to bottom."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, final

import torch

from ckpt_core._torch_internals import same_bytes
from ckpt_core.comparison._one_side import MISSING, Contents
from ckpt_core.dcp import load_value
from ckpt_core.errors import ConfigError, UnsafeCheckpointError
from ckpt_core.loading import LocatedTensor
from ckpt_core.storage import Storage
from ckpt_core.types import SavedTensor, matches_any

_PIECE: Final = 1 << 20
"""Elements whose figures are computed at a time: they need 8 bytes for each, several times."""
_LONGEST_LIST: Final = 16
_LONGEST_TEXT: Final = 80
_PLAIN: Final = (bool, int, float, complex, str, type(None))
Difference: TypeAlias = Literal["added", "removed", "shape", "dtype", "content"]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDifference:
    """A tensor that differs.

    Attributes:
        name: of the entry in the whole state; of a file of safetensors of the host with the file in front.
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
class ValueDifference:
    """A value that differs, in words; None where it is not."""

    name: str
    a: str | None
    b: str | None


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
    a: tuple[Storage, str, str],
    b: tuple[Storage, str, str],
    *,
    only: Collection[str] = (),
    quick: bool = False,
    seen: Callable[[int], None] = lambda _: None,
    expect: Callable[[int], None] = lambda _: None,
) -> Comparison:
    """Compare two checkpoints, of ours or of others.

    Each is a root, a name there, and a file in that which others wrote, or "". `only` are patterns of names,
    as by `fnmatch`; everything if empty. `quick`: checksums that differ are enough, and no figures are
    computed. `seen` is called with numbers of bytes read, `expect` once before, with how many there are.

    Raises:
        CheckpointError: one of them is missing or damaged.
        ConfigError: a pattern of `only` names nothing in either.
        OSError: storage failed.
    """
    one, other = Contents(*a), Contents(*b)
    names = list({**one.tensors, **other.tensors})
    _refuse_vain_patterns(only, names, one, other)

    def wanted(name: str) -> bool:
        return matches_any((name,), only)

    names = list(filter(wanted, names))
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
    held = [(side, file) for side, each in ((one, a), (other, b)) if each and (file := side.host_file(each))]
    if len(held) == 2 and held[0][1] == held[1][1] and _same_file(one, other, held[0][1]):
        return None
    for side, file in held:
        side.verify(file)
    if a is None or b is None:
        form_a, form_b = (each and each.form for each in (a, b))
        return TensorDifference(name=name, difference="removed" if b is None else "added", a=form_a, b=form_b)
    if a.form != b.form:
        differs: Difference = "dtype" if a.shape == b.shape else "shape"
        return TensorDifference(name=name, difference=differs, a=a.form, b=b.form)
    sums = a.checksums, b.checksums
    if sums[0] is None or sums[1] is None or sums[0].keys() != sums[1].keys():
        return a, b
    if sums[0] == sums[1]:
        return None
    return _content(a) if quick else (a, b)


def _refuse_vain_patterns(only: Collection[str], tensors: Collection[str], *both: Contents) -> None:
    """Refuse patterns that match no name: a typing error would mean equal."""
    used, names = set[str](), list(tensors)
    for contents in both if only else ():
        names += [*contents.byte_entries, *contents.host_files]
        for item, value in contents.items.items():
            names += [leaf for leaf, _ in _leaves(value, item)]
    for name in names:
        matches_any((name,), only, used)
    if unmatched := sorted(set(only) - used):
        shown = ", ".join(map(repr, unmatched))
        example = f"such as {min(tensors)!r:.200}" if tensors else "of which neither has any tensor"
        places = " or ".join(contents.url for contents in both)
        raise ConfigError(f"--only {shown} names nothing in {places}: give dotted names, {example}")


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
        differs = (one.view(torch.uint8) != other.view(torch.uint8)).view(len(one), a.dtype.itemsize).any(1)
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


def _values(one: Contents, other: Contents, wanted: Callable[[str], bool]) -> Iterator[ValueDifference]:
    for name in sorted({*one.byte_entries, *other.byte_entries}):
        if wanted(name):
            yield from _entry(name, one, other)
    for name in {**one.items, **other.items}:
        yield from _value_differences(name, one.items.get(name, MISSING), other.items.get(name, MISSING))
    for path in sorted({**one.host_files, **other.host_files}):
        a, b = one.host_files.get(path), other.host_files.get(path)
        if a and b and _same_file(one, other, path):
            continue
        values = (one.host_values(a), other.host_values(b)) if a and b else (MISSING, MISSING)
        if MISSING not in values:
            yield from _value_differences(path, *values)
            continue
        texts = [None if each is None else f"file of {each.size_bytes:,} bytes" for each in (a, b)]
        yield ValueDifference(name=path, a=texts[0], b=texts[1])


def _entry(name: str, *both: Contents) -> Iterator[ValueDifference]:
    places = []
    for each in both:
        part, index = each.byte_entries.get(name, (None, None))
        places.append(None if part is None or index is None else (part, part.find([index])[index]))
    crcs = [None if each is None or each[1].payload is None else each[1].payload.crc32 for each in places]
    if crcs[0] is not None and crcs[0] == crcs[1]:
        return
    contents = [None if each is None else each[0].read_entry(each[1]) for each in places]
    if contents[0] == contents[1]:
        return
    try:
        values = [
            MISSING if content is None else load_value(content, name, allow_pickle=False)
            for content in contents
        ]
        yield from _value_differences(name, *values)
    except UnsafeCheckpointError:
        texts = [each if each is None else f"{len(each):,} bytes that only pickle reads" for each in contents]
        yield ValueDifference(name=name, a=texts[0], b=texts[1])


def _same_file(one: Contents, other: Contents, path: str) -> bool:
    a, b = one.entries[path], other.entries[path]
    if a.size_bytes != b.size_bytes or a.checksum == b.checksum:
        return a.size_bytes == b.size_bytes
    if a.checksum.partition(":")[0] == b.checksum.partition(":")[0]:
        return False
    return all(map(bytes.__eq__, one.pieces(path), other.pieces(path)))


def _value_differences(name: str, a: Any, b: Any) -> Iterator[ValueDifference]:
    """Yield the leaves that differ, by dotted name; `MISSING` stands for no value."""
    one, other = dict(_leaves(a, name)), dict(_leaves(b, name))
    for key in {**one, **other}:
        first, second = one.get(key, MISSING), other.get(key, MISSING)
        if not _are_same(first, second):
            yield ValueDifference(name=key, a=_text_of(first), b=_text_of(second))


def _text_of(value: Any) -> str | None:
    """Describe a value in one line: a plain short one by itself, others by their type."""
    if value is MISSING:
        return None
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{dtype} tensor of shape {list(value.shape)}" if value.numel() != 1 else repr(value.item())
    short = type(value) in {list, tuple} and len(value) <= _LONGEST_LIST
    if isinstance(value, _PLAIN) or (short and all(isinstance(each, _PLAIN) for each in value)):
        text = repr(value)
        return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"
    size = f" of {len(value):,}" if hasattr(value, "__len__") else ""
    return f"{type(value).__name__}{size}"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if value is MISSING:
        return
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}" if name else str(key))
    elif type(value) in {list, tuple} and not all(isinstance(each, _PLAIN) for each in value):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{name}.{index}")
    else:
        yield name, value


def _are_same(a: Any, b: Any) -> bool:
    if a is MISSING or b is MISSING or type(a) is not type(b):
        return a is b
    if isinstance(a, torch.Tensor):
        return same_bytes(a, b)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if hasattr(a, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if type(a) in {list, tuple}:
        return len(a) == len(b) and all(map(_are_same, a, b))
    return bool(a == b)
