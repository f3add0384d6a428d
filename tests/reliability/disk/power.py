"""The power fails at every system call; then what a fresh job finds of what had reached the disk."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from benchmarks.crashing import forks
from benchmarks.crashing.findings import Expected, inspect
from benchmarks.crashing.local import Ground, Kill, expectation, kills, kills_without_exchange, warm_up
from benchmarks.crashing.outcome import Outcome
from benchmarks.crashing.traps import Trap
from benchmarks.crashing.victims import Rank, copy_of, train
from ckpt_core.testing import Fate, PowerLog, power_cut

WORLD_SIZES: Final = (1, 2)
_JOBS: Final = 2
_LIMIT_SECONDS: Final = 60.0
_FATES: Final[Sequence[Fate]] = ("strict", "journal", "random", "random")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """One end of a job by a power cut.

    Attributes:
        kill: where.
        index: of the case.
        seed: of what the cut takes.
    """

    kill: Kill
    index: int
    seed: int


def case(ground: Ground, cut: Cut) -> list[dict[str, Any]]:
    """Cut the power there, and look at several things that may be left; the fields of an `Outcome` each."""
    kill = cut.kill
    place = ground.folder / f"power-{kill.world_size}-{cut.index}"
    root = copy_of(ground.template(kill.world_size), place / "root")
    log = place / "log"
    PowerLog.begin(root, log)

    def act(rank: Rank, tell: forks.Tell) -> None:
        nth = kill.number if rank.number == kill.rank else None
        trap = Trap(nth, kill.when, everyone=True, witness=[PowerLog(root, log).fault, *kill.faults])
        trap.spring(root, partial(train, root, rank, tell))

    children = ground.start(kill.world_size, act)
    late = forks.gather(children, _LIMIT_SECONDS)
    expected = expectation(kill, children, ground.damaged(kill.world_size))
    problem = "" if not late and all(child.killed for child in children) else _survived(children)
    found = []
    for number, fate in enumerate(_FATES):
        left = place / f"left-{number}"
        power_cut(log, root, left, fate=fate, seed=cut.seed + number)
        resumed, broken = _look(left, expected)
        found.append(
            {
                "sweep": f"power cut, {_disk(kill)}: {kill.call.deed}",
                "point": f"{kill.point}; {fate} {cut.seed + number}",
                # One cut, of which several things may be left.
                "kills": len(children) if number == 0 else 0,
                "acknowledged": expected.acknowledged,
                "resumed": resumed,
                "problem": problem or broken,
            }
        )
    shutil.rmtree(place)
    return found


def run(
    *, seed: int, folder: Path, count: int | None, sizes: Sequence[int] = WORLD_SIZES
) -> Iterator[Outcome]:
    """Cut the power at every point, or at `count` points of each world size, chosen by the seed."""
    chance = random.Random(seed)
    server = forks.StoreServer()
    try:
        ground = Ground(folder, server)
        for world_size in sizes:
            warm_up(ground, world_size)
            points = [kill for kill in kills(ground, world_size) if kill.everyone]
            if world_size == 1:
                points += kills_without_exchange(ground)
            points = chance.sample(points, len(points) if count is None else min(count, len(points)))
            cuts = (
                Cut(kill=kill, index=index, seed=chance.randrange(1 << 30))
                for index, kill in enumerate(points)
            )
            for found in forks.spread((partial(case, ground, cut) for cut in cuts), _JOBS):
                yield from (Outcome(**fields) for fields in found)
    finally:
        server.close()


def _look(root: Path, expected: Expected) -> tuple[int | None, str]:
    """The step that a fresh job resumes, and which promise was broken, "" if none."""
    try:
        return forks.answer(partial(inspect, root, expected)), ""
    except RuntimeError as error:
        return None, str(error)


def _survived(children: Sequence[forks.Child]) -> str:
    return f"not all ranks were killed: {[(child.status, child.told) for child in children]}"


def _disk(kill: Kill) -> str:
    ranks = "1 rank" if kill.world_size == 1 else f"{kill.world_size} ranks"
    return ranks if kill.exchanges else f"{ranks}, disk without exchange of names"
