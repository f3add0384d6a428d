"""A sample of the kills of jobs whose nodes have disks of their own.

All of them: `python -m tests.reliability --only nodes,node-uploads`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reliability.sampling import sample

pytestmark = [pytest.mark.reliability, pytest.mark.slow]

RENAMES = [
    f"{sweep}: {when} rename .incomplete-*step-000000002~ -> step-000000002 (0) on node {node}"
    for sweep, when, node in (
        ("2 nodes, all killed", "after", 0),
        ("2 nodes, all killed", "before", 1),
        ("2 nodes, one killed", "after", 1),
    )
]


def test_a_kill_between_the_renames_of_two_nodes_leaves_one_checkpoint_to_all_ranks(tmp_path: Path):
    found = sample(tmp_path, "nodes", cases=RENAMES)
    assert len(found) == len(RENAMES)
    assert all(each.kills and each.resumed is not None and each.resumed >= 1 for each in found)


def test_a_kill_and_lost_nodes_leave_what_is_durable_to_all_ranks(tmp_path: Path):
    found = sample(tmp_path, "node-uploads", count=1, cases=["2 x 1 ranks with uploads, node 1 new"])
    assert [each.kills for each in found] == [2, 0]
    assert "lost" in found[1].sweep
