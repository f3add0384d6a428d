"""The report of a verification, file by file."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, NamedTuple, final

from ckpt_core.errors import FileFailure
from ckpt_core.reading._payloads import Payload
from ckpt_core.reading._requests import Piece

_MAX_NAMED: Final = 3
"""The most ranges or tensors that one problem lists; a lost file has thousands."""


class _Damage(NamedTuple):
    piece: Piece
    text: str


@final
class VerifyReport:
    """The problems found by all threads: one per tensor, or per lost or short file."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._missing: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._cut: defaultdict[str, list[Piece]] = defaultdict(list)
        self._damage: defaultdict[tuple[str, int, str], list[_Damage]] = defaultdict(list)
        self._unverifiable: list[Payload] = []
        self._payloads: set[tuple[str, int]] = set()

    def add_missing(self, path: str, problem: str = "missing") -> None:
        """Record that a file does not exist or is not a regular file."""
        self._missing[path] = problem

    def is_missing(self, path: str) -> bool:
        """Return whether the file is already known to be missing."""
        return path in self._missing

    def add_unverifiable(self, payload: Payload) -> None:
        """Record that a payload has no checksum."""
        self._unverifiable.append(payload)

    @property
    def has_unverifiable(self) -> bool:
        """Whether a payload has no checksum."""
        return bool(self._unverifiable)

    def add_cut(self, piece: Piece, file_bytes: int) -> None:
        """Record that the file ends before the piece does."""
        with self._guard:
            self._payloads.add((piece.payload.path, piece.payload.offset))
            self._sizes[piece.payload.path] = file_bytes
            self._cut[piece.payload.path].append(piece)

    def add_unreadable(self, piece: Piece, error: OSError) -> None:
        """Record that the device cannot read the piece."""
        self._add(piece, "unreadable", f"cannot be read: {error}")

    def add_changed(self, piece: Piece, found: int) -> None:
        """Record that the piece differs from what was saved."""
        saved = f"{piece.crc32:08x}"
        self._add(
            piece, "changed", f"differ from those that were saved: CRC-32 is {found:08x}, {saved} was saved"
        )

    def _add(self, piece: Piece, kind: str, text: str) -> None:
        with self._guard:
            self._payloads.add((piece.payload.path, piece.payload.offset))
            self._damage[piece.payload.path, piece.payload.offset, kind].append(_Damage(piece, text))

    def concerns(self, payload: Payload) -> bool:
        """Return whether a problem of that payload, or of its whole file, was recorded."""
        return payload.path in self._missing or (payload.path, payload.offset) in self._payloads

    def report(self) -> list[FileFailure]:
        """Return all failures, by path and position in the file."""
        found = [(path, -1, problem) for path, problem in self._missing.items()]
        found += [(path, -1, self._cut_text(path)) for path in self._cut if path not in self._missing]
        found += [
            (p.path, p.offset, f"cannot be verified: tensor {p.key!r} has no checksum")
            for p in self._unverifiable
        ]
        for (path, offset, _), damages in self._damage.items():
            if path not in self._missing:
                damages.sort(key=lambda damage: damage.piece.start)
                runs = [f"{start} to {stop}" for start, stop in _runs([each.piece for each in damages])]
                key, text = damages[0].piece.payload.key, damages[0].text
                found.append((path, offset, f"tensor {key!r}: bytes {_few(runs)} of the file {text}"))
        return [FileFailure(path=path, problem=problem) for path, _, problem in sorted(found)]

    def _cut_text(self, path: str) -> str:
        pieces = sorted(self._cut[path], key=lambda piece: piece.file_start)
        keys = list(dict.fromkeys(piece.payload.key for piece in pieces))
        missing = max(piece.file_stop for piece in pieces) - self._sizes[path]
        end = f"ends {missing} bytes too early" if missing > 0 else "became shorter while it was read"
        return f"{end}: of {_few([repr(key) for key in keys])} not everything is there"


def _runs(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Join neighbouring pieces to ranges of the file."""
    runs: list[tuple[int, int]] = []
    for piece in pieces:
        if runs and piece.file_start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], piece.file_stop)
        else:
            runs.append((piece.file_start, piece.file_stop))
    return runs


def _few(names: Sequence[str]) -> str:
    rest = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {rest} more" if rest > 0 else "")
