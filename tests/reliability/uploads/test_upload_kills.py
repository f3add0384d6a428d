"""Kills, power cuts, the loss of a disk and faults of a bucket lose nothing that was acknowledged.

Samples; `python -m tests.reliability --only uploads,power-uploads,bucket-faults` makes all of it.
"""

from __future__ import annotations

import pytest

from tests.reliability.disk.power import FATES
from tests.reliability.sampling import sample

pytestmark = [pytest.mark.reliability, pytest.mark.slow]

KILLS = 2
SCENE = "uploads during saves, on its disk, 1 rank"


def test_a_kill_during_an_upload_loses_no_acknowledged_checkpoint_of_either_tier(tmp_path):
    found = sample(tmp_path, "uploads", count=KILLS, cases=[SCENE])
    assert sum(each.kills for each in found) == KILLS
    assert sum(each.sweep.endswith("disk lost") for each in found) == KILLS


def test_a_kill_during_a_compressed_upload_loses_no_acknowledged_checkpoint_of_either_tier(tmp_path):
    found = sample(
        tmp_path, "uploads", count=1, cases=["uploads during saves, compressed, on its disk, 1 rank"]
    )
    assert [each.kills for each in found] == [1, 0]


def test_a_kill_during_a_demotion_in_a_bucket_leaves_the_whole_or_its_weights(tmp_path):
    found = sample(tmp_path, "s3-copies", count=1, cases=["a demotion in S3"])
    assert [each.kills for each in found] == [1]


def test_a_power_cut_during_an_upload_loses_no_acknowledged_checkpoint_of_either_tier(tmp_path):
    found = sample(tmp_path, "power-uploads", count=1, cases=[SCENE])
    assert sum(each.kills for each in found) == 1
    assert len(found) == 2 * len(FATES)


def test_a_bucket_that_loses_an_answer_costs_no_upload(tmp_path):
    scene = "GCS, uploads during saves, on its disk, 1 rank, loses an answer"
    found = sample(tmp_path, "bucket-faults", count=1, cases=[scene])
    assert len(found) == 2
