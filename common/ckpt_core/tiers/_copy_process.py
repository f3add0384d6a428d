"""Copies by a process of its own, beside a training; and what that process does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

from ckpt_core import messages
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.options import Upload
from ckpt_core.storage import LocalStorage, Storage, Throttle, is_in_bucket, open_storage
from ckpt_core.tiers._compressing import Choices, Rows
from ckpt_core.tiers._copy import CheckpointCopy, CopyTerms
from ckpt_core.tiers._work_process import EndedError, WorkProcess
from ckpt_core.types import FileEntry

_logger = logger_of(__name__)


@messages.message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRoute:
    """The directory of a root, that or the URL of another, and how that is opened."""

    source: str
    target: str
    storage_options: Mapping[str, object]
    deadline_seconds: float


@messages.message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTask:
    """Files to copy of a checkpoint, for which the target is prepared."""

    source_name: str
    name: str
    content: bytes
    paths: Sequence[str]
    bytes_per_second: int | None
    choices: Choices


def copying(route: CopyRoute) -> Callable[[CopyTask, Callable[[Any], None]], None]:
    """Open both places; return what copies and tells the rows; see `serve`."""
    source = open_storage(route.source)
    target = open_storage(route.target, route.storage_options, deadline_seconds=route.deadline_seconds)

    def copy(task: CopyTask, progress: Callable[[Any], None]) -> None:
        made = CheckpointCopy.again(
            source, target, task.source_name, task.content, as_name=task.name, choices=task.choices
        )
        wanted, rate = set(task.paths), task.bytes_per_second
        entries = [entry for entry in made.entries if entry.path in wanted]
        pace = None if rate is None else Throttle(rate)
        progress(made.copy_files(entries, CopyTerms(pace=pace, progress=progress)))

    return copy


_LEAST_BYTES: Final = 64 << 20
"""What is smaller is there before a process has started."""


@final
class CopyProcess:
    """Copies files of checkpoints in a process of its own, which ends with this one.

    It starts at the first copy that is worth it. Once it could not be started, or was killed, it stays away.

    Concurrency: `close` on any thread, copies one at a time.
    """

    def __init__(self, route: CopyRoute) -> None:
        self._process = WorkProcess("ckpt_core.tiers._copy_process:copying", route)
        self._given_up = False

    @classmethod
    def between(
        cls, source: Storage, target: Storage, upload: Upload, *, deadline_seconds: float
    ) -> Self | None:
        """Return the process for a way that another process can go; None if it cannot.

        Of a source on several disks it is the way from that of this process.
        """
        if type(source.own) is not LocalStorage:
            return None
        if type(target) is LocalStorage:
            place = target.url
        elif isinstance(upload.to, str) and is_in_bucket(upload.to):
            place = upload.to
        else:
            return None  # another URL may name something of this process, such as `memory://`
        route = CopyRoute(
            source=source.own.url,
            target=place,
            storage_options=dict(upload.storage_options),
            deadline_seconds=deadline_seconds,
        )
        return cls(route) if WorkProcess.can_do(route) else None

    def copy_files(
        self,
        copy: CheckpointCopy,
        entries: Sequence[FileEntry],
        terms: CopyTerms,
    ) -> Rows | None:
        """Copy files as `CheckpointCopy.copy_files` does; None if that was not done.

        Then the caller copies what is not there: what is too little, what may be whole on another disk, and
        everything once the process is gone.

        Raises:
            CheckpointError: as by `CheckpointCopy.copy_files`; or `terms.stop` raised it.
            OSError: a storage failed.
        """
        if self._given_up or sum(entry.size_bytes for entry in entries) < _LEAST_BYTES:
            return None
        task = CopyTask(
            source_name=copy.source_name,
            name=copy.name,
            content=copy.content,
            paths=[entry.path for entry in entries],
            bytes_per_second=terms.bytes_per_second,
            choices=copy.choices,
        )
        done, rows = list[int](), dict[str, Any]()

        def hear(reply: int | Mapping[str, Any]) -> None:
            if isinstance(reply, int):
                done.append(reply)
                terms.progress(reply)
            else:
                rows.update(reply)

        try:
            self._process.do(task, terms.stop, hear)
        except EndedError as reason:
            _logger.warning("copies to %s: %s; this process does them", copy.target_url, reason)
            self._given_up = True
        except CorruptCheckpointError:
            pass  # of this disk; another may have the file whole
        else:
            return rows
        terms.progress(-sum(done))
        return None

    def close(self) -> None:
        """Kill the process, in the middle of a copy, too; the next copy continues it."""
        self._process.close()
