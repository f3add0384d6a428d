"""A resumed training is the rest of the uninterrupted one, under every host, strategy, loader and place.

`make exactness` runs more of the matrix, and writes `docs/reference/exactness.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path

import lightning.pytorch  # noqa: F401 - for the fork server of ranks: see `tests/conftest.py`
import pytest
import transformers.trainer  # noqa: F401 - likewise

from tests.exactness.cells import AXES, Cell
from tests.exactness.covering import covering
from tests.exactness.rig import judged

pytestmark = pytest.mark.distributed

TOGETHER = (("single",), ("ddp", "fsdp1"), ("fsdp2", "tp"), ("pp", "ep"))
"""Strategies on two ranks at most, by what shares a pair of ranks; the others take four processes."""


@cache
def pairs() -> list[Cell]:
    return covering(2, axes={**AXES, "strategy": tuple(chain.from_iterable(TOGETHER))})


def assert_exact(cells: Sequence[Cell], folder: Path, *, stock: bool = True) -> None:
    unexpected = [each for each in judged(cells, folder, stock=stock) if not each.as_expected]
    assert not unexpected, "\n".join(f"{each.cell}: {each.word}, {each.why}" for each in unexpected)


def test_every_host_resumes_in_the_middle_of_a_shuffled_epoch(tmp_path):
    cells = [
        Cell(
            host=host,
            strategy="single",
            data="map",
            workers="0",
            shuffle=True,
            dropout=True,
            accumulation=1,
            point="epoch 2",
            ranks="same",
            precision="fp32",
        )
        for host in AXES["host"]
    ]
    assert_exact(cells, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("strategies", TOGETHER, ids="+".join)
def test_every_pair_of_values_is_exact(tmp_path, strategies):
    cells = [cell for cell in pairs() if cell.strategy in strategies]
    assert len(cells) > 3
    assert_exact(cells, tmp_path, stock=False)
