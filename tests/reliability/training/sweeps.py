"""Which trainings are killed, and how often."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, final

Adapter = Literal["Lightning", "Accelerate"]
Victims = Literal["the process", "both ranks", "one of two ranks"]

ALL_KILLS = 1000
EVERY, KEPT = 3, 2
"""Steps from one save to the next, and how many checkpoints stay."""
STEPS = 20 * EVERY


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
