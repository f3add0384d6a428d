"""One life of a training job: forked from a warm process, killed at its moment, judged by what it told."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from tests.reliability import forks
from tests.reliability.training.loops import Life, Witness, with_accelerate, with_lightning
from tests.reliability.training.sweeps import Sweep

_LOOPS = {"Lightning": with_lightning, "Accelerate": with_accelerate}
PATIENCE_SECONDS = 60.0
"""A process that has not ended by then hangs: every wait of ours has a shorter deadline."""
_COLLECTIVE_SECONDS = 30


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Death:
    """How a life is to end, unless it has ended before.

    Attributes:
        moment_seconds: after the start, when the victims are killed.
        victims: their ranks.
        patience_seconds: after that, when the others are killed, too.
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
        told: what its ranks told.
        problems: what was wrong with how it ended.
    """

    kills: int
    told: list[dict[str, Any]]
    problems: list[str] = field(default_factory=list[str])

    def facts(self, key: str) -> list[Any]:
        """The values under that key; of each rank, oldest first."""
        return [line[key] for line in self.told if key in line]


def live(sweep: Sweep, life: Life, death: Death | None = None, *, output: Path) -> Ended:
    """Start a job, let it die if it is to, and wait until all of it has ended.

    Args:
        sweep: what trains, on how many ranks.
        life: of rank 0; that of the others differs in the rank alone.
        death: None to let it live.
        output: the ranks print to files whose names begin so.
    """

    def be(rank: int, tell: forks.Tell) -> None:
        _settle(life.world, Path(f"{output}-{rank}.txt"), life.root.parent / "tmp")
        witness = Witness(own := replace(life, rank=rank), tell)
        _LOOPS[sweep.adapter](own, witness)
        if dist.is_initialized():
            dist.destroy_process_group()

    with forks.ranks(sweep.world, be, join=False) as ranks:
        patience = PATIENCE_SECONDS
        if death is not None:
            forks.wait(ranks, death.moment_seconds)
            for number in death.victims:
                ranks[number].kill()
            patience = death.patience_seconds
        left = forks.gather(ranks, patience)
    told = [line for rank in ranks for line in rank.told]
    signals = [-code for rank in ranks if (code := rank.exit_code or 0) < 0]
    hanging = [f"rank {rank} hangs" for rank in left if patience == PATIENCE_SECONDS]
    return Ended(kills=len(signals), told=told, problems=hanging + _wrong(signals, told, sweep.world))


def _wrong(signals: list[int], told: list[dict[str, Any]], world: int) -> list[str]:
    # Torch 2.13 on gloo aborts about one multi-rank process in a few hundred: a death like any other.
    expected = {signal.SIGKILL, signal.SIGABRT} if world > 1 else {signal.SIGKILL}
    errors = [line["error"] for line in told if "error" in line]
    # Where a rank was killed, the others have every reason to fail.
    return [f"died of signal {each}" for each in signals if each not in expected] + errors * (not signals)


def _settle(world: int, output: Path, temporary: Path) -> None:
    printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    tempfile.tempdir = str(temporary)
    if world > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=_COLLECTIVE_SECONDS))
