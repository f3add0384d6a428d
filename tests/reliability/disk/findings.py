"""What a fresh process finds where others were killed; every broken promise is an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage
from tests.kit.own_files import beside_own
from tests.reliability.disk.victims import (
    ALONE,
    FOREIGN,
    KEPT,
    LAST_NAME,
    Rank,
    manager,
    state_of,
    values,
)

AHEAD: Final = 100
"""How many steps later the job after a crash saves again."""


class PromiseBrokenError(AssertionError):
    """What was promised of a crash does not hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What was told before the crash.

    Attributes:
        acknowledged: the newest step that was reported to be committed.
        replaced: the step last reported to be committed under `last.ckpt`; None if it may be gone.
        damaged: ids of saves whose checkpoints were damaged on purpose.
        aside: whether what is replaced may be set aside, until the next job brings it back.
    """

    acknowledged: int
    replaced: int | None
    damaged: frozenset[str] = frozenset()
    aside: bool = False


def inspect(root: Path, expected: Expected) -> int:
    """Discover, verify, resume, collect and save again, as a job of one rank that starts after the crash.

    Returns:
        The step that was resumed.

    Raises:
        PromiseBrokenError: with what was promised, and what is there.
    """
    newest = survey(root, expected)
    resumed = go_on(root, ALONE, expected)
    aftermath(root, expected, newest=newest, resumed=resumed)
    return resumed


def survey(root: Path, expected: Expected) -> int:
    """The newest sound step; all that is committed must be whole, and what was acknowledged be there."""
    sound = _sound(root, expected.damaged)
    _require(len(sound) >= KEPT, f"only {sorted(sound)} are sound")
    if not expected.aside:
        _require_replaced(sound, expected)
    return max(sound.values())


def go_on(root: Path, place: Rank, expected: Expected) -> int:
    """Resume, with the right values, collect what the dead job left, and save another step. Collective."""
    state = state_of(0, place)
    with manager(root) as checkpoints:
        step = checkpoints.resume(state)
        if step is None:
            raise PromiseBrokenError("nothing to resume from")
        told = f"step {expected.acknowledged} was acknowledged, {step} was resumed"
        _require(step >= expected.acknowledged, told)
        exact = values(state) == values(state_of(step, place))
        _require(exact, f"step {step} holds other values")
        catalog = Catalog(LocalStorage(root))
        _require_replaced({info.name: info.step for info in catalog.committed()}, expected)
        torn = catalog.torn()
        _require(torn == [], f"not collected: {torn}")
        checkpoints.save(step + AHEAD, state_of(step + AHEAD, place)).result()
    return step


def aftermath(root: Path, expected: Expected, *, newest: int, resumed: int) -> None:
    """The right step was chosen, the save after it is sound, and the root is tidy."""
    _require(resumed == newest, f"step {resumed} was resumed, but there was {newest}")
    sound = _sound(root, expected.damaged)
    _require(resumed + AHEAD in sound.values(), "the save after the crash is not there")
    strangers(root)


def ids_of(root: Path) -> dict[str, str]:
    """Directory of every committed checkpoint -> the id of the save that wrote it."""
    catalog = Catalog(LocalStorage(root))
    return {info.name: info.save_id for info in catalog.committed(abandoned=True)}


def strangers(root: Path) -> None:
    """Nothing of a dead job is left behind, and what is not ours is as it was."""
    for name, content in FOREIGN.items():
        path = root / name
        _require(path.is_file() and path.read_bytes() == content, f"{name} is not ours and was changed")
    known = {Path(name).parts[0] for name in FOREIGN}
    # A damaged checkpoint that stood in the way is abandoned, and kept for a person.
    known |= {info.name for info in Catalog(LocalStorage(root)).committed(abandoned=True)}
    left = beside_own(root) - known
    _require(not left, f"left over: {sorted(left)}")


def _sound(root: Path, damaged: Collection[str]) -> Mapping[str, int]:
    """Name of every committed checkpoint -> its step; all must be whole but those damaged on purpose."""
    storage = LocalStorage(root)
    ids = ids_of(root)
    infos = [info for info in Catalog(storage).committed() if ids[info.name] not in damaged]
    for info in infos:
        failures = verify(storage, info.name)
        _require(failures == [], f"{info.name} is committed and damaged: {failures}")
    return {info.name: info.step for info in infos}


def _require_replaced(steps: Mapping[str, int], expected: Expected) -> None:
    step = steps.get(LAST_NAME, -1)
    _require(expected.replaced is None or step >= expected.replaced, f"{LAST_NAME} is of step {step}")


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PromiseBrokenError(otherwise)
