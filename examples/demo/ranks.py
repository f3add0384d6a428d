"""Start the processes of one phase as torchrun does, and kill them together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

from examples.demo.plan import TASK_VARIABLE, Task

REPOSITORY = Path(__file__).parents[2]


class RanksFailedError(Exception):
    """A rank failed; the message ends with its last output."""


class Ranks:
    """Real processes with gloo on loopback, each in a process group of its own.

    Leaving the context kills all of them.
    """

    def __init__(self, framework: str, task: Task, world_size: int) -> None:
        self._folder = Path(task.folder)
        self._command = [sys.executable, "-m", f"examples.demo.train_{framework}"]
        self._environment = {
            **os.environ,
            TASK_VARIABLE: task.to_json(),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONUNBUFFERED": "1",
        }
        self._world_size = world_size
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        for rank in range(self._world_size):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with self.log(rank).open("wb") as log:
                process = subprocess.Popen(
                    self._command,
                    env=self._environment | place,
                    cwd=REPOSITORY,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
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
        codes = [process.poll() for process in self._processes]
        for rank, code in enumerate(codes):
            if code:
                last_words = "\n".join(self.log(rank).read_text(errors="replace").splitlines()[-15:])
                raise RanksFailedError(f"rank {rank} ended with code {code}; {self.log(rank)}:\n{last_words}")
        return None in codes

    def kill(self) -> list[int]:
        """Send SIGKILL to every process group; return the exit codes."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        return [process.wait() for process in self._processes]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
