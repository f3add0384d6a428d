"""The power fails at every system call; then what a fresh job finds of what had reached the disk."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tests.reliability import forks
from tests.reliability.disk.findings import inspect
from tests.reliability.disk.kills import Ground, Kill, expectation, start, sweep
from tests.reliability.disk.traps import Trap
from tests.reliability.disk.victims import Rank, copy_of, train
from tests.reliability.outcome import Choice, Outcome, seen
from tests.support.power import Fate, PowerLog, power_cut

FATES: Final[Sequence[Fate]] = ("strict", "journal", "random", "random")
_JOBS: Final = {1: 2, 2: 2}
_LIMIT_SECONDS: Final = 60.0


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Cut the power at every point, or at the chosen points of each world size."""
    case = partial(_case, seed=choice.seed)
    yield from sweep(choice, Ground(folder), case, sizes=_JOBS, jobs=_JOBS, wanted=lambda kill: kill.everyone)


def _case(ground: Ground, kill: Kill, index: int, *, seed: int) -> list[Outcome]:
    """Cut the power there, and look at several things that may be left."""
    place = ground.folder / f"power-{kill.world_size}-{index}"
    root = copy_of(ground.template(kill.world_size), place / "root")
    log = place / "log"
    PowerLog.begin(root, log)

    def act(rank: Rank, tell: forks.Tell) -> None:
        nth = kill.number if rank.number == kill.rank else None
        trap = Trap(nth, kill.when, everyone=True, witness=[PowerLog(root, log).fault, *kill.faults])
        trap.spring(root, partial(train, root, rank, tell))

    with start(kill.world_size, act) as children:
        late = forks.gather(children, _LIMIT_SECONDS)
    expected = expectation(kill, children, ground.damaged(kill.world_size))
    survived = late or not all(child.killed for child in children)
    problem = f"not all ranks were killed: {[(c.status, c.told) for c in children]}" if survived else ""
    drawn = random.Random(f"{seed} {kill}").randrange(1 << 30)
    found = []
    for number, fate in enumerate(FATES):
        left = place / f"left-{number}"
        power_cut(log, root, left, fate=fate, seed=drawn + number)
        resumed, broken = seen(partial(inspect, left, expected))
        found.append(
            Outcome(
                sweep=f"power cut, {_disk(kill)}: {kill.call.deed}",
                point=f"{kill.point}; {fate} {drawn + number}",
                # One cut, of which several things may be left.
                kills=len(children) if number == 0 else 0,
                acknowledged=expected.acknowledged,
                resumed=resumed,
                problem=problem or broken,
            )
        )
    shutil.rmtree(place)
    return found


def _disk(kill: Kill) -> str:
    ranks = "1 rank" if kill.world_size == 1 else f"{kill.world_size} ranks"
    return ranks if kill.exchanges else f"{ranks}, disk without exchange of names"
