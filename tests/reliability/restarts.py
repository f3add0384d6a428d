"""Ranks killed under torch's elastic agent, which starts all of them again in place: the job goes on exactly.

The agent is the one of `torchrun`, in a process that has imported everything, and its ranks are forks of it.
A restart of all ranks within seconds is where torch's agent hands the addresses of the dead ranks to the new
ones: docs/preemption.md names what avoids it, and this is what is tried here.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist

from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.reliability import forks
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.preemption.experiment import train_under
from tests.reliability.preemption.jobs import Job

RANKS: Final = 2
_STEPS: Final = 9
_LIMIT_SECONDS: Final = 150.0
_HOSTS: Final = ("loop", "lightning", "accelerate")
_BACKENDS: Final = ("c10d", "static")
_SHARED_STORE: Final = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """When ranks of one attempt end.

    Attributes:
        point: where a rank is killed: `step 3`, `write 2`, `commit 1`, counted in the attempt.
        ranks: who.
    """

    point: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.point} by {'all' if len(self.ranks) == RANKS else f'rank {self.ranks[0]}'}"


KILLS: Final = {
    "in a step": (Kill(point="step 3", ranks=(1,)), Kill(point="step 5", ranks=(0,))),
    "in a save": (Kill(point="write 2", ranks=(1,)), Kill(point="commit 1", ranks=(0,))),
    "all at once": (Kill(point="step 3", ranks=(0, 1)), Kill(point="write 1", ranks=(0, 1))),
    "again and again": (
        Kill(point="write 1", ranks=(0,)),
        Kill(point="start", ranks=(1,)),
        Kill(point="step 4", ranks=(0,)),
    ),
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A job that is killed once in each of its first attempts.

    Attributes:
        host: what trains.
        backend: of the rendezvous.
        moments: a key of `KILLS`.
    """

    host: str
    backend: str
    moments: str

    def __str__(self) -> str:
        return f"{self.host}, {self.backend}, {self.moments}"


@final
class _Killed:
    """A rank's end, in place of `preemption.signalling.Line`: it dies where it is told to."""

    def __init__(self, rank: int, kill: Kill | None, tell: Path) -> None:
        self.rank = rank
        self._kill = kill
        self._tell = tell

    def point(self, name: str) -> None:
        """This rank is at a point; from any thread."""
        if self._kill is not None and name == self._kill.point and self.rank in self._kill.ranks:
            (self._tell / f"killed-{os.environ['TORCHELASTIC_RESTART_COUNT']}-{self.rank}").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def storage(self, root: Path) -> Storage:
        """A directory with points before each data file and each commit marker."""
        writes, commits = iter(range(1, 1000)), iter(range(1, 1000))
        return FaultyStorage(
            LocalStorage(root),
            [
                Fault(method="create", key="*.distcp", before=lambda _: self.point(f"write {next(writes)}")),
                Fault(
                    method="create", key="*/COMMITTED", before=lambda _: self.point(f"commit {next(commits)}")
                ),
            ],
        )


def _be_rank(case: Case, kills: Sequence[Kill], folder: Path) -> None:
    """Train as one rank of one attempt."""
    torch.set_num_threads(1)
    signal.signal(
        signal.SIGTERM, signal.SIG_DFL
    )  # as in a process that torchrun starts; this one has the agent's
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    if case.backend == "static":  # whose agent keeps one store for all attempts
        master = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        store = dist.PrefixStore(f"attempt-{attempt}", master)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    line = _Killed(rank, kills[attempt] if attempt < len(kills) else None, folder)
    # Who heeds SIGTERM and waits for a dead rank is killed by the agent after 30 s: not waited for here.
    signals = {} if case.moments == "all at once" else {"signals": ("SIGUSR1",)}
    job = Job(host=case.host, steps=_STEPS, every=2, save=signals)
    result = train_under(case.host)(job, folder / "run", line, resume=True)
    told = {
        "attempt": attempt,
        "step": result["step"],
        "weights": result["weights"],
        "began": result["began"],
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))


def launch(case: Case, kills: Sequence[Kill], folder: Path) -> list[dict[str, Any]]:
    """Run a job under the agent, and return what each rank told at its end.

    Raises:
        RuntimeError: it did not come to its end.
    """
    (folder / "run").mkdir(parents=True)

    def act(_tell: forks.Tell) -> None:
        from torch.distributed.launcher.api import LaunchConfig, elastic_launch

        os.environ[_SHARED_STORE] = "1"  # each attempt has a store of its own
        os.dup2(2, 1)
        with forks.StoreServer() as free:  # a port that was free a moment ago
            port = free.port
        static = {"rank": 0} if case.backend == "static" else {}
        config = LaunchConfig(
            min_nodes=1, max_nodes=1, nproc_per_node=RANKS, run_id=folder.name, max_restarts=len(kills),
            rdzv_backend=case.backend, rdzv_endpoint=f"127.0.0.1:{port if static else 0}",
            rdzv_configs=static, monitor_interval=0.05, start_method="fork",
        )  # fmt: skip
        elastic_launch(config, _be_rank)(case, kills, folder)

    child = forks.fork(act, group=0)
    hung = bool(forks.gather([child], _LIMIT_SECONDS))
    if hung or child.exit_code != 0:
        raise RuntimeError("it hung" if hung else f"it ended: {child.told[-1:]}")
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def cases() -> Iterator[Case]:
    """Every case."""
    for host in _HOSTS:
        for backend in _BACKENDS:
            yield from (Case(host=host, backend=backend, moments=moments) for moments in KILLS)


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Try every case, or the chosen ones, against one uninterrupted run of each host."""
    whole: dict[str, list[dict[str, Any]]] = {}
    for number, case in enumerate(choice.of(cases())):
        train_under(case.host)  # before the first fork, so that no rank has to import it
        if case.host not in whole:
            whole[case.host] = launch(case, (), folder / f"whole-{case.host}")
        yield _outcome(case, whole[case.host], folder / str(number))


def _outcome(case: Case, whole: list[dict[str, Any]], folder: Path) -> Outcome:
    kills, problems, resumed = KILLS[case.moments], list[str](), 0
    try:
        told = launch(case, kills, folder)
    except RuntimeError as error:
        problems = [str(error)]
    else:
        problems = [*_differences(told, whole, folder, kills)]
        resumed = told[0]["began"]
    killed = len([*folder.glob("killed-*")])
    shutil.rmtree(folder)
    return Outcome(
        sweep=f"restarts in place, {case.host}, {case.backend}, {RANKS} ranks",
        point=case.moments,
        kills=killed,
        resumed=resumed,
        problem="; ".join(problems),
    )


def _differences(
    told: list[dict[str, Any]], whole: list[dict[str, Any]], folder: Path, kills: Sequence[Kill]
) -> Iterator[str]:
    for rank, (found, expected) in enumerate(zip(told, whole, strict=True)):
        if (found["step"], found["weights"]) != (expected["step"], expected["weights"]):
            yield f"rank {rank} ended as {found} instead of {expected}"
        if found["attempt"] != len(kills):
            yield f"rank {rank} ended in attempt {found['attempt']}, though {len(kills)} were to be killed"
    for attempt, kill in enumerate(kills):
        for rank in kill.ranks[:1]:
            if not list(folder.glob(f"killed-{attempt}-*")):
                yield f"attempt {attempt} was never at {kill}, rank {rank}"
    storage = LocalStorage(folder / "run")
    yield from (f"{name} was left behind" for name in Catalog(storage).torn())
    for info in Catalog(storage).committed():
        yield from (f"{info.name} is damaged: {failure}" for failure in verify(storage, info.name))
