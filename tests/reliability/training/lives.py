"""One life of a training job: forked from a warm process, killed at its moment, read from what it wrote."""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Collection, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, final

import torch.distributed as dist

from benchmarks.crashing.training import Sweep
from benchmarks.crashing.training_loops import Life, Witness, with_accelerate, with_lightning

_LOOPS = {"Lightning": with_lightning, "Accelerate": with_accelerate}
PATIENCE_SECONDS = 60.0
"""A process that has not ended by then hangs: every wait of ours has a shorter deadline."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """How a life is to end, unless it has ended before.

    Attributes:
        moment_seconds: after the start, when the victims are killed.
        victims: their ranks.
        patience_seconds: after that, when whoever is left is killed, too.
    """

    moment_seconds: float
    victims: Collection[int]
    patience_seconds: float = PATIENCE_SECONDS


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How one life ended.

    Attributes:
        kills: processes that a signal ended; 0 if the job ended before its moment came.
        told: what its ranks wrote down.
        problems: what was wrong with how it ended.
    """

    kills: int
    told: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list[str])

    def facts(self, key: str) -> list[Any]:
        """The values under that key; of each rank, oldest first."""
        return [line[key] for line in self.told if key in line]


@contextmanager
def _rendezvous() -> Generator[int]:
    """The port of a store of its own, which outlives the ranks, as an agent's does under torchrun."""
    telling, told = os.pipe()
    waiting, ending = os.pipe()
    child = os.fork()
    if child == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(told, str(store.port).encode())
        os.close(ending)
        os.read(waiting, 1)
        os._exit(0)
    os.close(told)
    os.close(waiting)
    try:
        yield int(os.read(telling, 16))
    finally:
        os.close(telling)
        os.close(ending)
        os.waitpid(child, 0)


def live(sweep: Sweep, life: Life, death: Death | None = None) -> Ended:
    """Start a job, let it die if it is to, and wait until all of it has ended.

    Args:
        sweep: what trains, on how many ranks.
        life: what rank 0 is told; its diary is the stem of the ranks' own.
        death: None to let it live.
    """
    with _rendezvous() if sweep.world > 1 else nullcontext(0) as port:
        ranks = [_Rank.born(sweep, life, number, port) for number in range(sweep.world)]
        patience = PATIENCE_SECONDS
        if death is not None:
            _wait(ranks, death.moment_seconds)
            for number in death.victims:
                ranks[number].kill()
            patience = death.patience_seconds
        left = _wait(ranks, patience)
        for rank in ranks:
            rank.kill()
        told = [line for rank in ranks for line in rank.told()]
        signals = [by for rank in ranks if (by := rank.reap()) is not None]
    hanging = [f"rank {rank.number} hangs" for rank in left if patience == PATIENCE_SECONDS]
    return Ended(kills=len(signals), told=told, problems=hanging + _wrong(signals, told, sweep.world))


def _wrong(signals: list[int], told: list[dict[str, Any]], world: int) -> list[str]:
    # Torch 2.13 on gloo aborts about one multi-rank process in a few hundred: a death like any other.
    expected = {signal.SIGKILL, signal.SIGABRT} if world > 1 else {signal.SIGKILL}
    errors = [line["error"] for line in told if "error" in line]
    # Where a rank was killed, the others have every reason to fail.
    return [f"died of signal {each}" for each in signals if each not in expected] + errors * (not signals)


@final
class _Rank:
    """A forked process."""

    def __init__(self, number: int, pid: int, diary: Path) -> None:
        self.number = number
        self.handle = os.pidfd_open(pid)
        self._pid = pid
        self._diary = diary

    @classmethod
    def born(cls, sweep: Sweep, life: Life, number: int, port: int) -> _Rank:
        diary = life.diary.with_name(f"{life.diary.name}-{number}.jsonl")
        pid = os.fork()
        if pid == 0:
            own = Life(
                root=life.root,
                steps=life.steps,
                rank=number,
                world=sweep.world,
                diary=diary,
            )
            _be(sweep, own, port)
        return cls(number, pid, diary)

    def kill(self) -> None:
        """Harmless for one that has ended: nobody else gets its number before `reap`."""
        os.kill(self._pid, signal.SIGKILL)

    def reap(self) -> int | None:
        """The signal that ended it, if one did."""
        status = os.waitpid(self._pid, 0)[1]
        os.close(self.handle)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else None

    def told(self) -> list[dict[str, Any]]:
        """What it has written down; a line that the kill cut short does not count."""
        if not self._diary.exists():
            return []
        lines = self._diary.read_text(encoding="utf-8").splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]


def _wait(ranks: list[_Rank], seconds: float) -> list[_Rank]:
    """Wait until all have ended, but not longer than that; who still runs then."""
    deadline = time.monotonic() + seconds
    running = {rank.handle: rank for rank in ranks}
    poll = select.poll()
    for handle in running:
        poll.register(handle, select.POLLIN)
    while running and (left := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(left * 1000):
            poll.unregister(handle)
            del running[handle]
    return list(running.values())


def _be(sweep: Sweep, life: Life, port: int) -> NoReturn:
    """The life itself, in the forked process; its output goes beside its diary."""
    code = 1
    witness = Witness(life)
    try:
        _settle(life, port)
        _LOOPS[sweep.adapter](life, witness)
        if dist.is_initialized():
            dist.destroy_process_group()
        code = 0
    except BaseException:  # noqa: BLE001 - the diary tells the supervisor, whatever it is
        witness.tell(error=traceback.format_exc())
    # Not sys.exit: nothing of the warm process that this one was forked from may be ended here.
    os._exit(code)


def _settle(life: Life, port: int) -> None:
    output = os.open(life.diary.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    tempfile.tempdir = str(life.root.parent / "tmp")
    if life.world == 1:
        return
    os.environ.update(
        RANK=str(life.rank),
        LOCAL_RANK=str(life.rank),
        WORLD_SIZE=str(life.world),
        LOCAL_WORLD_SIZE=str(life.world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        GLOO_SOCKET_IFNAME="lo",
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
