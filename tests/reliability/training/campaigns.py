"""Kills at random moments of real trainings: what was acknowledged is resumed from, exactly, to the end.

A training of either adapter saves every few steps in the background. At a random moment its process, both
of its ranks or one of them get SIGKILL; a rank that is left alone ends by itself, or is killed a little
later, as launchers do. The job is started again, and again, until it is complete. Every step that any of
these lives made, and what each began with, must be what one uninterrupted training had there, bit for bit.
"""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import final

from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage
from tests.kit.own_files import beside_own
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.training.lives import PATIENCE_SECONDS, Death, Ended, live
from tests.reliability.training.loops import Life
from tests.reliability.training.reference import Reference
from tests.reliability.training.sweeps import ALL_KILLS, EVERY, KEPT, STEPS, SWEEPS, Sweep

_HORIZON = 0.5
"""Kills fall into this part of the time that an uninterrupted training takes, counted from each start."""
_LEFT_ALONE = 0.2
"""The part of the ranks whose peer was killed that are not killed soon after."""
_FOREIGN = {"notes.txt": b"somebody's", "best/weights.bin": b"somebody's, too"}


@final
class Campaign:
    """One training from its first step to its last."""

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        self._sweep = sweep
        self._root = folder / "run"
        self._temporary = folder / "tmp"
        self._acknowledged = 0
        self._pending: list[Outcome] = []
        self._lives = 0
        self._temporary.mkdir(parents=True)
        for name, content in _FOREIGN.items():
            path = self._root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def uninterrupted(self) -> Reference:
        """Train to the end at once.

        Raises:
            RuntimeError: something was wrong although nobody was killed.
        """
        began = time.monotonic()
        ended = self._live(None)
        seconds = time.monotonic() - began
        if problems := ended.problems + self._left(pruned=True):
            raise RuntimeError(f"{self._sweep}, without a kill: {'; '.join(problems)}")
        return Reference(ended.told, seconds=seconds, steps=STEPS)

    def killed(self, kills: int, chance: random.Random, reference: Reference) -> Iterator[Outcome]:
        """Train to the end, which takes as many lives as it takes, but be killed no more often than that."""
        ended: Ended | None = None
        while ended is None or ended.kills:
            death = self._death(chance, _HORIZON * reference.seconds) if kills > 0 else None
            ended = self._live(death)
            yield from self._judged(ended, reference)
            if ended.kills:
                kills -= 1
                self._pending.append(self._kill(ended, death))

    def _death(self, chance: random.Random, horizon_seconds: float) -> Death:
        moment = chance.uniform(0.0, horizon_seconds)
        if self._sweep.victims != "one of two ranks":
            return Death(moment_seconds=moment, victims=range(self._sweep.world))
        # Launchers end the others soon; a few have to end by themselves, which takes some deadlines.
        patience = PATIENCE_SECONDS if chance.random() < _LEFT_ALONE else chance.uniform(0.0, 3.0)
        return Death(moment_seconds=moment, victims=[chance.randrange(2)], patience_seconds=patience)

    def _live(self, death: Death | None) -> Ended:
        self._lives += 1
        for left in self._temporary.iterdir():
            os.utime(left, (0, 0))  # the next life removes what is not new, as if it began a minute later
        life = Life(root=self._root, steps=STEPS, rank=0, world=self._sweep.world)
        return live(self._sweep, life, death, output=self._root.parent / f"life-{self._lives}")

    def _kill(self, ended: Ended, death: Death | None) -> Outcome:
        steps = ended.facts("step")
        where = f"at step {max(steps)}" if steps else "before its first step"
        when = "by itself" if death is None else f"{death.moment_seconds * 1000:.0f} ms after its start"
        return Outcome(
            sweep=str(self._sweep),
            point=f"life {self._lives}, {when}, {where}",
            kills=ended.kills,
            acknowledged=self._acknowledged,
            resumed=None,
            problem="; ".join(ended.problems),
        )

    def _judged(self, ended: Ended, reference: Reference) -> Iterator[Outcome]:
        """The kills before this life, by what it began with; one that did not begin says nothing of them."""
        began = ended.facts("began")
        complete = not ended.kills
        problems = reference.differences(ended.told)
        problems += [f"still there after a start: {torn}" for torn in ended.facts("torn") if torn]
        if len(set(began)) > 1:
            problems.append(f"ranks began at different steps: {began}")
        if complete:
            problems += ended.problems + self._left(pruned=bool(ended.facts("committed")))
        self._acknowledged = max([self._acknowledged, *ended.facts("committed")])
        if not (began or complete):
            return
        told, self._pending = self._pending, []
        if problems and not told:
            raise RuntimeError(f"{self._sweep}, before a kill: {'; '.join(problems)}")
        for number, outcome in enumerate(told, start=1):
            found = [outcome.problem, *(problems if number == len(told) else ())]
            yield replace(outcome, resumed=min(began, default=None), problem="; ".join(filter(None, found)))

    def _left(self, *, pruned: bool) -> list[str]:
        """What is wrong with what a complete training has left on disk."""
        storage = LocalStorage(self._root)
        found = Catalog(storage).committed()
        steps = [info.step for info in found]
        # One more where the kill fell between the last commit and the end of its prune: the next repeats it.
        wanted = [STEPS - EVERY * back for back in reversed(range(KEPT + (not pruned)))]
        problems = [] if steps in (wanted, wanted[-KEPT:]) else [f"at the end there are steps {steps}"]
        problems += [str(failure) for info in found for failure in verify(storage, info.name)]
        known = {info.name for info in found} | {Path(name).parts[0] for name in _FOREIGN}
        stray = beside_own(self._root) - known
        stray |= {path.name for path in self._temporary.iterdir()}
        problems += [f"left over: {name}" for name in sorted(stray)]
        for name, content in _FOREIGN.items():
            path = self._root / name
            if not path.exists() or path.read_bytes() != content:
                problems.append(f"{name}, which is not ours, was touched")
        return problems


def campaigns(
    sweep: Sweep, *, kills: int, chance: random.Random, folder: Path, reference: Reference
) -> Iterator[Outcome]:
    """One campaign after another, until there were as many kills."""
    number = 0
    while kills > 0:
        number += 1
        here = folder / f"campaign-{number}"
        outcomes = list(Campaign(sweep, here).killed(kills, chance, reference))
        yield from outcomes
        kills -= len(outcomes)
        if not any(outcome.problem or outcome.lost for outcome in outcomes):
            shutil.rmtree(here)


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill trainings a thousand times, or as often as is chosen; each kind by its share, at least once."""

    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_TORCH_DEVICE="cpu")
    references: dict[tuple[str, int], Reference] = {}
    for number, sweep in enumerate(SWEEPS, start=1):
        if not choice.may_name(str(sweep)):
            continue
        place = folder / f"training-{number}"
        kind = sweep.adapter, sweep.world
        if kind not in references:
            references[kind] = Campaign(sweep, place / "uninterrupted").uninterrupted()
        yield from campaigns(
            sweep,
            kills=sweep.kills_of(choice.least(ALL_KILLS)),
            chance=random.Random(f"{choice.seed}, {sweep}"),
            folder=place,
            reference=references[kind],
        )
