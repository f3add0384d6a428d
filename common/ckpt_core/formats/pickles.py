"""Untrusted pickles, made safe to unpickle.

An allow-list of classes, which the unpickler enforces, stops code. It does not stop a pickle that nests
tuples a million deep and uses the outermost as a key, which overflows the C stack while it is hashed, or one
that shares them so that hashing never ends, or one that writes memo number 2**31, for which the memo is
allocated. `sanitize_pickle` passes only the opcodes of plain data, checks every length, and routes each tuple
through the unpickler's `persistent_load`, which returns its stand-in.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any, Final, NoReturn, final

from ckpt_core.errors import UnsafeCheckpointError

_FIXED: Final = (
    rb"[N\x88\x89()\]}aesubR\x81\x93\x94%b]|[Khq\x80].|M..|[Jj].{4}|G.{8}"
    rb"|I[-0-9]{1,20}\n|\x8a(?:\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9})"
)
_RUN: Final = re.compile(rb"(?:" + _FIXED % b"" + rb")*+", re.DOTALL)
_RUN_PERSISTENT: Final = re.compile(rb"(?:" + _FIXED % b"Q" + rb")*+", re.DOTALL)
_LINES: Final = re.compile(rb"[^\n]{1,1000}\n[^\n]{1,1000}\n")
_TUPLES: Final = frozenset({b"t", b"\x85", b"\x86", b"\x87"})
_STOP: Final = b"."
_GLOBAL: Final = b"c"
_FRAME: Final = b"\x95"
_LONG_BINPUT: Final = b"r"
# Opcode -> bytes of the length that follows it: text, bytes, long integers.
_SIZED: Final = {
    b"X": 4, b"\x8c": 1, b"\x8d": 8, b"U": 1, b"B": 4, b"C": 1, b"\x8e": 8, b"\x8a": 1,
}  # fmt: skip
_THROUGH_HOOK: Final = b"Q"


class PickleError(ValueError):
    """The bytes are not a pickle of plain data."""


@final
class Row(tuple[Any, ...]):
    """A stand-in for every tuple in a pickle; refused as a key, as ours have none."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def sanitize_pickle(content: bytes, *, persistent_ids: bool = False) -> bytes:
    """Rewrite a pickle so that `persistent_load` gets every tuple.

    The unpickler's `persistent_load` returns the stand-in of a tuple.

    Args:
        content: a pickle of protocol 2 or later.
        persistent_ids: whether it may hold persistent ids; these reach `persistent_load`, too, as the
            stand-in of a tuple.

    Raises:
        PickleError: it is cut short, or holds opcodes that pickles of plain data do not have.
    """
    match = (_RUN_PERSISTENT if persistent_ids else _RUN).match
    pieces: list[bytes] = []
    start = position = 0
    while True:
        found = match(content, position)
        end = position if found is None else found.end()
        op = content[end : end + 1]
        if op in _TUPLES:
            pieces += (content[start : end + 1], _THROUGH_HOOK)
            start = position = end + 1
            # A tuple around a stand-in, mostly the arguments of a call, cannot be hashed either.
            if content.startswith(b"\x94\x85", start):
                position += 2
        elif op == _STOP:
            pieces.append(content[start : end + 1])
            return b"".join(pieces)
        else:
            position = _end_of(content, end, op)
            if op == _FRAME:  # its length is no longer true, and not needed
                pieces.append(content[start:end])
                start = position


def _end_of(content: bytes, start: int, op: bytes) -> int:
    """Return the end of the instruction at `start`."""
    if not op:
        raise PickleError("it ends too early")
    if op in _SIZED:
        after = start + 1 + _SIZED[op]
        end = after + int.from_bytes(content[start + 1 : after], "little")
    elif op == _GLOBAL:
        lines = _LINES.match(content, start + 1)
        end = len(content) + 1 if lines is None else lines.end()
    elif op == _FRAME:
        end = start + 9
    elif op == _LONG_BINPUT:
        end = start + 5
        if int.from_bytes(content[start + 1 : end], "little") > len(content):
            raise PickleError(f"an absurd memo number at byte {start}")
    else:
        raise PickleError(f"opcode {op!r} at byte {start}, which no pickle of plain data has")
    if end > len(content):
        raise PickleError("it ends too early")
    return end


class Sealed(type):
    """The metaclass of stand-ins: a pickle cannot set attributes of their classes."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise UnsafeCheckpointError(
            f"a pickle sets {name!r:.80} of a class; it may be an attack and was not executed"
        )


class Ordered(metaclass=Sealed):
    """A stand-in for `OrderedDict`, which pickles create empty and fill afterwards."""

    def __new__(cls) -> Any:
        """Return an empty one: copying an argument would bypass the size budget."""
        return OrderedDict()
