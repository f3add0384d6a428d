"""Messages between ranks: values as bytes and back, without running code.

JSON, with tags for types that JSON lacks; raw bytes follow the JSON. Beside plain values there are only the
classes of this suite that are declared as messages, each by its name in one table, and its errors. Decoded
values have the types that those classes declare.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, final, get_args, get_origin, get_type_hints

from ckpt_core import errors
from ckpt_core.errors import CheckpointError, Failure, FileFailure
from ckpt_core.types import CheckpointInfo, Lineage

C = TypeVar("C", bound=type)
T = TypeVar("T")

_SCALARS: Final = frozenset({str, int, float, bool, NoneType})
_LENGTH_BYTES: Final = 8
_TUPLE, _MAPPING, _SET, _BYTES, _OBJECT, _ERROR = "tuple", "mapping", "set", "bytes", "object", "error"
_OS_ERROR: Final = "OSError"
_ERRORS: Final[Mapping[str, type[CheckpointError]]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, CheckpointError)
}
_MALFORMED: Final = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


class MessageError(ValueError):
    """A value cannot be encoded as a message, or the bytes are not one."""


@final
@dataclass(frozen=True, slots=True)
class _Form:
    """The conversion of objects of one class to plain values and back."""

    name: str
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]
    names: Sequence[str] | None = None


_BY_CLASS: Final[dict[type, _Form]] = {}
_BY_NAME: Final[dict[str, _Form]] = {}


def register(
    kind: type[T],
    pack: Callable[[T], Any],
    unpack: Callable[[Any], T],
    *,
    names: Sequence[str] | None = None,
) -> None:
    """Register a class of messages: how it becomes plain values or messages, and back.

    `unpack` is given values that may be malformed, and then raises errors of `_MALFORMED`.
    """
    form = _Form(f"{kind.__module__}.{kind.__qualname__}", pack, unpack, names)
    if form.name in _BY_NAME:
        raise TypeError(f"there is a message {form.name} already")
    _BY_CLASS[kind] = _BY_NAME[form.name] = form


def message(kind: C) -> C:
    """Register a dataclass or an enum as a message between ranks; a decorator."""
    made_by: Any = kind
    if issubclass(kind, Enum):
        register(made_by, lambda member: member.name, lambda name: made_by[_expect(name, str)])
        return kind
    if not is_dataclass(kind):
        raise TypeError(f"{kind.__qualname__} is neither a dataclass nor an enum")
    names = [field.name for field in fields(kind)]

    def pack(found: Any) -> tuple[Any, ...]:
        return tuple(getattr(found, name) for name in names)

    def unpack(values: Any) -> Any:
        given = dict(zip(names, _expect(values, tuple), strict=True))
        _check_fields(kind, given)
        return made_by(**given)

    register(made_by, pack, unpack, names=names)
    return cast("C", made_by)


def encode(value: object) -> bytes:
    """Encode a value.

    Raises:
        MessageError: a part of it cannot be sent; the text names its type and place.
    """
    blobs: list[bytes] = []
    try:
        text = json.dumps(_pack(value, "", blobs), separators=(",", ":")).encode()
    except RecursionError as error:
        raise MessageError("a value for other ranks is nested too deep, or in itself") from error
    return b"".join((len(text).to_bytes(_LENGTH_BYTES, "big"), text, *blobs))


def decode(content: bytes) -> Any:
    """Decode a value.

    Raises:
        MessageError: `encode` did not make these bytes.
    """
    start = _LENGTH_BYTES
    stop = start + int.from_bytes(content[:start], "big")
    if not start <= stop <= len(content):
        raise MessageError(f"{len(content)} bytes, of which {stop} should be the text")
    blobs = _Blobs(memoryview(content)[stop:])
    try:
        value = _unpack(json.loads(content[start:stop]), blobs)
    except _MALFORMED as error:
        raise MessageError(f"{type(error).__name__}: {error!s:.200}") from error
    if blobs.left:
        raise MessageError(f"{blobs.left} bytes too many")
    return value


@final
class _Blobs:
    """The bytes after the text, taken in order."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    @property
    def left(self) -> int:
        return len(self._content)

    def take(self, size: Any) -> bytes:
        if not 0 <= _expect(size, int) <= len(self._content):
            raise ValueError(f"{size} bytes of {len(self._content)}")
        found, self._content = self._content[:size], self._content[size:]
        return bytes(found)


def _pack(value: Any, place: str, blobs: list[bytes]) -> Any:
    kind: type[Any] = type(value)
    if kind in _SCALARS:
        return value
    if kind is list:
        return _pack_each(value, place, blobs)
    if kind is tuple:
        return {_TUPLE: _pack_each(value, place, blobs)}
    if (form := _BY_CLASS.get(kind)) is not None:
        packed = form.pack(value)
        if form.names is None:
            return {_OBJECT: [form.name, _pack(packed, place, blobs)]}
        return {_OBJECT: [form.name, {_TUPLE: _pack_each(packed, place, blobs, form.names)}]}
    return _pack_other(value, place, blobs)


def _pack_other(value: Any, place: str, blobs: list[bytes]) -> Any:
    match value:
        case Mapping():
            keys, values = list(value), list(value.values())
            packed = _pack_each(keys, f"{place} key", blobs)
            return {_MAPPING: [packed, _pack_each(values, place, blobs, keys)]}
        case bytes() | bytearray() | memoryview():
            blobs.append(bytes(value))
            return {_BYTES: len(blobs[-1])}
        case frozenset():
            return {_SET: _pack_each(list(value), place, blobs)}
        case CheckpointError() | OSError():
            return {_ERROR: _pack_error(value, place, blobs)}
        case _:
            return _plain(value, place)


