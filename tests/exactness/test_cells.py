"""The matrix covers what it says, and its verdicts are not given away."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from tests.exactness.cells import AXES, SAMPLES, Cell, impossible, limited
from tests.exactness.covering import covering
from tests.exactness.page import limits
from tests.exactness.training import Observed
from tests.exactness.verdicts import Runs, judge

CELL = Cell(
    host="plain",
    strategy="ddp",
    data="map",
    workers="0",
    shuffle=True,
    dropout=True,
    accumulation=1,
    point="mid-epoch",
    ranks="same",
    precision="fp32",
)


def test_the_sample_has_every_possible_pair_of_values():
    """On the axes that restrict one another."""
    free = ("workers", "dropout", "accumulation", "precision")
    axes = {name: values[:1] if name in free else values for name, values in AXES.items()}
    found = covering(2, axes=axes)
    cells = [cell.values for cell in found]
    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    every = [values for values in every if not impossible(values)]
    for one, other in combinations(AXES, 2):
        possible = {(values[one], values[other]) for values in every}
        assert {(values[one], values[other]) for values in cells} == possible
    assert not any(map(impossible, cells))
    assert covering(2, axes=axes) == found
    assert covering(2, axes=axes, begin=found) == found
    begun = covering(2, axes=axes, begin=found[-3:])
    assert begun[:3] == found[-3:]
    assert len(begun) < len(found) + 3


def rows(rank: int, *, seed: int = 0, batches: int = 24) -> list:
    return [
        ((4 * n % SAMPLES + 2 * rank, 4 * n % SAMPLES + 2 * rank + 1), f"{seed}:{n}", 0.1)
        for n in range(batches)
    ]


def runs(**resumed) -> Runs:
    """A cell of two ranks that is exact, but for what is given."""
    stock = [Observed(rows=rows(rank), final={"weights": "w"}) for rank in range(2)]
    saving = [replace(each, saved_after=4, at_point={"a": "1"}) for each in stock]
    rest = [replace(each, rows=each.rows[4:], at_point={"a": "1"}) for each in stock]
    return Runs(stock, saving, [replace(each, **resumed) for each in rest])


def test_an_equal_rest_is_exact():
    assert judge(CELL, runs()).word == "exact"


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"rows": rows(0)[5:]}, "samples of batch 5"),
        ({"rows": rows(0, seed=1)[4:]}, "loss of batch 5"),
        ({"rows": rows(0)[4:-1]}, "19 batches instead of 20"),
        ({"final": {"weights": "x"}}, "the final weights"),
        ({"error": "Traceback"}, "Traceback"),
    ],
)
def test_whatever_differs_is_wrong_unless_it_was_said(changed, why):
    verdict = judge(CELL, runs(**changed))
    assert (verdict.word, verdict.as_expected) == ("wrong", False)
    assert why in verdict.why
    if "error" not in changed:
        said = judge(CELL, runs(**changed, warnings=["not exact"]))
        # What could be exact must be, whatever is said of it.
        assert (said.word, said.as_expected) == ("told", False)


def test_saving_that_changes_the_training_is_wrong():
    found = runs()
    found.stock[1].rows = rows(1, seed=3)
    assert "saving changes the training: rank 1: loss of batch 1" in judge(CELL, found).why


def test_samples_on_other_ranks_are_counted():
    fewer = replace(CELL, ranks="fewer")
    one = [((2 * n, 2 * n + 1), "", 0.1) for n in range(8, 16)]
    later = [((2 * n, 2 * n + 1), "", 0.1) for n in range(16)] * 2
    found = runs()
    good = found._replace(resumed=[Observed(rows=one + later, at_point={"a": "1"})])
    assert judge(fewer, good).word == "elastic-exact"
    again = found._replace(resumed=[Observed(rows=later[:8] + later, at_point={"a": "1"})])
    assert "of epoch 1, 16 samples twice and 16 never" in judge(fewer, again).why
    other = found._replace(resumed=[Observed(rows=one + later, at_point={"a": "2"})])
    assert "entries of the state" in judge(fewer, other).why
    longer = found._replace(resumed=[Observed(rows=one + later + one, at_point={"a": "1"})])
    assert judge(fewer, longer).word == "wrong"
    # Without a length of the data the Trainer ends by steps, in whatever epoch that is.
    steps = replace(fewer, host="trainer", data="stream", shuffle=False)
    cut = found._replace(resumed=[Observed(rows=one + later[:-3], at_point={"a": "1"})])
    assert judge(steps, cut).word == "elastic-exact"
    assert judge(fewer, cut).word == "wrong"


def test_an_epoch_that_is_over_needs_no_more_samples():
    """Stock may give ranks the same ones, if each draws an order of its own."""
    edge = replace(CELL, point="edge", ranks="fewer")
    found = runs()
    for each in found.saving:
        each.rows[0] = ((7, 7), *each.rows[0][1:])
    whole = [((2 * n, 2 * n + 1), "", 0.1) for n in range(16)] * 2
    good = found._replace(resumed=[Observed(rows=whole, at_point={"a": "1"})])
    assert judge(edge, good).word == "elastic-exact"
    again = found._replace(resumed=[Observed(rows=whole + whole[:16], at_point={"a": "1"})])
    assert judge(edge, again).word == "wrong"


def test_a_stream_is_filled_up_for_each_worker_that_reads_it():
    """As Accelerate does, also without us."""
    cell = replace(CELL, host="accelerate", data="stream", shuffle=False, workers="2", ranks="more")
    found = runs()
    for rank, each in enumerate(found.saving):
        # Each rank had two batches of either worker, of which one reads the even samples.
        each.rows[:4] = [
            ((first, first + 2), "", 0.1) for first in (4 * rank, 4 * rank + 1, 4 * rank + 8, 4 * rank + 9)
        ]

    def dealt(start: int) -> list[list]:
        """What is left of each worker's samples, in turns, to three ranks."""
        left = [[*range(start + worker, SAMPLES, 2)] for worker in (0, 1)]
        full = [samples + samples[: -len(samples) % 6] for samples in left]
        return [
            [
                (tuple(samples[at + 2 * rank : at + 2 * rank + 2]), "", 0.1)
                for at in range(0, len(full[0]), 6)
                for samples in full
            ]
            for rank in range(3)
        ]

    ranks = [rest + 2 * whole for rest, whole in zip(dealt(16), dealt(0), strict=True)]
    resumed = [Observed(rows=rows, at_point={"a": "1"}) for rows in ranks]
    assert judge(cell, found._replace(resumed=resumed)).word == "elastic-exact"
    assert judge(replace(cell, workers="0"), found._replace(resumed=resumed)).word == "wrong"


def test_only_cells_with_a_reason_may_be_told():
    stream = replace(CELL, data="stream", shuffle=False, ranks="fewer")
    assert limited(stream)
    assert not limited(replace(stream, ranks="same"))
    assert not limited(replace(stream, host="accelerate"))
    told = judge(stream, runs(rows=[], warnings=["not exact"]))
    assert (told.word, told.as_expected) == ("told", True)


def test_the_page_names_every_impossible_pair_once():
    lines = [line for line in limits() if line.startswith("- ")]
    assert len(lines) == len(set(lines)) >= 8
    assert any("lightning with pp" in line for line in lines)
