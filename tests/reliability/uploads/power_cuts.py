"""The power fails while a job saves to a disk and uploads to a second one; then two jobs go on.

Both disks lose it in the same moment. The second one goes on without the first.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.reliability.disk.power import FATES
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.uploads.upload_jobs import OnDisks, judged
from tests.reliability.uploads.upload_kills import Point, struck, sweep
from tests.support.power import power_cut


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Cut the power at every point of every scene, or at the chosen ones of each."""
    yield from sweep(choice, folder, partial(_case, seed=choice.seed))


def _case(point: Point, template: OnDisks, folder: Path, *, seed: int) -> list[Outcome]:
    """Cut the power there, and go on from several things that may be left."""
    log = folder / "log"
    place, children, problem = struck(point, template, folder, log)
    drawn = random.Random(f"{seed} {point}").randrange(1 << 30)
    found = list[Outcome]()
    for number, fate in enumerate(FATES):
        left, lost = (OnDisks(folder=folder / f"{kind}-{number}") for kind in ("left", "lost"))
        power_cut(log, place.folder, left.folder, fate=fate, seed=drawn + number)
        shutil.copytree(left.tier, lost.tier)
        for outcome in judged(point, children, (left, lost), problem):
            # One cut, of which several things may be left.
            kills = outcome.kills if number == 0 else 0
            words = f"{outcome.point}; {fate} {drawn + number}"
            found.append(replace(outcome, sweep=f"power cut, {outcome.sweep}", point=words, kills=kills))
    if not any(outcome.problem for outcome in found):
        shutil.rmtree(folder)
    return found
