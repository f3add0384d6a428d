"""Run the phases of one framework in turn, and kill the second during a save."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import final

from ckpt_core.commit import Catalog
from ckpt_core.names import is_incomplete
from ckpt_core.storage import LocalStorage
from examples.demo.evidence import KILL_FILE, Kill, read_lines
from examples.demo.plan import KILLED, PHASES, RESHARDED, Plan, Task
from examples.demo.ranks import Ranks, RanksFailedError

POLL_SECONDS = 0.05
PHASE_SECONDS = 240.0
RUNNING = STARTING, TRAINING = "starting", "training"

Progress = Callable[[str, int, str], None]


@final
class Driver:
    """Runs all phases of one framework.

    Args:
        framework: one of `plan.FRAMEWORKS`.
        plan: the steps.
        folder: where everything goes; files of an earlier demo are removed first.
        progress: called often, with the phase, the last step done, and a note.
    """

    def __init__(self, framework: str, plan: Plan, folder: Path, progress: Progress) -> None:
        self._framework = framework
        self._plan = plan
        self._folder = folder
        self._progress = progress
        self._root = folder / "checkpoints"

    def run(self) -> None:
        """Run every phase.

        Raises:
            RanksFailedError: a process failed, or did not end in time.
        """
        # Only files of an earlier demo: the folder is the user's.
        for left in (*(self._folder / phase for phase in PHASES), self._root):
            shutil.rmtree(left, ignore_errors=True)
        for phase in PHASES:
            task = self.task(phase)
            if phase == KILLED:
                kill = self._run_and_kill(task)
                (self._folder / KILL_FILE).write_text(json.dumps(asdict(kill)))
            else:
                self._run_to_the_end(task)

    def task(self, phase: str) -> Task:
        """Return the task of the ranks of a phase."""
        task = Task(
            phase=phase,
            folder=str(self._folder / phase),
            root=str(self._root),
            steps=self._plan.steps,
            plan_steps=self._plan.steps,
        )
        if phase == KILLED:
            return replace(task, held_step=self._plan.torn_step)
        if phase == RESHARDED:
            return replace(task, steps=self._plan.steps + self._plan.save_every)
        return task

    def _run_to_the_end(self, task: Task) -> None:
        world_size = 1 if task.phase == RESHARDED else self._plan.ranks
        with Ranks(self._framework, task, world_size) as ranks:
            deadline = time.monotonic() + PHASE_SECONDS
            while ranks.running():
                self._watch(task, world_size, deadline)
        self._progress(task.phase, last_step(task, world_size), "done")

    def _run_and_kill(self, task: Task) -> Kill:
        world_size = self._plan.ranks
        with Ranks(self._framework, task, world_size) as ranks:
            deadline = time.monotonic() + PHASE_SECONDS
            while not self._ripe(task):
                if not ranks.running():
                    raise RanksFailedError(f"{self._framework}: the run ended before it could be killed")
                self._watch(task, world_size, deadline)
            killed_at = time.time()
            codes = ranks.kill()
        if set(codes) != {-signal.SIGKILL}:
            raise RanksFailedError(f"{self._framework}: not every rank died of the kill: exit codes {codes}")
        kill = look_around(self._root, killed_at)
        note = f"SIGKILL with the save of step {task.held_step} in flight"
        self._progress(task.phase, last_step(task, world_size), note)
        return kill

    def _ripe(self, task: Task) -> bool:
        """Return whether every rank holds its write and training has continued meanwhile."""
        held = all(task.file("held", rank).exists() for rank in range(self._plan.ranks))
        return held and last_step(task, self._plan.ranks) >= self._plan.kill_step

    def _watch(self, task: Task, world_size: int, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise RanksFailedError(
                f"{self._framework}: {task.phase} is at step {last_step(task, world_size)} after "
                f"{PHASE_SECONDS:g} s; see the logs in {task.folder}"
            )
        step = last_step(task, world_size)
        self._progress(task.phase, step, TRAINING if step else STARTING)
        time.sleep(POLL_SECONDS)


def last_step(task: Task, world_size: int) -> int:
    """Return the last step that every rank has recorded."""
    return min(_last_step(task.file("losses", rank)) for rank in range(world_size))


def _last_step(path: Path) -> int:
    lines = read_lines(path)
    return int(lines[-1]["step"]) if lines else 0


def look_around(root: Path, killed_at: float) -> Kill:
    """Return the state of a checkpoint root after a crash."""
    torn = tuple(sorted(child.name for child in root.iterdir() if is_incomplete(child.name)))
    files = [file for name in torn for file in (root / name).rglob("*") if file.is_file()]
    committed = Catalog(LocalStorage(root)).committed()
    return Kill(
        time=killed_at,
        torn=torn,
        torn_bytes=sum(file.stat().st_size for file in files),
        committed=tuple(sorted(info.step for info in committed)),
    )
