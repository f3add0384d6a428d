"""Signals at exact moments: ranks wait at named points until the sender of the signals lets them go on."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast, final

from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.reliability import forks

SOCKET, POINTS = "PREEMPTION_SOCKET", "PREEMPTION_POINTS"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """A signal, sent when a rank is at a point; it and later ranks to be shot at wait there until then.

    Attributes:
        rank: the rank that must have come to the point.
        point: e.g. `step 3`, in the middle of the step after step 3.
        to: ranks that get the signal, each as often as it is named.
        name: of the signal.
    """

    rank: int
    point: str
    to: tuple[int, ...] = ()
    name: str = "SIGTERM"


@final
class Line:
    """A rank's end: tells where it is, and waits there if somebody wants it to."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        wanted = json.loads(os.environ[POINTS])
        self._wanted: set[str] = {point for of, point in wanted if of == rank}
        self._say({})

    def point(self, name: str) -> None:
        """This rank is at a point, the first time; from any thread."""
        if name in self._wanted:
            self._wanted.discard(name)
            self._say({"point": name}, wait=True)

    def end(self, result: dict[str, Any]) -> None:
        """This rank has returned from its training."""
        self._say({"result": result})

    def storage(self, root: Path) -> Storage:
        """A directory with the points `write 1`, `write 2`, …: a data file is about to be made."""
        writes = iter(range(1, 1000))

        def at_write(_operation: object) -> None:
            self.point(f"write {next(writes)}")

        return FaultyStorage(LocalStorage(root), [Fault(method="create", key="*.distcp", before=at_write)])

    def _say(self, message: dict[str, Any], *, wait: bool = False) -> None:
        # A connection for each message: one thread may wait at a point while another comes to the next.
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(os.environ[SOCKET])
            connection.sendall(
                json.dumps({"rank": self.rank, "pid": os.getpid(), **message}).encode() + b"\n"
            )
            if wait:
                connection.recv(1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What became of the ranks of one run: exit codes (None: it had to be killed) and results, by rank."""

    codes: dict[int, int | None]
    results: dict[int, dict[str, Any]]
    missed: Sequence[Shot] = ()


@final
class Director:
    """Sends signals to ranks, which connect to it; made before they are started, for its environment.

    Args:
        shots: what is sent, in this order.
        seconds: after which ranks that have not ended are killed.
    """

    def __init__(self, shots: Sequence[Shot] = (), seconds: float = 150.0) -> None:
        self._shots = shots
        self._left = list(shots)
        self._seconds = seconds
        self._pids: dict[int, int] = {}
        self._held: dict[tuple[int, str], socket.socket] = {}
        self._results: dict[int, dict[str, Any]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="line-")
        self._listener = socket.socket(socket.AF_UNIX)
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        address = f"{self._folder.name}/line"
        self._listener.bind(address)
        self._listener.listen()
        self._selector.register(self._listener, selectors.EVENT_READ)
        os.environ[SOCKET] = address
        os.environ[POINTS] = json.dumps([(shot.rank, shot.point) for shot in self._shots])
        return self

    def __exit__(self, *exception: object) -> None:
        self._selector.close()
        self._listener.close()
        self._folder.cleanup()

    def attend(self, children: Sequence[forks.Child], results: int = 0) -> Run:
        """Send the signals, and wait for all children to end and for that many ranks to give a result."""
        for child in children:
            self._selector.register(child.stream, selectors.EVENT_READ, child)
        deadline = time.monotonic() + self._seconds
        while any(child.status is None for child in children) or len(self._results) < results:
            if not self._listen(deadline - time.monotonic()):
                break  # nothing was said until then
        late = forks.gather(children, 0.0)
        while self._listen(0.0):
            pass
        codes = {rank: None if rank in late else child.exit_code for rank, child in enumerate(children)}
        return Run(codes=codes, results=self._results, missed=tuple(self._left))

    def _listen(self, seconds: float) -> int:
        said = self._selector.select(max(seconds, 0.0))
        for key, _ in said:
            if isinstance(key.data, forks.Child):
                self._follow(key.data)
            else:
                self._hear(key)
        return len(said)

    def _follow(self, child: forks.Child) -> None:
        # Before it is closed: later ranks have it, too, so that closing it here would not end its events.
        self._selector.unregister(child.stream)
        if child.listen():
            self._selector.register(child.stream, selectors.EVENT_READ, child)

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._listener:
            connection, _ = self._listener.accept()
            self._selector.register(connection, selectors.EVENT_READ, bytearray())
            return
        connection = cast("socket.socket", key.fileobj)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # a handler raised while its rank waited
            received = connection.recv(1 << 16)
        if not received:
            self._selector.unregister(connection)
        key.data.extend(received)
        while b"\n" in key.data:
            line, _, rest = key.data.partition(b"\n")
            key.data[:] = rest
            self._take(json.loads(line), connection)

    def _take(self, message: dict[str, Any], connection: socket.socket) -> None:
        rank = message["rank"]
        self._pids[rank] = message["pid"]
        if "point" in message:
            self._held[rank, message["point"]] = connection
            self._fire()
        elif "result" in message:
            self._results[rank] = message["result"]

    def _fire(self) -> None:
        """Send what is due, and let go those whose point nobody waits for any more."""
        while self._left and (self._left[0].rank, self._left[0].point) in self._held:
            shot = self._left.pop(0)
            for target in shot.to:
                os.kill(self._pids[target], signal.Signals[shot.name])
        awaited = {(shot.rank, shot.point) for shot in self._left}
        for place in set(self._held) - awaited:
            with contextlib.suppress(BrokenPipeError):
                self._held.pop(place).sendall(b"!")
