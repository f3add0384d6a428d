"""The journal's files, one of each run: anybody reads, the root's owner writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias, final

from ckpt_core.crew import run_all
from ckpt_core.journal._records import Record, decode, encode, record, without_end
from ckpt_core.names import OWN, is_run_file, run_file
from ckpt_core.storage import ForeignFileError, Storage

MOST_RUNS: Final = 200
"""Files of the newest runs that are read; the owner of the root deletes those of older ones."""
MOST_APPENDED: Final = 4 << 20
MOST_REPLACED: Final = 1 << 20
"""In bytes, of a file: where lines are appended, and where each write replaces all of it."""
_MOST_THREADS: Final = 8

Runs: TypeAlias = Mapping[str, Sequence[Record]]
"""Key of the file of each run -> its records; the oldest run first."""


def run_files(storage: Storage) -> list[str]:
    """Return the keys of the files of all runs, the oldest first."""
    return [f"{OWN}/{entry.name}" for entry in storage.list(OWN) if is_run_file(entry.name)]


def read_runs(storage: Storage, *, most: int = MOST_APPENDED) -> Runs:
    """Read the newest runs of a root, of a file longer than `most` bytes its two ends.

    Lines that are not ours are skipped.

    Raises:
        OSError: storage failed.
    """
    keys = run_files(storage)[-MOST_RUNS:]
    found: dict[str, Sequence[Record]] = {}

    def read(key: str) -> None:
        found[key] = decode(_content(storage, key, most))

    run_all(read, keys, _MOST_THREADS, name="ckpt-journal")
    return {key: found[key] for key in keys}


def read_events(storage: Storage) -> list[Record]:
    """Read all records of a root, the oldest run first; errors as by `read_runs`."""
    return [each for records in read_runs(storage).values() for each in records]


def read_history(storage: Storage) -> list[Record]:
    """Read how the runs of a root began and ended; errors as by `read_runs`."""
    return [each for each in read_events(storage) if each["kind"] == "run"]


def unread(source: Storage, target: Storage, *, is_alive: bool) -> dict[str, bytes]:
    """Return the files that bring what the target lacks of the runs of another root.

    What the target has alone stays in them. If a job may be alive in the source, its run, which has no end
    yet, is left out: in the copy it would count as one that died.
    """
    runs, there = read_runs(source), read_runs(target)
    history = [each for records in runs.values() for each in records if each["kind"] == "run"]
    going_on = {each["run"] for each in without_end(history)} if is_alive else set[str]()
    found = dict[str, bytes]()
    for key, records in runs.items():
        has = encode(there.get(key, ()))
        lines = encode(each for each in records if each["run"] not in going_on).splitlines(keepends=True)
        if news := set(lines).difference(has.splitlines(keepends=True)):
            found[key] = has + b"".join(line for line in lines if line in news)
    return found


def add_event(storage: Storage, kind: str, time: float, fields: Mapping[str, Any]) -> None:
    """Add an event of a command to the newest run of an idle root, if it has one."""
    for key in run_files(storage)[-1:]:
        content = _content(storage, key, MOST_APPENDED)
        storage.replace(key, encode([*decode(content), record(kind, time, "", fields)]))


def _content(storage: Storage, key: str, most: int) -> bytes:
    """Read a file; of a longer one both ends, with a line that is none between them."""
    try:
        with storage.open(key) as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(0)
            if size <= most:
                return stream.read(most)
            start = stream.read(most // 2)
            stream.seek(size - most // 2)
            return start + b"\n" + stream.read(most // 2)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ForeignFileError):
        return b""


@final
class RunFile:
    """The file of one run: appended to, or replaced where that is impossible.

    Each replacement costs a request and all bytes, so that the caller collects lines. `content` is what was
    written so far.

    Concurrency: one thread.
    """

    def __init__(self, storage: Storage, run: str, begun: float) -> None:
        self._storage = storage
        self.key = run_file(begun, run)
        self.appends = storage.supports_append
        self.content = b""
        self._whole = True

    def write(self, records: Sequence[Record]) -> None:
        """Add records; a long file loses the older half of what tells no start and no end."""
        lines = encode(records)
        content = self.content + lines
        whole, self._whole = self._whole or not self.appends, True
        most = MOST_APPENDED if self.appends else MOST_REPLACED
        if len(content) > most:
            whole, content = True, _shortened(content, most // 2)
        if whole:
            self._storage.replace(self.key, content)
        else:
            self._storage.append(self.key, lines)
        self.content, self._whole = content, False


def _shortened(content: bytes, most: int) -> bytes:
    kept: list[bytes] = []
    size = 0
    for each in reversed(decode(content)):
        line = encode([each])
        if each["kind"] == "run" or size + len(line) <= most:
            kept.append(line)
            size += len(line)
    return b"".join(reversed(kept))
