"""The two files of the journal: read by anybody, written by the owner of the root."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

from ckpt_core.journal._history import compact, merge
from ckpt_core.journal._records import Record, decode, encode, is_ours, record
from ckpt_core.names import EARLIER_EVENTS, EVENTS, HISTORY
from ckpt_core.storage import ForeignFileError, Storage

MOST_APPENDED: Final = 4 << 20
MOST_REPLACED: Final = 1 << 20
"""In bytes, of `events.jsonl`: where lines are appended, and where the file is replaced as a whole."""
_MOST_READ: Final = 8 << 20
_MOST_HISTORY: Final = 1 << 20
_TAIL: Final = 1 << 18


class ForeignJournalError(PermissionError):
    """A file with a name of the journal's is another program's, or the user's."""


def read_events(storage: Storage) -> list[Record]:
    """Read the events of a root, the oldest first, and skip lines that are not ours.

    Raises:
        OSError: storage failed.
    """
    return [each for key in (EARLIER_EVENTS, EVENTS) for each in decode(_end_of(storage, key, _MOST_READ))]


def read_history(storage: Storage) -> list[Record]:
    """Read the history of a root, the oldest first, and skip lines that are not ours.

    Where each node has a disk of its own, it is that of all of them.

    Raises:
        OSError: storage failed.
    """
    each_part = (decode(_end_of(part, HISTORY, _MOST_HISTORY)) for part in storage.parts)
    return merge([r for r in found if r["kind"] in {"run", "summary"}] for found in each_part)


def last_events(storage: Storage) -> list[Record]:
    """Read the newest events of a root, enough to know where its last run was."""
    found = [each for part in storage.parts for each in decode(_end_of(part, EVENTS, _TAIL))]
    if any(each["kind"] == "progress" for each in found):
        return found
    earlier = [each for part in storage.parts for each in decode(_end_of(part, EARLIER_EVENTS, _TAIL))]
    return earlier + found


def most_of_events(storage: Storage) -> int:
    """Return the size at which `events.jsonl` is rotated there."""
    return MOST_APPENDED if storage.supports_append else MOST_REPLACED


def unreadable_lines(storage: Storage) -> int:
    """Count the lines of a root's journal that are no records: torn or foreign.

    Raises:
        OSError: storage failed.
    """
    contents = [_end_of(storage, key, _MOST_READ) for key in (HISTORY, EARLIER_EVENTS, EVENTS)]
    lines = [line for content in contents for line in content.splitlines() if line.strip(b"\0 ")]
    return len(lines) - sum(len(decode(content)) for content in contents)


def _end_of(storage: Storage, key: str, most: int) -> bytes:
    """Read a file, or the end of a longer one; b"" without one."""
    try:
        with storage.open(key) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - most))
            return stream.read(most)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ForeignFileError):
        return b""


@final
class HistoryFile:
    """`history.jsonl`, replaced as a whole: small, and written a few times in a run.

    Concurrency: one thread.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._content: bytes | None = None
        self._written: Sequence[Record] | None = None

    def lacks(self, history: Sequence[Record]) -> bool:
        """Return whether this is not what was written last; compares no records."""
        return self._written is not history

    def write(self, history: Sequence[Record]) -> None:
        """Replace the file, unless it has this content.

        Raises:
            ForeignJournalError: a file of this name is not ours.
            OSError: storage failed.
        """
        if not self.lacks(history):
            return
        content = encode(compact(history))
        if self._content is None:
            self._content = refuse_foreign(self._storage, HISTORY)
        if content != self._content:
            self._storage.replace(HISTORY, content)
            self._content = content
        self._written = history


@final
class EventFile:
    """`events.jsonl`: lines are appended, and at a size it becomes `events.1.jsonl`.

    Where nothing can be appended, the file is replaced as a whole: each write costs a request and all of
    its bytes, so that the caller collects lines.

    Concurrency: one thread.

    Attributes:
        appends: whether a write costs its own bytes only.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.appends = storage.supports_append
        self._opened = False
        self._size = 0
        self._torn = False
        self._kept = b""

    def write(self, lines: bytes) -> None:
        """Add whole lines.

        Raises:
            ForeignJournalError: a file of this name is not ours.
            OSError: storage failed; some of the lines may be there.
        """
        if not self._opened:
            self._open()
        if self.appends:
            self._append(lines)
        else:
            self._replace(lines)

    def _open(self) -> None:
        start = refuse_foreign(self._storage, EVENTS)
        if self.appends:
            if start:
                self._size = self._storage.size(EVENTS)
                self._torn = not _end_of(self._storage, EVENTS, 1).endswith(b"\n")
        else:
            # Up to the last whole line; of a longer file, from a whole line on.
            kept = _end_of(self._storage, EVENTS, MOST_REPLACED)
            self._kept = encode(decode(kept))
        self._opened = True

    def _append(self, lines: bytes) -> None:
        if self._size and self._size + len(lines) > MOST_APPENDED:
            refuse_foreign(self._storage, EARLIER_EVENTS)
            self._storage.delete(EARLIER_EVENTS)
            self._storage.rename(EVENTS, EARLIER_EVENTS)
            self._size, self._torn = 0, False
        lines = b"\n" + lines if self._torn else lines
        self._torn = True  # until the whole of it is there
        self._storage.append(EVENTS, lines)
        self._size += len(lines)
        self._torn = False

    def _replace(self, lines: bytes) -> None:
        content = self._kept + lines
        if self._kept and len(content) > MOST_REPLACED:
            refuse_foreign(self._storage, EARLIER_EVENTS)
            self._storage.replace(EARLIER_EVENTS, self._kept)
            self._kept, content = b"", lines
        self._storage.replace(EVENTS, content)
        self._kept = content


def add_event(storage: Storage, kind: str, time: float, fields: Mapping[str, Any]) -> None:
    """Add an event of a command to the log of an idle root, if it has one.

    Raises:
        ForeignJournalError: a file of its name is not ours.
        OSError: storage failed.
    """
    if storage.exists(EVENTS):
        EventFile(storage).write(encode([record(kind, time, "", fields)]))


def refuse_foreign(storage: Storage, key: str) -> bytes:
    """Return the content of a file; refuse one that is not ours: it is never written.

    Raises:
        ForeignJournalError: it is another program's, or the user's.
        OSError: storage failed.
    """
    try:
        with storage.open(key) as stream:
            content = stream.read(_MOST_HISTORY + 1)
    except FileNotFoundError:
        return b""
    except (IsADirectoryError, ForeignFileError) as error:
        raise _foreign(storage, key, "is no regular file") from error
    if not is_ours(content):
        raise _foreign(storage, key, "was not written by ckpt-suite")
    return content


def _foreign(storage: Storage, key: str, problem: str) -> ForeignJournalError:
    message = f"{problem}, and is not touched; move it, or give journal=False"
    return ForeignJournalError(errno.EEXIST, message, f"{storage.url}/{key}")
