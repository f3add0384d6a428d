"""What a checkpoint holds never runs in Lightning, whoever reads it, unless pickles are allowed."""

from __future__ import annotations

import pytest

from ckpt_core.testing import run_ranks
from tests.adapters.pickle_jobs import PLANTED, loads_on_ranks
from tests.canary import traces_in


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_nothing_in_a_stock_checkpoint_of_a_sharded_strategy_runs(tmp_path, strategy):
    per_rank = run_ranks(loads_on_ranks, 2, str(tmp_path), strategy, process_group=False, timeout_seconds=180)

    for outcomes in per_rank:
        # What is honest is loaded as ever.
        assert outcomes["sharded"] == outcomes["full"] == outcomes["saved"], outcomes
        for name in (*PLANTED, "full_planted"):
            error = "CorruptCheckpointError" if name == "rank_metadata" else "UnsafeCheckpointError"
            assert outcomes[name].startswith(error), (name, outcomes[name])
            assert str(tmp_path / name) in outcomes[name]
            assert name == "rank_metadata" or "allow_pickle=True" in outcomes[name]
        assert outcomes["trusted"] == outcomes["saved"]
    assert traces_in(tmp_path / "traces") == ["meta"]  # of the load that was told to trust it
