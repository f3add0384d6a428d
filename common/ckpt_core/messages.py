"""Messages between ranks: values as bytes and back, without running code.

Pickles of a closed world: plain values, the classes of this suite that are declared as messages, and its
errors. A reader knows the names of few functions of ours, and looks a class up by its name in one
table, so bytes that no rank wrote reach no class and call nothing. Fields are not compared with their types:
ranks of a job trust one another.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, TypeVar, cast, final

from typing_extensions import override

from ckpt_core import errors
from ckpt_core.errors import CheckpointError, Failure, FileFailure
from ckpt_core.formats.pickles import PickleError, read_pickle
from ckpt_core.types import CheckpointInfo, FileEntry, Lineage, Parent

C = TypeVar("C", bound=type)
T = TypeVar("T")

_PROTOCOL: Final = 3  # `read_pickle` knows the opcodes of no later one for sets and byte arrays
_PLAIN: Final = (str, bytes, int, float)


class MessageError(ValueError):
    """A value cannot be encoded as a message, or the bytes are not one."""


_CALLED: Final[dict[str, Any]] = {}
"""What a reader may call, by `_name_of` it."""
_PACK: Final[dict[type, tuple[str, Callable[[Any], Any]]]] = {}
"""Names and what packs; a name is one text for all messages, so that a pickle has it once."""
_UNPACK: Final[dict[str, Callable[[Any], Any]]] = {}


def register(kind: type[T], pack: Callable[[T], Any], unpack: Callable[[Any], T]) -> None:
    """Register a class of messages: how it becomes plain values or messages, and back."""
    name = _name_of(kind)
    _PACK[kind], _UNPACK[name] = (name, pack), unpack


def message(kind: C) -> C:
    """Register a dataclass or an enum as a message between ranks; a decorator."""
    made_by: Any = kind
    if issubclass(kind, Enum):
        register(made_by, lambda member: member.name, lambda name: made_by[name])
        return kind
    names = [field.name for field in fields(made_by)]
    register(
        made_by,
        lambda found: [getattr(found, name) for name in names],
        lambda values: made_by(**dict(zip(names, values, strict=True))),
    )
    return kind


def encode(value: object) -> bytes:
    """Encode a value; MessageError names type and place of what cannot be sent."""
    with io.BytesIO() as stream:
        try:
            _Pickler(stream, _PROTOCOL).dump(value)
        except _UnsendableError as error:
            kind, place = type(error.part), _place_of(error.part, value)
            raise MessageError(
                f"a {kind.__module__}.{kind.__qualname__}{place and f' ({place})'} cannot go to other ranks: "
                "only numbers, text, bytes, None, and lists, tuples and dictionaries of those can"
            ) from None
        except RecursionError as error:
            raise MessageError("a value for other ranks is nested too deep") from error
        return stream.getvalue()


def decode(content: bytes) -> Any:
    """Decode a value; MessageError if `encode` did not make these bytes."""
    try:
        return read_pickle(content, _called)
    except (PickleError, CheckpointError) as error:
        raise MessageError(f"{type(error).__name__}: {error!s:.200}") from error


@final
class _UnsendableError(Exception):
    def __init__(self, part: object) -> None:
        super().__init__(part)
        self.part = part


@final
class _Pickler(pickle.Pickler):
    @override
    def reducer_override(self, obj: Any) -> Any:
        """Say how what is no plain value is made again; pickle asks for nothing else."""
        kind = type(obj)
        if (packing := _PACK.get(kind)) is not None:
            return _unpacked, (packing[0], packing[1](obj))
        if _CALLED.get(_name_of(obj)) is obj:
            return NotImplemented
        if isinstance(obj, CheckpointError):
            return _error, _parts_of_error(obj)
        if isinstance(obj, OSError):
            said = (str(obj),) if obj.errno is None else (obj.errno, obj.strerror, obj.filename)
            return OSError, tuple(
                each if type(each) in {int, str} or each is None else str(each) for each in said
            )
        if not isinstance(obj, Enum) and (plain := _plain(obj)) is not None:
            return plain
        raise _UnsendableError(obj)


def _called(module: str, name: str) -> Any:
    try:
        return _CALLED[f"{module}:{name}"]
    except KeyError:
        raise MessageError(f"{module}.{name} is no message") from None


def _name_of(made: Any) -> str:
    return f"{getattr(made, '__module__', '')}:{getattr(made, '__qualname__', '')}"


def _plain(value: object) -> tuple[Any, tuple[Any, ...]] | None:
    """Convert a number of NumPy's, or a string of a host's class, to the plain type."""
    if isinstance(value, Mapping):
        return _same, (dict(value),)
    if isinstance(value, memoryview):
        return _same, (bytes(value),)
    kind = next((each for each in _PLAIN if isinstance(value, each)), None)
    return None if kind is None else (_same, cast("Any", kind).__getnewargs__(value))


def _place_of(part: object, value: object) -> str:
    """Return where a part of a value is, as it would be written behind its name."""
    if isinstance(value, Mapping):
        inner = [(f" key[{key!r:.40}]", key) for key in value]
        inner += [(f"[{key!r:.40}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        inner = [(f"[{number}]", each) for number, each in enumerate(value)]
    elif is_dataclass(value):
        inner = [(f"[{field.name!r}]", getattr(value, field.name, None)) for field in fields(value)]
    else:
        inner = []
    for place, each in inner:
        if each is part:
            return place.strip()
        if deeper := _place_of(part, each):
            return f"{place}{deeper}".strip()
    return ""


def _same(value: Any) -> Any:
    return value


def _from_bytes(content: bytes = b"") -> bytes:
    return bytes(memoryview(content))  # no size, which would be allocated


def _unpacked(name: str, packed: Any) -> Any:
    return _UNPACK[name](packed)


def _error(name: str, text: str, attributes: Mapping[str, Any]) -> CheckpointError:
    kind: type[CheckpointError] = getattr(errors, name)
    if not issubclass(kind, CheckpointError):
        raise TypeError(name)
    return kind(text, **attributes)


def _parts_of_error(error: CheckpointError) -> tuple[str, str, Mapping[str, Any]]:
    """Return class and text of an error, and what of its attributes can be sent."""
    kind = next(each for each in type(error).__mro__ if getattr(errors, each.__name__, None) is each)
    attributes: dict[str, Any] = {}
    for name, value in error.attributes.items():
        with suppress(MessageError):
            encode(value)
            attributes[name] = value
    return kind.__name__, str(error.message), attributes


for _kind in (CheckpointInfo, FileEntry, Lineage, Parent, FileFailure, Failure):
    message(_kind)
_CALLED.update((_name_of(each), each) for each in (OSError, frozenset, _error, _same, _unpacked))
_CALLED[_name_of(bytearray)] = _from_bytes
