"""The other side of a `CopyProcess`: copies for the process that has started it."""

from __future__ import annotations

import os
import select
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Final, final

from ckpt_core import messages
from ckpt_core.crew import give_way
from ckpt_core.errors import CheckpointError
from ckpt_core.storage import Storage, Throttle, open_storage
from ckpt_core.tiers._copy import CheckpointCopy, CopyTerms

_LOOK_SECONDS: Final = 0.25


@messages.message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRoute:
    """Where copies come from and go to.

    Attributes:
        source: directory of a root.
        target: directory or URL of another one.
        storage_options: of the target.
        deadline_seconds: by which the target is opened; see `open_storage`.
    """

    source: str
    target: str
    storage_options: Mapping[str, object]
    deadline_seconds: float


@messages.message
@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CopyTask:
    """Files of a checkpoint to copy.

    Attributes:
        source_name: of the checkpoint at the source.
        name: of the checkpoint at the target, which is prepared.
        content: of its manifest.
        paths: the files, as in the manifest.
        bytes_per_second: the cap; None for none.
    """

    source_name: str
    name: str
    content: bytes
    paths: Sequence[str]
    bytes_per_second: int | None


def serve(descriptor: int, parent: int) -> None:
    """Copy what the parent asks for, until it hangs up or dies.

    Each task is answered by numbers of bytes done, then by None or by the error.

    Args:
        descriptor: of the connection.
        parent: its process.
    """
    give_way()
    threading.Thread(target=_end_with, args=(parent,), name="ckpt-parent", daemon=True).start()
    connection: Connection[bytes, bytes] = Connection(descriptor)
    with connection:
        try:
            route: CopyRoute = messages.decode(connection.recv_bytes())
            source = open_storage(route.source)
            target = open_storage(
                route.target, route.storage_options, deadline_seconds=route.deadline_seconds
            )
            while True:
                _Answer(connection).run(messages.decode(connection.recv_bytes()), source, target)
        except (EOFError, ConnectionError):
            return  # the parent has hung up, or died


@final
class _Answer:
    """The answer to one task."""

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self._connection = connection
        self._guard = threading.Lock()

    def run(self, task: CopyTask, source: Storage, target: Storage) -> None:
        """Copy, and send the outcome."""
        self._send(0)
        outcome: CheckpointError | OSError | None = None
        try:
            copy = CheckpointCopy(source, target, task.source_name, task.content, as_name=task.name)
            wanted = set(task.paths)
            entries = [entry for entry in copy.manifest.files if entry.path in wanted]
            rate = task.bytes_per_second
            copy.copy_files(
                entries, CopyTerms(pace=None if rate is None else Throttle(rate), progress=self._send)
            )
        except (CheckpointError, OSError) as error:
            outcome = error
        self._send(outcome)

    def _send(self, reply: int | CheckpointError | OSError | None) -> None:
        with self._guard:
            self._connection.send_bytes(messages.encode(reply))


def _end_with(parent: int) -> None:
    """End this process when its parent has died."""
    # The connection may outlive the parent, in a process that was forked from it.
    if sys.platform == "linux":
        with suppress(OSError):  # it is dead already, or the kernel is old
            watched = os.pidfd_open(parent)
            if os.getppid() == parent:
                select.select([watched], [], [])
    never = threading.Event()
    while os.getppid() == parent:
        never.wait(_LOOK_SECONDS)
    os._exit(1)
