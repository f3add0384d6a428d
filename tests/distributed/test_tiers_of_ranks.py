"""Ranks choose and read alike over several tiers."""

from __future__ import annotations

import pytest

from tests.distributed.tier_jobs import THREE, resumes_over_tiers
from tests.kit.ranks import run_ranks


@pytest.mark.distributed
def test_ranks_resume_the_same_checkpoint_whatever_a_tier_has_lost(tmp_path):
    first, second = run_ranks(resumes_over_tiers, 2, str(tmp_path))
    for rank, found in enumerate((first, second)):
        unreachable = found.pop("unreachable")
        assert "newest known is step 3" in unreachable
        assert {case: seen[:2] for case, seen in found.items()} == dict.fromkeys(
            found, (3, [3.0 + rank, 3.0])
        )
        assert found["fetched"][3:] == (THREE, 0, 1)
    assert [seen[2] for seen in first.values()] == [True] * 4
    assert [seen[4] for seen in first.values()] == [1, 1, 1, 0]
    assert [seen[4] for seen in second.values()] == [0] * 4
