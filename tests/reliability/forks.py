"""Start processes in milliseconds: forks of one that has imported everything and started nothing.

Who uses this has no threads and no process group when it forks; what an experiment needs of either is made in
the child. All experiments start their processes here: alone (`fork`, `answer`, `spread`), or as the ranks of
a job (`ranks`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, final

from tests.kit.ranks import rank_environment

Tell = Callable[[Any], None]
"""Say something, anything that JSON can hold, to the process that forked this one."""

Act = Callable[[Tell], None]

LIMIT_SECONDS = 120.0
_PATIENCE_SECONDS = 300.0
_LIFE_SECONDS = 280.0
"""After which a forked rank ends itself, with its stacks, if nobody else did."""


@final
@dataclass(kw_only=True, slots=True)
class Child:
    """A process that was started here.

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
        return self.exit_code == -signal.SIGKILL

    @property
    def exit_code(self) -> int | None:
        """The exit code, or the signal that ended it as a negative number; None while it lives."""
        return None if self.status is None else os.waitstatus_to_exitcode(self.status)

    def listen(self) -> bool:
        """Take in what has been told since; whether there may be more. Blocks until there is something."""
        if self.status is not None:
            return False
        chunk = os.read(self.stream, 1 << 16)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        self.told += [json.loads(line) for line in lines]
        if not chunk:
            os.close(self.stream)
            _, self.status = os.waitpid(self.pid, 0)
        return bool(chunk)

    def hear(self, number: int) -> Any:
        """Wait for the message of that number; what it was."""
        while len(self.told) <= number and self.listen():
            pass
        return self.told[number] if len(self.told) > number else {"error": "it ended without a word"}

    def kill(self) -> None:
        """End it, if it is still there."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)


def fork(act: Act, *, group: int | None = None) -> Child:
    """Run `act` in a child; a failure arrives as `{"error": traceback}`.

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
        # On both sides: one of them is first. The child may have ended by now.
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
    except BaseException:
        tell({"error": traceback.format_exc()})
    finally:
        # Threads and destructors that came with the fork are not ours to end.
        os._exit(status)


def gather(children: Sequence[Child], limit_seconds: float = LIMIT_SECONDS) -> list[int]:
    """Wait until all have ended; the indices of those that had not within the limit, and were killed."""
    late = wait(children, limit_seconds)
    for index in late:
        children[index].kill()
        while children[index].listen():
            pass
    return late


def wait(children: Sequence[Child], limit_seconds: float) -> list[int]:
    """Wait until all have ended; the indices of those that had not within the limit."""
    deadline = time.monotonic() + limit_seconds
    while living := [child for child in children if child.status is None]:
        ready = _ready(living, deadline)
        if not ready:
            break
        for child in ready:
            child.listen()
    return [index for index, child in enumerate(children) if child.status is None]


def wait_for_word(children: Sequence[Child], words: Sequence[str], limit_seconds: float) -> None:
    """Wait until every child has told a message with one of these keys, or has ended."""
    deadline = time.monotonic() + limit_seconds
    while silent := [child for child in children if child.status is None and not _has_said(child, words)]:
        ready = _ready(silent, deadline)
        if not ready:
            return
        for child in ready:
            child.listen()


def _has_said(child: Child, words: Sequence[str]) -> bool:
    return any(word in message for message in child.told for word in words)


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
    return answered(forked(lambda tell: tell(act())))


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
                    yield answered(child)
    finally:
        for child in running:
            child.kill()


def answered(child: Child) -> Any:
    """What a child that has ended said last.

    Raises:
        RuntimeError: it failed; the message is its traceback.
    """
    told = child.told[-1] if child.told else {"error": f"it ended with status {child.status}"}
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
class Gate:
    """Opened once, for all processes that were forked since it was made."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()

    def open(self) -> None:
        """Open it; nobody takes the byte out, so that it stays open."""
        os.write(self._writer, b"!")

    def is_open(self) -> bool:
        """Whether it was opened."""
        return bool(select.select([self._reader], [], [], 0)[0])

    def wait(self) -> None:
        """Return when it is opened."""
        select.select([self._reader], [], [])

    def discard(self) -> None:
        """Give the descriptors back."""
        os.close(self._reader)
        os.close(self._writer)


@final
class StoreServer:
    """A torch Store in a process of its own, so that any rank may die without it."""

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
        self.port: int = self._process.hear(0)

    def signal(self, number: int) -> None:
        """Send a signal to the server, to see what becomes of its clients."""
        os.kill(self._process.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        gather([self._process])
        os.close(self._lifeline)


@contextlib.contextmanager
def ranks(
    world_size: int, act: Callable[[int, Tell], None], *, server: StoreServer | None = None, join: bool = True
) -> Generator[list[Child]]:
    """Fork the ranks of a job, in one kernel process group led by rank 0; killed at the end of the context.

    Args:
        world_size: how many; one rank alone gets no process group of torch.
        act: what each does, with its rank.
        server: where they meet; None for a Store of their own.
        join: whether to initialise `torch.distributed`; else `act` may do so (`env://`).
    """
    children: list[Child] = []
    own = StoreServer() if server is None and world_size > 1 else None
    meeting = server or own

    def be(rank: int, tell: Tell) -> None:
        import torch

        faulthandler.dump_traceback_later(_LIFE_SECONDS, exit=True)
        torch.set_num_threads(1)
        if meeting is not None:
            os.environ.update(rank_environment(rank, world_size, meeting.port))
            if join:
                join_ranks()
        act(rank, tell)

    try:
        for rank in range(world_size):
            group = children[0].pid if children else 0
            children.append(fork(lambda tell, rank=rank: be(rank, tell), group=group))
        yield children
    finally:
        for child in children:
            child.kill()
        gather(children)
        if own is not None:
            own.__exit__()


def join_ranks() -> None:
    """Make this process, which has the environment of a rank, a member of the gloo group."""
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=LIMIT_SECONDS))
