"""Real ranks for tests: one process each, gloo between them, hard time-outs."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, final

_GRACE_SECONDS = 2.0
# Not SIGUSR1, which schedulers send before a preemption and which tests of that will use.
_STACKS_SIGNAL = signal.SIGUSR2


@final
class RanksFailedError(RuntimeError):
    """At least one rank failed, died or did not finish.

    Attributes:
        reports: rank -> traceback, stacks at the time-out, or how the process ended.
    """

    def __init__(self, headline: str, reports: Mapping[int, str]) -> None:
        self.reports = dict(reports)
        body = "\n".join(f"--- rank {rank} ---\n{text.rstrip()}" for rank, text in self.reports.items())
        super().__init__(f"{headline}\n{body}")


@final
@dataclass(frozen=True, slots=True)
class Nodes:
    """Simulated nodes: all run here, and each rank learns which is its own.

    Attributes:
        count: number of nodes.
        per_node: ranks of each.
    """

    count: int
    per_node: int


def run_ranks(
    fn: Callable[..., Any],
    world_size: int | Nodes,
    *args: Any,
    timeout_seconds: float = 120.0,
    expect_death: Collection[int] = (),
    process_group: bool = True,
) -> list[Any]:
    """Run `fn(*args)` on `world_size` ranks and return what each returned.

    Every rank is a process of its own with the environment that torchrun would give it, and with a gloo
    process group. The rendezvous store lives in this process, so any rank may die without taking it along.

    Ranks start from the fork server of `multiprocessing`: `multiprocessing.set_forkserver_preload(["torch"])`
    before the first call spares every one of them that import.

    Args:
        fn: a function at module level; it, its arguments and its results must be picklable.
        world_size: number of ranks; or `Nodes(2, per_node=2)`, for which torchrun would number `GROUP_RANK`
            and `LOCAL_RANK` in the same way. Give the ranks of each node a directory of its own.
        args: handed to `fn`.
        timeout_seconds: after this every rank's stacks are collected and all are killed.
        expect_death: ranks that kill themselves; their result is None, and surviving it is a failure.
        process_group: whether to initialise `torch.distributed`; without it `fn` may do so (`env://`).

    Raises:
        RanksFailedError: with every rank's traceback; the others are killed on the first failure.
    """
    from torch.distributed import TCPStore

    nodes = world_size if isinstance(world_size, Nodes) else Nodes(1, world_size)
    world_size = nodes.count * nodes.per_node
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        ranks = [
            _Rank(rank, Path(folder), expected_to_die=rank in expect_death) for rank in range(world_size)
        ]
        call = pickle.dumps((fn, args))
        try:
            for rank in ranks:
                rank.start(
                    _RankCall(
                        call=call,
                        stem=rank.stem,
                        environment=rank_environment(rank.rank, world_size, store.port, nodes),
                        timeout_seconds=timeout_seconds,
                        process_group=process_group,
                    )
                )
            return _supervise(ranks, timeout_seconds)
        finally:
            for rank in ranks:
                rank.kill()


@final
class _Rank:
    """What the parent knows of one rank."""

    def __init__(self, rank: int, folder: Path, *, expected_to_die: bool) -> None:
        self.rank = rank
        self.stem = str(folder / f"rank-{rank}")
        self.expected_to_die = expected_to_die
        self.process: ForkServerProcess

    def start(self, task: _RankCall) -> None:
        context = multiprocessing.get_context("forkserver")
        self.process = context.Process(target=_child, args=(task,), name=f"rank-{self.rank}", daemon=True)
        self.process.start()

    @property
    def failed(self) -> bool:
        code = self.process.exitcode
        if code is None:
            return False
        return code != -signal.SIGKILL if self.expected_to_die else code != 0

    def result(self) -> Any:
        content = b"" if self.expected_to_die else Path(self.stem + ".result").read_bytes()
        return pickle.loads(content) if content else None

    def report(self) -> str:
        texts = [
            path.read_text()
            for path in (Path(self.stem + ".error"), Path(self.stem + ".stacks"))
            if path.exists()
        ]
        code = self.process.exitcode
        state = "still running" if code is None else f"exit code {code}"
        if self.expected_to_die and code is not None and code != -signal.SIGKILL:
            state += ", but it was expected to die by SIGKILL"
        return "\n".join(text for text in [state, *texts] if text)

    def kill(self) -> None:
        """End it, if it was started and still runs."""
        if hasattr(self, "process"):
            self.process.kill()
            self.process.join()
            self.process.close()


def _supervise(ranks: list[_Rank], timeout_seconds: float) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    while (running := _running(ranks)) and not any(rank.failed for rank in ranks):
        remaining = deadline - time.monotonic()
        if not wait([rank.process.sentinel for rank in running], max(remaining, 0)):
            _collect_stacks(running)
            names = ", ".join(str(rank.rank) for rank in running)
            raise RanksFailedError(
                f"ranks {names} did not finish within {timeout_seconds:g} s", _reports(ranks)
            )
        for rank in ranks:
            rank.process.join(0)
    failed = [rank for rank in ranks if rank.failed]
    if failed:
        # Their errors arrive together more often than not; the loudest is rarely the first cause.
        wait([rank.process.sentinel for rank in _running(ranks)], _GRACE_SECONDS)
        _collect_stacks(_running(ranks))
        raise RanksFailedError(f"rank {failed[0].rank} of {len(ranks)} failed first", _reports(ranks))
    return [rank.result() for rank in ranks]


def _running(ranks: list[_Rank]) -> list[_Rank]:
    return [rank for rank in ranks if rank.process.exitcode is None]


def _reports(ranks: list[_Rank]) -> dict[int, str]:
    return {rank.rank: rank.report() for rank in ranks}


def _collect_stacks(ranks: list[_Rank]) -> None:
    """Have every rank write its stacks from a C signal handler, GIL held or not."""
    files = [Path(rank.stem + ".stacks") for rank in ranks]
    for rank, file in zip(ranks, files, strict=True):
        # The file exists once the handler does; before that the signal would kill.
        if file.exists() and rank.process.pid is not None and rank.process.is_alive():
            os.kill(rank.process.pid, _STACKS_SIGNAL)
    deadline = time.monotonic() + _GRACE_SECONDS
    while time.monotonic() < deadline and any(file.exists() and not file.stat().st_size for file in files):
        wait([rank.process.sentinel for rank in ranks], 0.05)


def rank_environment(rank: int, world_size: int, port: int, nodes: Nodes | None = None) -> dict[str, str]:
    """Build the environment of a rank as torchrun does; no rank serves `port`."""
    count, per_node = (1, world_size) if nodes is None else (nodes.count, nodes.per_node)
    return {
        # The fork server has the variables of the time when it was started.
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_node),
        "GROUP_RANK": str(rank // per_node),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: nobody among the ranks hosts the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _RankCall:
    """The work of a rank.

    `call` is pickled apart, so that its import errors are reported like others.
    """

    call: bytes
    stem: str
    environment: Mapping[str, str]
    timeout_seconds: float
    process_group: bool


def _child(task: _RankCall) -> None:
    stem = task.stem
    os.environ.clear()
    os.environ.update(task.environment)
    stacks = open(stem + ".stacks.new", "w", encoding="utf-8")  # noqa: SIM115 - open until the process ends
    faulthandler.register(_STACKS_SIGNAL, file=stacks, all_threads=True)
    # Of a crash below Python, such as an abort in a thread of gloo's, nothing else would be left.
    faulthandler.enable(file=stacks, all_threads=True)
    Path(stem + ".stacks.new").rename(stem + ".stacks")
    # Should the parent be gone by then, nobody else would end this process.
    faulthandler.dump_traceback_later(task.timeout_seconds + 30, exit=True)
    try:
        Path(stem + ".result").write_bytes(pickle.dumps(_call(task)))
    # Told to the parent, whatever it is, by the file and the exit code.
    except BaseException:
        Path(stem + ".error").write_text(traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: a background thread that still waits for a peer must not keep this process alive.
        os._exit(1)
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo and autograd threads that end together with the interpreter have been seen to abort the process.
    os._exit(0)


def _call(task: _RankCall) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    fn, args = pickle.loads(task.call)
    if not task.process_group:
        return fn(*args)
    dist.init_process_group("gloo", timeout=timedelta(seconds=task.timeout_seconds))
    result = fn(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
