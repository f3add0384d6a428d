"""A small set of cells in which every possible combination of some values occurs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any, Final

from tests.exactness.cells import AXES, Cell, impossible

Values = tuple[tuple[str, Any], ...]
"""Some axes with a value of each, in the order of `AXES`."""

_TRIES: Final = 12


def covering(
    strength: int,
    *,
    seed: int = 1,
    axes: Mapping[str, tuple[Any, ...]] = AXES,
    begin: Sequence[Cell] = (),
) -> list[Cell]:
    """Cells that cover every possible combination of `strength` values; the same ones each time.

    Those of `begin` are among them, whatever they cover.

    Greedy: a cell begins with a combination that is not covered yet, and each of its other axes gets the
    value that covers most; the best of a few such cells is taken.
    """
    chance = random.Random(seed)
    missing = uncovered(strength, begin, axes)
    cells = list(begin)
    while missing:
        # The first that is left: sorted, so that no order of a set decides.
        start = next(iter(missing))
        tries = [_grown(dict(start), missing, axes, chance) for _ in range(_TRIES)]
        found = max((each for each in tries if each is not None), key=lambda each: _gain(each, missing))
        for combination in _combinations_of(found, missing):
            del missing[combination]
        cells.append(Cell(**found))
    return cells


def possible_combinations(strength: int, axes: Mapping[str, tuple[Any, ...]] = AXES) -> dict[Values, None]:
    """Every combination of so many values that some possible cell has, in a fixed order."""
    return {
        combination: None
        for names in combinations(axes, strength)
        for values in product(*(axes[name] for name in names))
        if _completed(dict(combination := tuple(zip(names, values, strict=True))), axes) is not None
    }


def uncovered(
    strength: int, cells: Sequence[Cell], axes: Mapping[str, tuple[Any, ...]] = AXES
) -> dict[Values, None]:
    """Every such combination that none of some cells has."""
    missing = possible_combinations(strength, axes)
    for cell in cells:
        for combination in _combinations_of(cell.values, missing):
            del missing[combination]
    return missing


def _completed(
    values: dict[str, Any], axes: Mapping[str, tuple[Any, ...]], chance: random.Random | None = None
) -> dict[str, Any] | None:
    """A possible cell with these values, None if there is none."""
    if impossible(values):
        return None
    open_axes = [name for name in axes if name not in values]
    if not open_axes:
        return values
    name = open_axes[0]
    choices = list(axes[name])
    if chance is not None:
        chance.shuffle(choices)
    for value in choices:
        if (found := _completed({**values, name: value}, axes, chance)) is not None:
            return found
    return None


def _grown(
    values: dict[str, Any],
    missing: Mapping[Values, None],
    axes: Mapping[str, tuple[Any, ...]],
    chance: random.Random,
) -> dict[str, Any] | None:
    names = [name for name in axes if name not in values]
    chance.shuffle(names)
    for name in names:
        choices = list(axes[name])
        chance.shuffle(choices)
        possible = [
            grown for value in choices if _completed(grown := {**values, name: value}, axes) is not None
        ]
        values = max(possible, key=lambda each: _gain(each, missing))
    return {name: values[name] for name in axes}


def _gain(values: Mapping[str, Any], missing: Mapping[Values, None]) -> int:
    return sum(1 for _ in _combinations_of(values, missing))


def _combinations_of(values: Mapping[str, Any], missing: Mapping[Values, None]) -> Iterator[Values]:
    if missing:
        strength = len(next(iter(missing)))
        ordered = [(name, values[name]) for name in AXES if name in values]
        yield from [each for each in combinations(ordered, strength) if each in missing]
