"""Untrusted pickles: plain data, and only the names that a caller allows.

The allow-list stops code. `read_pickle` passes the opcodes of plain data only and compares every length with
the size of the pickle, since a flipped bit could ask for gigabytes. A pickle made to exhaust time, memory or
stack is not stopped.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from typing import Any, Final, NoReturn, final

from ckpt_core.errors import CheckpointError, UnsafeCheckpointError

_RUN: Final = (
    rb"(?:[N\x88\x89()\]}1aesubRtQ\x81\x85\x86\x87\x93\x94]|[Khq\x80].|r..[\x00-%b]\x00|M..|[Jj].{4}|G.{8}|\x95.{8}"
    rb"|I[-0-9]{1,20}\n|c[^\n]{1,1000}\n[^\n]{1,1000}\n)*+"
)
# Opcode -> bytes of the length that follows it: text, bytes, long integers.
_SIZED: Final = {
    b"X": 4, b"\x8c": 1, b"\x8d": 8, b"U": 1, b"B": 4, b"C": 1, b"\x8e": 8, b"\x8a": 1,
}  # fmt: skip


class PickleError(ValueError):
    """The bytes are not a pickle of what the caller allows."""


def read_pickle(
    content: bytes,
    find: Callable[[str, str], Any],
    persistent: Callable[[Any], Any] | None = None,
    *,
    memo: dict[int, Any] | None = None,
) -> Any:
    """Unpickle what names only what `find` returns; it runs no other code.

    What stands for a (module, name) is an immutable or `Sealed` class, or a value. `persistent` returns what
    stands for a persistent id; None refuses all. `memo` receives what the pickle has kept, by number.

    Raises:
        PickleError: it is damaged, or holds opcodes that pickles of plain data do not have.
        CheckpointError: `find` raised it.
    """
    try:
        _check_opcodes(content)
        unpickler: Any = _Unpickler(content, find, persistent)
        found = unpickler.load()
        if memo is not None:
            memo.update(unpickler.memo.copy())
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise PickleError(f"{type(error).__name__}: {error!s:.500}") from error
    return found


def _check_opcodes(content: bytes) -> None:
    # Numbers in the memo are at most about as many as there are bytes.
    most = re.escape(bytes([min(len(content) >> 16, 255)]))
    match, position = re.compile(_RUN % most, re.DOTALL).match, 0
    while True:
        found = match(content, position)
        start = position if found is None else found.end()
        op = content[start : start + 1]
        if op == b".":
            return
        if op in _SIZED:
            after = start + 1 + _SIZED[op]
            position = after + int.from_bytes(content[start + 1 : after], "little")
        elif op == b"r":
            position = start + 5
            if int.from_bytes(content[start + 1 : position], "little") > len(content):
                raise PickleError(f"an absurd memo number at byte {start}")
        elif op:
            raise PickleError(f"opcode {op!r} at byte {start}, which no pickle of plain data has")
        if not op or position > len(content):
            raise PickleError("it ends too early")


@final
class _Unpickler(pickle.Unpickler):  # noqa: S301 - `find` is what makes it safe
    def __init__(
        self, content: bytes, find: Callable[[str, str], Any], persistent: Callable[[Any], Any] | None
    ) -> None:
        super().__init__(io.BytesIO(content))
        self._find, self._persistent = find, persistent

    def find_class(self, module: str, name: str, /) -> Any:
        return self._find(module, name)

    def persistent_load(self, pid: Any, /) -> Any:
        if self._persistent is None:
            raise PickleError("a reference to something outside of it")
        return self._persistent(pid)


class Sealed(type):
    """The metaclass of stand-ins: a pickle cannot set attributes of their classes."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise UnsafeCheckpointError(
            f"a pickle sets {name!r:.80} of a class; it may be an attack and was not executed"
        )


class Inert(dict[Any, Any]):
    """A stand-in for any class, function or object: accepts all, does nothing."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        """Make an empty one."""
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def __call__(self, *_: Any) -> Inert:
        """Return itself."""
        return self

    def __setstate__(self, _: Any) -> None:
        pass

    def append(self, _: Any) -> None:
        """Accept an item, as a list would."""

    extend = append


def survey(content: bytes) -> tuple[set[tuple[str, str]], list[Any]]:
    """Return the names and persistent ids in a pickle, with `Inert` for the rest."""
    names: set[tuple[str, str]] = set()
    ids: list[Any] = []

    def find(module: str, name: str) -> Any:
        names.add((module, name))
        return type(name, (Inert,), {"__module__": module})

    def persistent(pid: Any) -> Inert:
        ids.append(pid)
        return Inert()

    read_pickle(content, find, persistent)
    return names, ids
