"""Kills at random moments of real trainings: what was acknowledged is resumed from, exactly, to the end.

A training of either adapter saves every few steps in the background. At a random moment its process, both
of its ranks or one of them get SIGKILL; a rank that is left alone ends by itself, or is killed a little
later, as launchers do. The job is started again, and again, until it is complete. Every step that any of
these lives made, and what each began with, must be what one uninterrupted training had there, bit for bit.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, final

from benchmarks.crashing.outcome import Outcome

Adapter = Literal["Lightning", "Accelerate"]
Victims = Literal["the process", "both ranks", "one of two ranks"]

ALL_KILLS = 1000
EVERY, KEPT = 3, 2
"""Steps from one save to the next, and how many checkpoints stay."""
STEPS = 20 * EVERY
_CHECKOUT = Path(__file__).parents[2]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """One row of the table: what trains, and who is killed.

    Attributes:
        adapter: which one.
        victims: who gets SIGKILL first.
        share: how many of a thousand kills are of this kind.
    """

    adapter: Adapter
    victims: Victims
    share: int

    @property
    def world(self) -> int:
        """Processes of the job."""
        return 1 if self.victims == "the process" else 2

    def kills_of(self, total: int) -> int:
        """How many of so many kills are of this kind; at least one."""
        return math.ceil(total * self.share / ALL_KILLS)

    def __str__(self) -> str:
        return f"training with {self.adapter}, {self.victims} killed"


SWEEPS = (
    Sweep(adapter="Lightning", victims="the process", share=350),
    Sweep(adapter="Lightning", victims="both ranks", share=100),
    Sweep(adapter="Lightning", victims="one of two ranks", share=50),
    Sweep(adapter="Accelerate", victims="the process", share=350),
    Sweep(adapter="Accelerate", victims="both ranks", share=100),
    Sweep(adapter="Accelerate", victims="one of two ranks", share=50),
)


def run(*, seed: int, folder: Path, count: int | None) -> Iterator[Outcome]:
    """Kill trainings `count` times, each kind by its share but at least once; a thousand times if None.

    Raises:
        RuntimeError: the experiment itself could not be done; the message says what it printed.
    """
    kills = ALL_KILLS if count is None else count
    yield from nursed(SWEEPS, seed=seed, folder=folder, kills=kills)


def nursed(sweeps: tuple[Sweep, ...], *, seed: int, folder: Path, kills: int) -> Iterator[Outcome]:
    """Run sweeps in a fresh interpreter: whoever forks trainings must not have trained itself."""
    folder.mkdir(parents=True, exist_ok=True)
    task = {
        "seed": seed,
        "kills": kills,
        "folder": str(folder.absolute()),
        "sweeps": [asdict(each) for each in sweeps],
    }
    command = [sys.executable, "-m", "benchmarks.crashing.training_campaigns", json.dumps(task)]
    with (
        open(folder / "errors.txt", "w+", encoding="utf-8") as errors,
        subprocess.Popen(command, cwd=_CHECKOUT, stdout=subprocess.PIPE, stderr=errors, text=True) as nursery,
    ):
        for line in nursery.stdout or ():
            yield Outcome(**json.loads(line))
        if nursery.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"the trainings could not be run:\n{errors.read()[-4000:]}")
