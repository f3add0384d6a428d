"""Fork the processes of one phase, so that torch is imported once; watch them through their files."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
from collections.abc import Iterable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Self

from examples.demo.plan import TASK_VARIABLE, Task


class RanksFailedError(Exception):
    """A rank failed; the message ends with its last output."""


def import_once(frameworks: Iterable[str]) -> None:
    """Have the server that forks all ranks import what they train with, and what an optimizer imports."""
    modules = [f"examples.demo.train_{framework}" for framework in frameworks]
    multiprocessing.set_forkserver_preload([*modules, "torch._dynamo"])


class Ranks:
    """Real processes with the variables that torchrun sets, and gloo on loopback between them.

    Leaving the context kills all of them.
    """

    def __init__(self, framework: str, task: Task, world_size: int) -> None:
        self._folder = Path(task.folder)
        self._framework = framework
        self._environment = {
            TASK_VARIABLE: task.to_json(),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._world_size = world_size
        self._processes: list[ForkServerProcess] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self._world_size):
            environment = {**self._environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = multiprocessing.get_context("forkserver").Process(
                target=_train, args=(self._framework, environment, str(self.log(rank)))
            )
            process.start()
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"

    def running(self) -> bool:
        """Return whether any rank still runs.

        Raises:
            RanksFailedError: a rank has failed.
        """
        codes = [process.exitcode for process in self._processes]
        for rank, code in enumerate(codes):
            if code:
                last_words = "\n".join(self.log(rank).read_text(errors="replace").splitlines()[-15:])
                raise RanksFailedError(f"rank {rank} ended with code {code}; {self.log(rank)}:\n{last_words}")
        return None in codes

    def kill(self) -> list[int | None]:
        """Send SIGKILL to every process; return the exit codes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        return [process.exitcode for process in self._processes]


def _train(framework: str, environment: dict[str, str], log: str) -> None:
    """What a rank does."""
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.environ.update(environment)
    importlib.import_module(f"examples.demo.train_{framework}").main()
    importlib.import_module("examples.demo.record").leave()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
