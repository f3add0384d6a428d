"""Killed at every system call: one rank, another, or all, on a local disk; then what a fresh job finds."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from ckpt_core.names import step_name
from ckpt_core.testing import Fault
from tests.reliability import forks
from tests.reliability.disk.findings import Expected, aftermath, go_on, ids_of, inspect, survey
from tests.reliability.disk.traps import NO_EXCHANGE, Call, Recorder, Trap, When
from tests.reliability.disk.victims import (
    DEADLINE_SECONDS,
    LAST_NAME,
    SOUND,
    SWEPT,
    Rank,
    copy_of,
    prepare,
    train,
)
from tests.reliability.outcome import Choice, Outcome, tried

_JOBS: Final = {1: 2, 2: 8, 4: 8}
"""World size -> cases at once: survivors mostly wait for a deadline."""

_SMALL_SAMPLE: Final = 10
"""Of fewer points none is on 4 ranks: they run the code of 2, and a rehearsal costs more than 10 kills."""

_ATTEMPTS: Final = 3
_PATIENCE_SECONDS: Final = 60.0
_TOGETHER_EVERY: Final = 10
_LIMIT_SECONDS: Final = 60.0


Job = Callable[[Rank, forks.Tell], None]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Kill:
    """One point of the sweep.

    Attributes:
        world_size: how many ranks.
        rank: who is killed.
        everyone: whether all others are killed at that moment, too.
        number: which of that rank's calls.
        when: before the call, or after it.
        call: what it was in the rehearsal.
        together: whether as many ranks resume as were killed, not one alone.
        exchanges: whether the filesystem can exchange two names in one step.
    """

    world_size: int
    rank: int
    everyone: bool
    number: int
    when: When
    call: Call
    together: bool = False
    exchanges: bool = True

    def __str__(self) -> str:
        return f"{self.sweep}: {self.point}"

    @property
    def sweep(self) -> str:
        """The row of the table."""
        if self.world_size == 1:
            disk = "local disk" if self.exchanges else "disk without exchange of names"
            return f"{disk}, 1 rank: {self.call.deed}"
        victim = "all" if self.everyone else "the coordinator" if self.rank == 0 else "one worker"
        return f"local disk, {self.world_size} ranks, {victim} killed: {self.call.deed}"

    @property
    def faults(self) -> list[Fault]:
        """What the filesystem cannot do."""
        return [] if self.exchanges else [NO_EXCHANGE]

    @property
    def point(self) -> str:
        """Where in that row."""
        return f"rank {self.rank}, {self.when} {self.number}, {self.call.method} {self.call.key}"


@final
class Ground:
    """Prepared roots, one for each world size, and what a job does to a copy of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._damaged: dict[int, list[str]] = {}

    def template(self, world_size: int) -> Path:
        """A prepared root; made when first asked for.

        A second one is used up by a job that does all that a case does: so every module is there before the
        first fork of a case.
        """
        root = self.folder / f"template-{world_size}"
        if not root.exists():

            def act(place: Rank, tell: forks.Tell) -> None:
                before = set(sys.modules)
                prepare(root, place)
                warm = self.folder / f"warm-{world_size}"
                prepare(warm, place)
                train(warm, place, lambda _said: None)
                tell(sorted(set(sys.modules) - before))

            for child in self.run(world_size, act):
                forks.adopt(child.told[-1])
            self._damaged[world_size] = [forks.answer(lambda: ids_of(root))[step_name(SWEPT)]]
        return root

    def damaged(self, world_size: int) -> list[str]:
        """Ids of the saves whose checkpoints were damaged on purpose."""
        self.template(world_size)
        return self._damaged[world_size]

    def run(self, world_size: int, act: Job) -> list[forks.Child]:
        """Run a job to its end.

        Raises:
            RuntimeError: a rank failed.
        """
        with start(world_size, act) as children:
            forks.gather(children, _LIMIT_SECONDS)
        for rank, child in enumerate(children):
            if child.status != 0:
                raise RuntimeError(f"rank {rank} of {world_size} ended with {child.status}: {child.told}")
        return children

    def rehearse(self, world_size: int, faults: Sequence[Fault] = ()) -> list[list[Call]]:
        """Every call of every rank of a job that nobody kills."""
        root = copy_of(self.template(world_size), self.folder / f"rehearsal-{world_size}")

        def act(place: Rank, tell: forks.Tell) -> None:
            calls = Recorder(root, faults).record(lambda: train(root, place, lambda _said: None))
            tell([asdict(call) for call in calls])

        children = self.run(world_size, act)
        shutil.rmtree(root)
        return [[Call(**call) for call in child.told[-1]] for child in children]

    def kills(self, world_size: int) -> list[Kill]:
        """Every point there is; with one rank also where names cannot be exchanged in one step."""
        found = [
            Kill(world_size=world_size, rank=rank, everyone=everyone, number=number, when=when, call=call)
            for rank, calls in enumerate(self.rehearse(world_size))
            for everyone in ((False, True) if world_size > 1 else (True,))
            for number, call in enumerate(calls)
            for when in call.moments
        ]
        return found + self._kills_without_exchange() if world_size == 1 else found

    def _kills_without_exchange(self) -> list[Kill]:
        (calls,) = self.rehearse(1, [NO_EXCHANGE])
        return [
            Kill(world_size=1, rank=0, everyone=True, number=number, when=when, call=call, exchanges=False)
            for number, call in enumerate(calls)
            for when in call.moments
            if call.deed == "replace"
        ]


