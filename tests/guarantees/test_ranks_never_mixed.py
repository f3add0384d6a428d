"""Ranks that differ are never mixed: a name means the same tensor only if the values show it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager, CheckpointOptions, TrainState
from ckpt_core.errors import ConfigError
from ckpt_core.state import Counters
from tests.distributed.divergence_jobs import Net, run_all, state_of
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    run_ranks(run_all, 2, str(root))
    return root


def test_ranks_that_differ_are_never_mixed(root):
    assert (root / "kept" / "step-000000002" / "COMMITTED").is_file()


def test_on_other_ranks_what_each_kept_gives_way_to_the_lowest_ranks(root, caplog):
    net = Net(seed=9)
    state = TrainState(model=net, tally=Counters(n=7))
    with CheckpointManager(root / "kept") as checkpoints:
        checkpoints.load(state, items=["model", "tally"], strict=False)
    assert "each of its 2 ranks had its own values" in caplog.text
    expected = Net(seed=0)
    state_of(expected)
    torch.testing.assert_close(net.long, expected.long, rtol=0, atol=0)
    assert state._items["tally"].n == 0


def test_a_policy_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="on_divergence"):
        CheckpointOptions(on_divergence="ignore")  # type: ignore[arg-type]
