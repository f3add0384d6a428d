"""Whoever dies, stalls or raises: nobody waits beyond the deadline, all are told who and where, saves go on.

A sample; `python -m tests.reliability --only ranks` tries every place with every kind of failure.
"""

from __future__ import annotations

import pytest

from tests.reliability.ranks.rank_failures import cases
from tests.reliability.sampling import sample

pytestmark = [pytest.mark.reliability, pytest.mark.slow]

# place / how it fails / who / of how many ranks
SAMPLE = [
    "decide/dies/0/2",
    "decide/is stopped/1/3",
    "decide/is busy/0/2",
    "capture/raises/1/2",
    "open/is stopped/0/2",
    "write tensors/dies/1/3",
    "write tensors/is stopped/0/2",
    "write small files/raises/1/2",
    "commit: marker/is stopped/0/2",
    "commit: rename/dies/0/2",
    "prune/is busy/0/2",
    "load: look/is stopped/0/2",
    "load: verify/dies/1/2",
    "load: fetch/is stopped/1/2",
    "network/store dies/-1/2",
    "network/store is stopped/-1/2",
    "network/connections are reset/1/3",
]


def test_whatever_fails_on_a_rank_all_others_are_told_in_time_and_nothing_is_lost(tmp_path):
    assert len(sample(tmp_path, "ranks", cases=SAMPLE)) == len(SAMPLE)


def test_every_place_of_a_save_and_of_a_load_is_tried_with_every_kind_of_failure():
    tried = {(case.place, case.kind) for case in cases() if case.place != "network"}
    places = {place for place, _ in tried}
    kinds = {kind for _, kind in tried}
    assert len(places) >= 14
    assert kinds == {"dies", "is stopped", "is busy", "raises"}
    assert len(tried) == len(places) * len(kinds)