def start(world_size: int, act: Job) -> AbstractContextManager[list[forks.Child]]:
    """Start the ranks of a job; they say nothing of peers that die."""

    def be(rank: int, tell: forks.Tell) -> None:
        if world_size > 1:
            # Gloo and the store say a lot of them; what Python says goes another way.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        act(Rank(number=rank, of=world_size), tell)

    return forks.ranks(world_size, be)


def sweep(
    choice: Choice,
    ground: Ground,
    case: Callable[[Ground, Kill, int], list[Outcome]],
    *,
    sizes: Iterable[int],
    jobs: Mapping[int, int],
    wanted: Callable[[Kill], bool] = lambda _kill: True,
) -> Iterator[Outcome]:
    """Try the chosen points of each world size, in any order: survivors of some wait while others work."""
    for world_size in sizes:
        points = choice.of(filter(wanted, ground.kills(world_size)))
        tasks = (partial(case, ground, kill, index) for index, kill in enumerate(points))
        yield from tried(tasks, jobs[world_size])


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point, or at the chosen points of each world size."""
    small = choice.count is not None and choice.count < _SMALL_SAMPLE
    yield from sweep(choice, Ground(folder), _case, sizes=(1, 2) if small else (1, 2, 4), jobs=_JOBS)


def _case(ground: Ground, kill: Kill, index: int) -> list[Outcome]:
    """Kill there, and look at what is left."""
    kill = replace(kill, together=kill.world_size > 1 and index % _TOGETHER_EVERY == 0)
    for attempt in range(_ATTEMPTS):
        root = copy_of(
            ground.template(kill.world_size), ground.folder / f"{kill.world_size}-{index}-{attempt}"
        )
        children, late = _killed(kill, root)
        if children[kill.rank].killed:
            break
        # On a busy machine a rank may miss the short deadline before the victim comes to its end.
        shutil.rmtree(root)
    expected = expectation(kill, children, ground.damaged(kill.world_size))
    resumed, broken = _look(ground, kill, root, expected)
    shutil.rmtree(root, ignore_errors=True)
    return [
        Outcome(
            sweep=kill.sweep,
            point=kill.point,
            kills=sum(child.killed for child in children),
            acknowledged=expected.acknowledged,
            resumed=resumed,
            problem=conduct(kill, children, late) or broken,
        )
    ]


def _killed(kill: Kill, root: Path) -> tuple[list[forks.Child], list[int]]:
    """The ranks of a job that has met its end, and which of them had to be stopped."""
    # Survivors of one rank must not wait long; if none survives, nobody need ever be late.
    deadline = _PATIENCE_SECONDS if kill.everyone else DEADLINE_SECONDS

    def act(place: Rank, tell: forks.Tell) -> None:
        job = partial(train, root, place, tell, deadline_seconds=deadline)
        if place.number == kill.rank:
            trap = Trap(kill.number, kill.when, everyone=kill.everyone, witness=kill.faults)
            trap.spring(root, job)
        else:
            job()

    with start(kill.world_size, act) as children:
        return children, forks.gather(children, _LIMIT_SECONDS)


def expectation(kill: Kill, children: Sequence[forks.Child], damaged: Sequence[str]) -> Expected:
    """What the ranks were told to be committed."""
    told = [message for child in children for message in child.told if isinstance(message, dict)]
    committed = [message for message in told if "committed" in message]
    replaced = [message["committed"] for message in committed if message["name"] == LAST_NAME]
    return Expected(
        acknowledged=max([SOUND, *(message["committed"] for message in committed)]),
        replaced=max([SOUND, *replaced]),
        damaged=frozenset(damaged),
        aside=not kill.exchanges,
    )


def _look(ground: Ground, kill: Kill, root: Path, expected: Expected) -> tuple[int | None, str]:
    """The step that a fresh job resumes, and which promise was broken, "" if none.

    This process is a fresh one: of one rank, it is the job.
    """
    try:
        if not kill.together:
            return inspect(root, expected), ""
        newest = survey(root, expected)
        ranks = ground.run(kill.world_size, lambda place, tell: tell(go_on(root, place, expected)))
        resumed = {rank.told[-1] for rank in ranks}
        aftermath(root, expected, newest=newest, resumed=min(resumed))
    except Exception:
        return None, traceback.format_exc()
    return min(resumed), "" if len(resumed) == 1 else f"ranks resumed different steps: {resumed}"


def conduct(kill: Kill, children: Sequence[forks.Child], late: Sequence[int]) -> str:
    """What the ranks did that they should not have done, "" if nothing."""
    if late:
        return f"ranks {list(late)} still ran after {_LIMIT_SECONDS:g} s: {[c.told for c in children]}"
    if not children[kill.rank].killed:
        return f"rank {kill.rank} was not killed: {[child.told for child in children]}"
    survivors = [child for child in children if not child.killed]
    # Where all are killed, some may have come to their end just before.
    outlived = [child for child in survivors if "ended" not in _last(child)] if kill.everyone else []
    if outlived or (not kill.everyone and len(survivors) != kill.world_size - 1):
        return f"{len(survivors)} of {kill.world_size} ranks outlived the kill"
    failed = [child.told for child in survivors if not _ended_well(child)]
    return f"survivors did not end as documented: {failed}" if failed else ""


def _ended_well(child: forks.Child) -> bool:
    """Whether a rank that lived on was told that its save had failed, or had nothing more to do."""
    return child.status == 0 and bool({"failed", "ended"} & set(_last(child)))


def _last(child: forks.Child) -> dict[str, Any]:
    return child.told[-1] if child.told else {}
