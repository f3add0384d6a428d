"""Quantised optimizer states of layouts in docs/loading.md: on two ranks, on one, and on two again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.quantised_jobs import QUANTISED, passes_on, resumes, saves
from tests.kit.ranks import run_ranks
from tests.support import low_bit

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(not low_bit.is_installed(), reason="needs torchao, as `make setup` installs it"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict[str, list[str]]]:
    root: Path = tmp_path_factory.mktemp("layouts")
    on_two = run_ranks(saves, 2, root, timeout_seconds=120)
    on_one = passes_on(root)
    again = run_ranks(resumes, 2, root, timeout_seconds=120)
    return {
        name: {
            "same": [each[name] for each in on_two],
            "one": [on_one[name]],
            "two again": [each[name] for each in again],
        }
        for name in QUANTISED
    }


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_states_resume_bit_for_bit_on_the_same_ranks_and_by_way_of_one(results, name):
    found = {how: [text for text in told if text] for how, told in results[name].items()}
    told = [f"{how}: {text}" for how, of_ranks in found.items() for text in of_ranks]
    assert not told, "\n".join(told)
