"""Roots on disks that only one node sees."""

from __future__ import annotations

from pathlib import Path

import tests.distributed.node_jobs as jobs
from ckpt_core.testing import Nodes, run_ranks

TWO_NODES = Nodes(2, per_node=1)


def test_each_node_keeps_the_files_of_its_ranks_and_together_they_are_a_checkpoint(tmp_path: Path):
    found = run_ranks(jobs.save_and_resume, TWO_NODES, tmp_path, [1, 2], timeout_seconds=60)
    assert [each[:2] for each in found] == [(2, True)] * 2
    assert found[0][2] == found[1][2]
    here, there = (
        sorted(p.name for p in (tmp_path / f"node-{n}" / "step-000000002").iterdir()) for n in (0, 1)
    )
    assert "__0_0.distcp" in here
    assert "__1_0.distcp" in there
    assert {"COMMITTED", "manifest.json", ".metadata"} <= set(here) & set(there)
