"""The comparison of plain values: nested mappings and lists, leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, final

import torch

_LONGEST_LIST: Final = 16
_LONGEST_TEXT: Final = 80
_PLAIN: Final = (bool, int, float, complex, str, type(None))
MISSING: Final = object()


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ValueDifference:
    """A value that differs, in words; None where it is not."""

    name: str
    a: str | None
    b: str | None


def value_differences(name: str, a: Any, b: Any) -> Iterator[ValueDifference]:
    """Yield the leaves that differ, by dotted name; `MISSING` stands for no value."""
    one, other = dict(_leaves(a, name)), dict(_leaves(b, name))
    for key in {**one, **other}:
        first, second = one.get(key, MISSING), other.get(key, MISSING)
        if not _same(first, second):
            yield ValueDifference(name=key, a=text_of(first), b=text_of(second))


def text_of(value: Any) -> str | None:
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


def _same(a: Any, b: Any) -> bool:
    if a is MISSING or b is MISSING or type(a) is not type(b):
        return a is b
    if isinstance(a, torch.Tensor):
        flat = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)
    if isinstance(a, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if hasattr(a, "tobytes"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if type(a) in {list, tuple}:
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)
