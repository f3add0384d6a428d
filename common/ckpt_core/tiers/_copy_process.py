"""A process of its own that copies beside a training.

A thread that copies takes the interpreter lock again and again, and the training waits for it each time. A
process takes a core that nobody uses, and nothing of the training's.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from typing import Final, Self, final

from ckpt_core import messages
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CorruptCheckpointError
from ckpt_core.options import Upload
from ckpt_core.storage import LocalStorage, Storage, is_in_bucket
from ckpt_core.tiers._copy import CheckpointCopy, CopyTerms
from ckpt_core.tiers._copy_service import CopyRoute, CopyTask
from ckpt_core.types import FileEntry

_logger = logger_of(__name__)

_LEAST_BYTES: Final = 64 << 20
"""What is smaller is there before a process has started."""
_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1

# A scheduler may signal every process of a job; this one ends with its parent, which is asked to end.
_PROGRAM: Final = """
import signal, sys
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, signal.SIG_IGN)
sys.path[:] = sys.argv[3:]
from ckpt_core.tiers._copy_service import serve
serve(int(sys.argv[1]), int(sys.argv[2]))
"""


class _EndedError(Exception):
    """The process has ended, or has never answered; the message says how."""


@final
class CopyProcess:
    """Copies files of checkpoints in a process of its own, which ends with this one.

    It starts at the first copy that is worth it. Once it could not be started, or was killed, it stays away.

    Concurrency: `close` on any thread, copies one at a time.

    Args:
        route: from where to where.
    """

    def __init__(self, route: CopyRoute) -> None:
        self._route = route
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[bytes, bytes] | None = None
        self._given_up = False

    @classmethod
    def between(
        cls, source: Storage, target: Storage, upload: Upload, *, deadline_seconds: float
    ) -> Self | None:
        """Return the process for a way that another process can go; None if it cannot.

        Args:
            source: the root to copy from. Of several disks, that of this process.
            target: the root to copy to.
            upload: the option that gives the target.
            deadline_seconds: by which the target was opened; see `open_storage`.
        """
        frozen = getattr(sys, "frozen", False)  # then the executable is not Python, but the training itself
        if frozen or os.name != "posix" or type(source.own) is not LocalStorage:
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
        try:
            messages.encode(route)
        except messages.MessageError:
            return None  # such as a session, which this process alone has
        return cls(route)

    def copy_files(
        self,
        copy: CheckpointCopy,
        entries: Sequence[FileEntry],
        terms: CopyTerms,
        *,
        bytes_per_second: int | None,
    ) -> bool:
        """Copy files as `CheckpointCopy.copy_files` does; return whether it was done.

        If not, the caller copies what is not there: what is too little, what may be whole on another disk,
        and everything once the process is gone.

        Args:
            copy: prepared.
            entries: the files.
            terms: progress and stop of the copy.
            bytes_per_second: the cap; None for none.

        Raises:
            CheckpointError: as by `CheckpointCopy.copy_files`; or `terms.stop` raised it.
            OSError: a storage failed.
        """
        if self._given_up or sum(entry.size_bytes for entry in entries) < _LEAST_BYTES:
            return False
        task = CopyTask(
            source_name=copy.source_name,
            name=copy.name,
            content=copy.content,
            paths=[entry.path for entry in entries],
            bytes_per_second=bytes_per_second,
        )
        done: int = 0
        reply: int | CheckpointError | OSError | None = 0
        try:
            for reply in self._replies(task, terms):
                if not isinstance(reply, int):
                    break
                done += reply
                terms.progress(reply)
        except _EndedError as reason:
            _logger.warning("the process that copies to %s %s: this process copies", copy.target_url, reason)
            self._given_up = True
        finally:
            if isinstance(reply, int):  # it is not done, and nobody hears it any more
                self.close()
        if reply is None:
            return True
        if isinstance(reply, OSError | CheckpointError) and not isinstance(reply, CorruptCheckpointError):
            raise reply
        terms.progress(-done)
        return False

    def close(self) -> None:
        """Kill the process, in the middle of a copy, too; the next copy continues it."""
        with self._guard:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        if connection is not None:
            connection.close()

    def _replies(self, task: CopyTask, terms: CopyTerms) -> Iterator[int | CheckpointError | OSError | None]:
        """Yield bytes done, then None or the error.

        Raises:
            _EndedError: the process is not there.
            CheckpointError: from `terms.stop`.
        """
        connection, awaited = self._started(), time.monotonic() + _START_SECONDS
        try:
            connection.send_bytes(messages.encode(task))
            while True:
                terms.stop()
                if connection.poll(_LOOK_SECONDS):
                    yield messages.decode(connection.recv_bytes())
                    awaited = math.inf
                elif time.monotonic() > awaited:
                    raise _EndedError("has not answered")
        except (EOFError, OSError) as error:
            if isinstance(error, CheckpointError):
                raise  # of `terms.stop`
            raise _EndedError(self._end_text()) from error

    def _end_text(self) -> str:
        """Say how the process has ended."""
        process = self._process
        if process is None:
            return "was closed"
        try:
            return f"has ended (exit code {process.wait(_END_SECONDS)})"
        except subprocess.TimeoutExpired:
            return "has hung up"

    def _started(self) -> Connection[bytes, bytes]:
        if self._connection is not None:
            return self._connection
        connection, inner = Pipe()
        # What is relative, or was when this process began, may by now lead to modules of somebody else.
        found = [each for each in map(str, sys.path) if each.startswith(os.sep)]
        words = [str(inner.fileno()), str(os.getpid()), *found]
        try:
            process = subprocess.Popen(  # noqa: S603 - fixed words, and where this process finds modules
                [get_executable() or sys.executable, "-P", "-c", _PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[inner.fileno()],
                env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
                start_new_session=True,
            )
        except (OSError, RuntimeError) as error:  # no such program; or the interpreter is ending
            connection.close()
            raise _EndedError(f"cannot be started ({error})") from error
        finally:
            inner.close()
        with self._guard:
            self._process, self._connection = process, connection
        with suppress(ConnectionError):  # heard when the first reply is read
            connection.send_bytes(messages.encode(self._route))
        return connection