def _plain(value: object, place: str) -> str | int | float:
    """Convert a number of NumPy's, or a string of a host's class, to the plain type."""
    if not isinstance(value, Enum):
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
    at = f" ({place.strip()})" if place else ""
    raise MessageError(
        f"a {type(value).__module__}.{type(value).__qualname__}{at} cannot go to other ranks: only numbers, "
        "text, bytes, None, and lists, tuples and dictionaries of those can"
    )


def _pack_each(
    values: Sequence[Any], place: str, blobs: list[bytes], keys: Sequence[Any] | None = None
) -> list[Any]:
    if _SCALARS.issuperset(map(type, values)):
        return list(values)
    names = range(len(values)) if keys is None else keys
    return [_pack(each, f"{place}[{name!r:.40}]", blobs) for name, each in zip(names, values, strict=True)]


def _pack_error(error: CheckpointError | OSError, place: str, blobs: list[bytes]) -> list[Any]:
    if isinstance(error, CheckpointError):
        kind = next(each for each in type(error).__mro__ if _ERRORS.get(each.__name__) is each)
        attributes = dict(_sendable(kind, error.attributes))
        return [kind.__name__, str(error.message), _pack(attributes, place, blobs)]
    said = [str(error)] if error.errno is None else [error.errno, error.strerror, error.filename]
    return [_OS_ERROR, *(each if type(each) in _SCALARS else str(each) for each in said)]


def _sendable(kind: type, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield an error's attributes that can be sent; others are dropped."""
    hints = _hints(kind)
    for name, value in attributes.items():
        with suppress(MessageError):
            encode(value)
            if name not in hints or _fits(value, hints[name]):
                yield name, value


def _unpack(found: Any, blobs: _Blobs) -> Any:
    kind: type[Any] = type(found)
    if kind in _SCALARS:
        return found
    if kind is list:
        return _unpack_each(found, blobs)
    ((tag, content),) = found.items()
    return _UNPACK[tag](content, blobs)


def _unpack_mapping(content: Any, blobs: _Blobs) -> dict[Any, Any]:
    keys, values = content
    return dict(zip(_unpack_each(keys, blobs), _unpack_each(values, blobs), strict=True))


def _unpack_object(content: Any, blobs: _Blobs) -> Any:
    name, packed = content
    return _BY_NAME[name].unpack(_unpack(packed, blobs))


def _unpack_each(values: Any, blobs: _Blobs) -> list[Any]:
    if _SCALARS.issuperset(map(type, _expect(values, list))):
        return cast("list[Any]", values)
    return [_unpack(each, blobs) for each in values]


def _unpack_error(content: list[Any], blobs: _Blobs) -> BaseException:
    name, *said = content
    if name == _OS_ERROR:
        if not _SCALARS.issuperset(map(type, said)):
            raise TypeError("an OSError of something else than plain values")
        return OSError(*said)
    text, attributes = said
    attributes = _expect(_unpack(attributes, blobs), dict)
    kind = _ERRORS[name]
    _check_fields(kind, attributes)
    if any(_expect(attribute, str)[:1] in {"", "_"} for attribute in attributes):
        raise ValueError(f"attributes of {name} that no error has")
    return kind(_expect(text, str), **attributes)


_UNPACK: Final[Mapping[str, Callable[[Any, _Blobs], Any]]] = {
    _TUPLE: lambda content, blobs: tuple(_unpack_each(content, blobs)),
    _SET: lambda content, blobs: frozenset(_unpack_each(content, blobs)),
    _MAPPING: _unpack_mapping,
    _OBJECT: _unpack_object,
    _BYTES: lambda content, blobs: blobs.take(content),
    _ERROR: _unpack_error,
}


def _expect(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} should be")
    return value


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Return the declared type of every field of a class."""
    return {name: hint for name, hint in get_type_hints(kind).items() if name[0] != "_"}


def _check_fields(kind: type, given: Mapping[str, Any]) -> None:
    for name, hint in _hints(kind).items():
        if name in given and not _fits(given[name], hint):
            raise TypeError(f"{name} of {kind.__qualname__} is a {type(given[name]).__name__}")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a declared type; numbers and text exactly."""
    origin, of = get_origin(hint), get_args(hint)
    if kinds := _scalars_of(hint):
        return type(value) in kinds
    if origin in {Union, UnionType}:
        return any(_fits(value, each) for each in of)
    if origin is Literal:
        return value in of
    if isinstance(origin, type) and issubclass(origin, Collection):
        return _fits_container(value, origin, of)
    return not isinstance(hint, type) or isinstance(value, hint)


def _fits_container(value: Any, origin: type, of: tuple[Any, ...]) -> bool:
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and _all_fit(value, of[0]) and _all_fit(value.values(), of[1])
    if not isinstance(value, origin if origin in {list, tuple, frozenset} else (list, tuple, frozenset)):
        return False
    if origin is tuple and of[-1] is not Ellipsis:
        return len(value) == len(of) and all(map(_fits, value, of))
    return _all_fit(value, of[0])


def _all_fit(values: Collection[Any], hint: Any) -> bool:
    if kinds := _scalars_of(hint):
        return kinds.issuperset(map(type, values))
    return all(_fits(value, hint) for value in values)


@cache
def _scalars_of(hint: Any) -> frozenset[type]:
    """Return the exact types of values of this type, if they are scalars; else none."""
    if hint in {None, NoneType}:
        return frozenset({NoneType})
    if hint is float:
        return frozenset({int, float})
    if hint in _SCALARS:
        return frozenset({hint})
    if get_origin(hint) in {Union, UnionType}:
        found = [_scalars_of(each) for each in get_args(hint)]
        return frozenset[type]().union(*found) if all(found) else frozenset()
    return frozenset()


for _kind in (CheckpointInfo, Lineage, FileFailure, Failure):
    message(_kind)
