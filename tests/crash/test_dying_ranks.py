"""P3 on many ranks: whoever dies while a checkpoint is written, the job resumes from the one before."""

from __future__ import annotations

import pytest

from ckpt_core.testing import run_ranks
from tests.crash.rank_jobs import resume_after, save_and_die

pytestmark = [pytest.mark.distributed, pytest.mark.reliability]

DATA = ("close", "*.distcp")
MARKER = ("create", "*/COMMITTED")


@pytest.mark.parametrize(
    ("victims", "where"),
    [
        pytest.param([1], DATA, id="a worker, in the middle of its data"),
        pytest.param([0, 1], DATA, id="all, in the middle of their data", marks=pytest.mark.slow),
        pytest.param([0], DATA, id="the coordinator, in the middle of its data", marks=pytest.mark.slow),
        pytest.param([0], MARKER, id="the coordinator, before the marker", marks=pytest.mark.slow),
    ],
)
def test_killed_ranks_cost_only_the_save_in_flight(tmp_path, victims, where):
    root = str(tmp_path / "run")
    told = run_ranks(save_and_die, 2, root, victims, *where, expect_death=victims, timeout_seconds=150)
    for rank, message in enumerate(told):
        if rank not in victims:
            dead = next(iter(victims))
            if where is MARKER:  # it had begun to commit, and might have come to its end
                assert "it is not known whether step 2 was saved" in message
                assert f"rank(s) {dead} had heard from all ranks, and has not told" in message
            else:
                assert "step 2 was not saved" in message
                assert f"rank(s) {dead} did not arrive" in message
    first, second = run_ranks(resume_after, 2, root, timeout_seconds=150)
    assert first == second
    assert first == {
        "step": 1,
        "exact": True,
        "names": ["step-000000001", "step-000000003"],
        "failures": [],
    }
    assert not list((tmp_path / "run").glob(".incomplete-*"))
