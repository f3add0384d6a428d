"""Fresh processes in milliseconds: forks of one that has imported everything and started nothing.

Whoever uses this has no threads and no process group when it forks; what an experiment needs of either is
made in the child.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, final

Tell = Callable[[Any], None]
"""Says something, anything that JSON can hold, to the process that forked this one."""

Act = Callable[[Tell], None]

_LIMIT_SECONDS = 120.0
_PATIENCE_SECONDS = 300.0


@final
@dataclass(kw_only=True, slots=True)
class Child:
    """A forked process.

    Attributes:
        pid: of the process; its own group's, too, if it leads one.
        stream: what it tells arrives here.
        told: what it has told so far.
        status: how it ended, as `os.waitpid` says it; None while it lives.
    """

    pid: int
    stream: int
    told: list[Any] = field(default_factory=list)
    status: int | None = None
    rest: bytes = b""

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.status is not None and os.waitstatus_to_exitcode(self.status) == -signal.SIGKILL

    def listen(self) -> bool:
        """Take in what has been told since; whether there may be more. Blocks until there is something."""
        chunk = os.read(self.stream, 1 << 16)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        self.told += [json.loads(line) for line in lines]
        if not chunk:
            os.close(self.stream)
            _, self.status = os.waitpid(self.pid, 0)
        return bool(chunk)

    def kill(self) -> None:
        """End it, if it is still there."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)


def fork(act: Act, *, group: int | None = None) -> Child:
    """Run `act` in a child; a failure is told as `{"error": traceback}`.

    Args:
        act: what it does; it ends when this returns.
        group: process group to join; 0 for one of its own.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _perform(act, writer, group)
    os.close(writer)
    if group is not None:
        # On both sides: whoever is first. The child may have ended by now.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(child, group)
    return Child(pid=child, stream=reader)


def _perform(act: Act, writer: int, group: int | None) -> None:
    def tell(message: Any) -> None:
        os.write(writer, json.dumps(message).encode() + b"\n")

    status = 1
    try:
        if group is not None:
            os.setpgid(0, group)
        act(tell)
        status = 0
    except BaseException:  # noqa: BLE001 - told to the parent, whatever it is
        tell({"error": traceback.format_exc()})
    finally:
        # Threads and destructors that came with the fork are not ours to end.
        os._exit(status)


def gather(children: Sequence[Child], limit_seconds: float = _LIMIT_SECONDS) -> list[int]:
    """Wait until all have ended; the indices of those that had not within the limit, and were killed."""
    deadline = time.monotonic() + limit_seconds
    while living := [child for child in children if child.status is None]:
        ready = _ready(living, deadline)
        if not ready:
            break
        for child in ready:
            child.listen()
    late = [index for index, child in enumerate(children) if child.status is None]
    for index in late:
        children[index].kill()
        while children[index].listen():
            pass
    return late


def forked(act: Act) -> Child:
    """Run `act` in a child and wait for its end; see `fork`."""
    child = fork(act)
    gather([child])
    return child


def answer(act: Callable[[], Any]) -> Any:
    """What `act` returns, run in a child.

    Raises:
        RuntimeError: it failed; the message is its traceback.
    """
    child = forked(lambda tell: tell(act()))
    told = child.told[-1] if child.told else {"error": f"it ended with status {child.status}"}
    if isinstance(told, dict) and "error" in told:
        raise RuntimeError(told["error"])
    return told


def spread(tasks: Iterable[Callable[[], Any]], jobs: int) -> Iterator[Any]:
    """What every task returns, each in a child of its own, up to `jobs` at once, in the order of their ends.

    Raises:
        RuntimeError: a task failed; the message is its traceback.
    """
    waiting, running = iter(tasks), list[Child]()
    try:
        while True:
            while len(running) < jobs and (task := next(waiting, None)) is not None:
                running.append(fork(lambda tell, task=task: tell(task())))
            if not running:
                return
            ready = _ready(running, time.monotonic() + _PATIENCE_SECONDS)
            if not ready:
                raise RuntimeError(f"no case has ended for {_PATIENCE_SECONDS:g} s")
            for child in ready:
                if not child.listen():
                    running.remove(child)
                    yield _answered(child)
    finally:
        for child in running:
            child.kill()


def _answered(child: Child) -> Any:
    told = child.told[-1] if child.told else {"error": f"a case ended with status {child.status}"}
    if isinstance(told, dict) and "error" in told:
        raise RuntimeError(told["error"])
    return told


def _ready(children: Sequence[Child], deadline: float) -> list[Child]:
    poll = select.poll()
    for child in children:
        poll.register(child.stream, select.POLLIN)
    left = max(0.0, deadline - time.monotonic())
    found = {descriptor for descriptor, _ in poll.poll(left * 1000)}
    return [child for child in children if child.stream in found]


def adopt(modules: Iterable[str]) -> None:
    """Import what children had to import themselves, so that later ones need not."""
    for name in modules:
        # Some modules only seem to be ones; who needs them will find out.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Garbage collection in a child would touch, and so copy, every page of what it inherited.
    gc.collect()
    gc.freeze()


@final
class StoreServer:
    """A torch Store in a process of its own, for the ranks of all experiments: none of them hosts it."""

    def __init__(self) -> None:
        # When the parent is gone, however it went, the pipe is closed, and the server ends.
        alive, self._lifeline = os.pipe()

        def serve(tell: Tell) -> None:
            from torch.distributed import TCPStore

            os.close(self._lifeline)
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            tell(store.port)
            os.read(alive, 1)

        self._process = fork(serve)
        os.close(alive)
        self._process.listen()
        self.port: int = self._process.told[0]

    @property
    def pid(self) -> int:
        """Of the server's process, for those who try what becomes of its clients."""
        return self._process.pid

    def close(self) -> None:
        """End the server."""
        self._process.kill()
        gather([self._process])
        os.close(self._lifeline)

    def join(self, name: str, rank: int, world_size: int) -> None:
        """Make this process a rank of the job `name`, with a gloo group."""
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        limit = timedelta(seconds=_LIMIT_SECONDS)
        client = dist.TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False, timeout=limit)
        store = dist.PrefixStore(name, client)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=limit)


def stacks_to(path: Path, seconds: float) -> None:
    """Write the stacks of all threads of this process to a file if it still lives then."""
    import faulthandler

    faulthandler.dump_traceback_later(seconds, file=path.open("w"))
