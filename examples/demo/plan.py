"""Define the steps of the demo and the task of one rank in one phase."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

FRAMEWORKS = ("lightning", "accelerate", "plain")
TASK_VARIABLE = "DEMO_TASK"

UNINTERRUPTED, KILLED, RESUMED, RESHARDED = PHASES = ("uninterrupted", "killed", "resumed", "resharded")


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The steps of a run, all derived from their number: a multiple of 6, at least 12.

    The kill and the resume both fall into the middle of the second epoch, where frameworks err.
    """

    steps: int = 24
    ranks: int = 2

    def __post_init__(self) -> None:
        if self.steps < 12 or self.steps % 6:
            raise ValueError(f"the number of steps must be a multiple of 6 and at least 12, not {self.steps}")

    @property
    def save_every(self) -> int:
        return self.steps // 6

    @property
    def steps_per_epoch(self) -> int:
        return self.steps * 5 // 12

    @property
    def resume_step(self) -> int:
        """Return the last step committed before the kill."""
        return 3 * self.save_every

    @property
    def torn_step(self) -> int:
        """Return the step whose save is in flight at the kill."""
        return 4 * self.save_every

    @property
    def kill_step(self) -> int:
        """Return the last step before the kill, trained while the save was in flight."""
        return self.torn_step + max(1, self.save_every // 2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The task of the processes of one phase.

    Attributes:
        phase: which of `PHASES`.
        folder: where its records go.
        root: where the checkpoints go.
        steps: train until this step.
        plan_steps: the whole run's steps, on which schedule and epochs depend.
        held_step: the save of this step is held in the middle of its write, until the kill.
    """

    phase: str
    folder: str
    root: str
    steps: int
    plan_steps: int
    held_step: int | None = None

    @property
    def plan(self) -> Plan:
        return Plan(steps=self.plan_steps)

    @property
    def saves(self) -> bool:
        """Return whether this phase saves at all; the reference does not."""
        return self.phase != UNINTERRUPTED

    @property
    def resumes(self) -> bool:
        return self.phase in {RESUMED, RESHARDED}

    def file(self, kind: str, rank: int) -> Path:
        """Return the path of a record: `losses-0.jsonl`, `telemetry-0.jsonl`, `held-0`."""
        return Path(self.folder) / f"{kind}-{rank}{'' if kind == 'held' else '.jsonl'}"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls) -> Task:
        return cls(**json.loads(os.environ[TASK_VARIABLE]))
