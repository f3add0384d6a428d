"""Signals at exact moments: ranks wait at named points until whoever sends signals lets them go on."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Collection, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage

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
@dataclass(kw_only=True, slots=True)
class Director:
    """Starts ranks and sends signals to them.

    Attributes:
        shots: what is sent, in this order.
        seconds: after which ranks that have not ended are killed.
        results: how many ranks must have told a result, where not all of them are children.
    """

    shots: Sequence[Shot]
    seconds: float = 150.0
    results: int = 0
    _pids: dict[int, int] = field(default_factory=dict)
    _held: dict[tuple[int, str], socket.socket] = field(default_factory=dict)
    _results: dict[int, dict[str, Any]] = field(default_factory=dict)
    _left: list[Shot] = field(default_factory=list)

    def run(self, start: Callable[[], Collection[int]]) -> Run:
        """Go through with it; `start` starts the ranks and returns their processes, in rank order."""
        self._left = list(self.shots)
        with (
            tempfile.TemporaryDirectory(prefix="line-") as folder,
            socket.socket(socket.AF_UNIX) as listener,
            selectors.DefaultSelector() as selector,
        ):
            address = f"{folder}/line"
            listener.bind(address)
            listener.listen()
            selector.register(listener, selectors.EVENT_READ)
            os.environ[SOCKET] = address
            os.environ[POINTS] = json.dumps([(shot.rank, shot.point) for shot in self.shots])
            children = {pid: rank for rank, pid in enumerate(start())}
            codes = self._attend(children, listener, selector)
        return Run(codes=codes, results=self._results, missed=tuple(self._left))

    def _attend(
        self, children: dict[int, int], listener: socket.socket, selector: selectors.BaseSelector
    ) -> dict[int, int | None]:
        codes: dict[int, int | None] = {}
        deadline = time.monotonic() + self.seconds
        while self._waits(children, codes) and time.monotonic() < deadline:
            self._listen(0.02, listener, selector)
            for pid, rank in children.items():
                if rank not in codes and (ended := os.waitpid(pid, os.WNOHANG))[0]:
                    codes[rank] = os.waitstatus_to_exitcode(ended[1])
        for pid, rank in children.items():
            if rank not in codes:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[rank] = None
        while self._listen(0, listener, selector):
            pass
        return codes

    def _listen(self, seconds: float, listener: socket.socket, selector: selectors.BaseSelector) -> int:
        said = selector.select(seconds)
        for key, _ in said:
            self._hear(key, listener, selector)
        return len(said)

    def _waits(self, children: Sized, codes: Sized) -> bool:
        return len(codes) < len(children) or len(self._results) < self.results

    def _hear(
        self, key: selectors.SelectorKey, listener: socket.socket, selector: selectors.BaseSelector
    ) -> None:
        if key.fileobj is listener:
            connection, _ = listener.accept()
            selector.register(connection, selectors.EVENT_READ, bytearray())
            return
        connection = cast("socket.socket", key.fileobj)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # a handler raised while its rank waited
            received = connection.recv(1 << 16)
        if not received:
            selector.unregister(connection)
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
        """Send what is due, and let go whoever is not waited for any more."""
        while self._left and (self._left[0].rank, self._left[0].point) in self._held:
            shot = self._left.pop(0)
            for target in shot.to:
                os.kill(self._pids[target], signal.Signals[shot.name])
        awaited = {(shot.rank, shot.point) for shot in self._left}
        for place in set(self._held) - awaited:
            with contextlib.suppress(BrokenPipeError):
                self._held.pop(place).sendall(b"!")
