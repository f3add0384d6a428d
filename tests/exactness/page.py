"""`docs/exactness.md`: what became of every cell, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from typing import Final

from tests.exactness.cells import AXES, Cell, impossible, limited
from tests.exactness.covering import possible_combinations, uncovered
from tests.exactness.verdicts import GOOD, Verdict

_WORDS: Final = {True: "yes", False: "no"}
_BESIDE: Final = ("data", "workers", "shuffle", "dropout", "accumulation", "point", "ranks", "precision")

_HEAD: Final = """# Exactness

Written by `make exactness`; do not edit. One small training is run under every host and strategy, with
every kind of loader, and is cut and resumed at every kind of place: on CPU with gloo, on one to six ranks.

Each cell is three trainings of {epochs} epochs: one without ckpt-suite, one that saves once and goes on,
and one that resumes from that save in new processes, in new objects and under another seed. Compared bit
for bit, on every rank: the samples of each batch, losses and learning rates; at the end weights, optimizer,
scheduler, and the random number generators of torch, numpy and Python.

- **exact**: saving changed nothing, and the resumed training is the rest of the uninterrupted one.
- **elastic-exact**: on other ranks, weights and optimizer are the saved ones, and in the rest of this epoch
  and in every later one each sample is seen exactly once, but for padding that fills the last batches.
  Losses are not compared: a sum over other ranks has another order, and floating point rounds it otherwise.
- **refused**, **told**: it cannot be exact, and an error or a warning says so
  ([below](#what-cannot-be-exact)).
- **wrong**: anything else. `make exactness` fails then.

`fewer` and `more` ranks: one process becomes two, two become one or three, four become two or six.
`last batch` is a save inside the loop after the last batch of an epoch, `edge` one between two epochs,
`epoch 2` one in the middle of the second. A `stream` is an iterable data set, and `stateful` is torchdata's
`StatefulDataLoader`.

The {axes} axes have {product:,} combinations, of which {possible:,} are possible. {cells} of these were run.
They were chosen for the combinations of values of any {strength} axes. Of these,
{combinations:,} are possible, and {covered:,} occur in at least one cell.
"""


def page(verdicts: Sequence[Verdict], strength: int) -> str:
    """The whole page."""
    from tests.exactness.cells import EPOCHS

    every = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
    wanted = possible_combinations(strength)
    left = uncovered(strength, [each.cell for each in verdicts])
    head = _HEAD.format(
        covered=len(wanted) - len(left),
        combinations=len(wanted),
        epochs=EPOCHS,
        cells=len(verdicts),
        strength=strength,
        axes=len(AXES),
        product=len(every),
        possible=sum(not impossible(values) for values in every),
    )
    parts = [head, *_summary(verdicts)]
    for host in AXES["host"]:
        parts += _of_host(host, [each for each in verdicts if each.cell.host == host])
    parts += ["", "## What cannot be exact", "", *limits(verdicts)]
    if unexpected := [each for each in verdicts if not each.as_expected]:
        parts += ["", "## Wrong", "", *(f"- {_line(each)}" for each in unexpected)]
    return "\n".join(parts) + "\n"


def limits(verdicts: Iterable[Verdict] = ()) -> Iterator[str]:
    """Which combinations there cannot be, and which cells are not exact, each with its reason."""
    yield "There is no such training:"
    yield ""
    reasons: dict[str, list[str]] = {}
    for first, second in combinations(AXES, 2):
        for one, other in product(AXES[first], AXES[second]):
            if reason := impossible({first: one, second: other}):
                reasons.setdefault(reason, []).append(f"{_named(first, one)} with {_named(second, other)}")
    yield from (f"- {'; '.join(pairs)}: {reason}." for reason, pairs in reasons.items())
    found: dict[tuple[str, str], list[Cell]] = {}
    for each in verdicts:
        if each.as_expected and each.word not in GOOD:
            found.setdefault((each.word, limited(each.cell)), []).append(each.cell)
    if found:
        yield from ("", "It runs, but not exactly:", "")
        for (word, reason), cells in found.items():
            hosts = ", ".join(sorted({cell.host for cell in cells}))
            yield f"- {word}, {len(cells)} cells ({hosts}, {_kinds(cells)}): {reason}."


def _kinds(cells: Iterable[Cell]) -> str:
    return ", ".join(sorted({f"{cell.data} on {cell.ranks} ranks" for cell in cells}))


def _summary(verdicts: Sequence[Verdict]) -> Iterator[str]:
    words = ("exact", "elastic-exact", "refused", "told", "wrong")
    yield _row("host", "cells", *words)
    yield _row("---", *["---:"] * (1 + len(words)))
    for host in AXES["host"]:
        counted = Counter(each.word for each in verdicts if each.cell.host == host)
        yield _row(host, counted.total(), *(counted[word] for word in words))


def _of_host(host: str, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """One table: a row for every value of an axis, a column for every strategy that the host has."""
    strategies = [each for each in AXES["strategy"] if not impossible({"host": host, "strategy": each})]
    yield from ("", f"## {host.capitalize()}", "")
    yield "How many of the cells with both values are exact or elastic-exact, of those that were tried."
    yield ""
    yield _row("", *strategies)
    yield _row("---", *["---"] * len(strategies))
    for axis in _BESIDE:
        for value in AXES[axis]:
            entries = [_entry(host, strategy, axis, value, verdicts) for strategy in strategies]
            if set(entries) - {"", "-"}:
                yield _row(_named(axis, value), *entries)


def _entry(host: str, strategy: str, axis: str, value: object, verdicts: Sequence[Verdict]) -> str:
    if impossible({"host": host, "strategy": strategy, axis: value}):
        return ""
    of = [each for each in verdicts if each.cell.strategy == strategy and each.cell.values[axis] == value]
    if not of:
        return "-"
    good = sum(each.word in GOOD for each in of)
    others = Counter(each.word for each in of if each.word not in GOOD)
    return ", ".join([f"{good} of {len(of)}", *(f"{count} {word}" for word, count in others.items())])


def _named(axis: str, value: object) -> str:
    if isinstance(value, bool):
        return f"{axis}: {_WORDS[value]}"
    if axis in {"host", "strategy", "point"}:
        return str(value)
    return f"{axis}: {value}"


def _line(verdict: Verdict) -> str:
    why = " ".join(verdict.why.split())
    return f"{verdict.cell}: {verdict.word}, {why[:300]}"


def _row(*entries: object) -> str:
    return f"| {' | '.join(map(str, entries))} |"
