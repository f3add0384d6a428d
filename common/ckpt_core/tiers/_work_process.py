"""A process of its own that works beside a training, and ends with it.

A thread that works takes the interpreter lock again and again, and the training waits for it each time. A
process takes a core that nobody uses, and nothing of the training's.
"""

from __future__ import annotations

import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, Final, TypeAlias, final

from ckpt_core import messages
from ckpt_core.errors import CheckpointError
from ckpt_core.validation import imported

_START_SECONDS: Final = 60.0
_END_SECONDS: Final = 2.0
_LOOK_SECONDS: Final = 0.1
_PARENT_SECONDS: Final = 0.25

# A scheduler may signal every process of a job; this one ends with its parent, which is asked to end.
_PROGRAM: Final = """
import signal, sys
for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(each, signal.SIG_IGN)
sys.path[:] = sys.argv[5:]
from ckpt_core.tiers._work_process import serve
serve(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
"""

Reply: TypeAlias = int | Mapping[str, Any] | CheckpointError | OSError | None
"""How much more is done, or what was found; then None or the error."""


class EndedError(CheckpointError):
    """The process has ended, or has never answered; the message says how."""


@final
class WorkProcess:
    """Does tasks in a process of its own, from the first one to the end of this one.

    Concurrency: `close` on any thread, tasks one at a time.

    Args:
        service: "package.module:function"; see `serve`.
        terms: a message, of which the function makes what does the tasks.
        nice: of the process. 10 takes a tenth of a processor that the training wants, too; 19 a sixtieth.
    """

    def __init__(self, service: str, terms: object, *, nice: int = 10) -> None:
        self._service, self._terms, self._nice = service, terms, nice
        self._guard = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection[bytes, bytes] | None = None

    @staticmethod
    def can_do(terms: object) -> bool:
        """Return whether this system has such processes, and their terms can be sent."""
        frozen = getattr(sys, "frozen", False)  # then the executable is not Python, but the training itself
        if frozen or os.name != "posix":
            return False
        try:
            messages.encode(terms)
        except messages.MessageError:
            return False  # such as a session, which this process alone has
        return True

    def do(
        self, task: object, stop: Callable[[], None], hear: Callable[[Any], None] = lambda _: None
    ) -> None:
        """Do a task; the next one starts the process again if this one has killed it.

        `stop` is called again and again, and raises to leave the task; `hear` with how much more is done, and
        with what was found.

        Raises:
            EndedError: the process is not there.
            CheckpointError: from `stop`, or of the task.
            OSError: of the task.
        """
        reply: Reply = 0
        try:
            connection = self._started()
            connection.send_bytes(messages.encode(task))
            reply = _next(connection, stop, time.monotonic() + _START_SECONDS)
            while isinstance(reply, int | Mapping):
                hear(reply)
                reply = _next(connection, stop)
        except (EOFError, OSError) as error:
            if isinstance(error, CheckpointError):
                raise  # of `stop`
            raise EndedError(self._end_text()) from error
        finally:
            if isinstance(reply, int | Mapping):
                self.close()  # nobody hears it any more
        if isinstance(reply, Exception):
            raise reply

    def close(self) -> None:
        """Kill the process, also in the middle of a task; the next task starts one."""
        with self._guard:
            process, self._process = self._process, None
            connection, self._connection = self._connection, None
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        if connection is not None:
            connection.close()

    def _end_text(self) -> str:
        """Say how the process has ended."""
        process = self._process
        if process is None:
            return "its process was closed"
        try:
            return f"its process has ended (exit code {process.wait(_END_SECONDS)})"
        except subprocess.TimeoutExpired:
            return "its process has hung up"

    def _started(self) -> Connection[bytes, bytes]:
        if self._connection is not None:
            return self._connection
        connection, inner = Pipe()
        # What is relative, or was when this process began, may by now lead to modules of somebody else.
        found = [each for each in map(str, sys.path) if each.startswith(os.sep)]
        words = [str(inner.fileno()), str(os.getpid()), str(self._nice), self._service, *found]
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        try:
            process = subprocess.Popen(  # noqa: S603 - fixed words, and where this process finds modules
                [get_executable() or sys.executable, "-P", "-c", _PROGRAM, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[inner.fileno()],
                env=kept | {"OMP_NUM_THREADS": "1"},  # idle threads of torch spin on the training's cores
                start_new_session=True,
            )
        except (OSError, RuntimeError) as error:  # no such program; or the interpreter is ending
            connection.close()
            raise EndedError(f"its process cannot be started ({error})") from error
        finally:
            inner.close()
        with self._guard:
            self._process, self._connection = process, connection
        with suppress(ConnectionError):  # heard when the first reply is read
            connection.send_bytes(messages.encode(self._terms))
        return connection


def _next(connection: Connection[bytes, bytes], stop: Callable[[], None], until: float = math.inf) -> Reply:
    """Wait for the next reply."""
    while True:
        stop()
        if connection.poll(_LOOK_SECONDS):
            reply: Reply = messages.decode(connection.recv_bytes())
            return reply
        if time.monotonic() > until:
            raise EndedError("its process has not answered")


def serve(descriptor: int, parent: int, nice: int, service: str) -> None:
    """Do what the parent asks for, until it hangs up or dies.

    Each task is answered by 0, then by numbers of what is done, then by None or by the error. The service is
    "package.module:function": terms -> a function of a task and of what is called with numbers of what is
    done, on any thread.
    """
    now = os.nice(max(0, nice - os.nice(0)))
    with suppress(OSError):  # Linux may share processors between sessions first, whatever is nice in each
        Path("/proc/self/autogroup").write_text(str(now))
    threading.Thread(target=_end_with, args=(parent,), name="ckpt-parent", daemon=True).start()
    connection: Connection[bytes, bytes] = Connection(descriptor)
    guard = threading.Lock()

    def send(reply: Reply) -> None:
        with guard:
            connection.send_bytes(messages.encode(reply))

    make: Callable[[Any], Callable[[Any, Callable[[Any], None]], None]] = imported("service", service)
    with connection:
        try:
            work = make(messages.decode(connection.recv_bytes()))
            while True:
                task, outcome = messages.decode(connection.recv_bytes()), None
                send(0)
                try:
                    work(task, send)
                except (CheckpointError, OSError) as error:
                    outcome = error
                send(outcome)
        except (EOFError, ConnectionError):
            return  # the parent has hung up, or died


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
        never.wait(_PARENT_SECONDS)
    os._exit(1)
