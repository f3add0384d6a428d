"""Ranks that hold different parts of one training: a rank needs only the names that it has."""

from __future__ import annotations

import pytest

from ckpt_core import CheckpointManager
from tests.distributed.pipeline_jobs import (
    Layers,
    assert_same,
    contents,
    fewer_ranks,
    four_ranks,
    one_to_two,
    state_of,
    train,
    two_ranks,
)
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("pipeline")
    run_ranks(two_ranks, 2, str(root))
    return root


def test_stages_experts_and_a_critic_resume_where_they_were_saved(root):
    assert (root / "stages" / "adam").is_dir()


def test_the_whole_model_resumes_from_stages(root):
    """Two stages onto one rank."""
    expected, live = state_of(Layers([0, 1, 2])), state_of(Layers([0, 1, 2], seed=1))
    train(expected, 2)
    with CheckpointManager(root / "stages" / "adam") as checkpoints:
        assert checkpoints.resume(live) == 2
    assert_same(contents(live), contents(expected))
    train(live)
    train(expected)
    assert_same(contents(live), contents(expected))


def test_stages_resume_from_the_whole_model(tmp_path):
    state = state_of(Layers([0, 1, 2]))
    train(state, 2)
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(2, state).result()
    first, second = run_ranks(one_to_two, 2, str(tmp_path))
    assert_same({**second, **first}, contents(state))


@pytest.mark.slow
def test_sharded_stages_resume_on_the_same_ranks_and_on_fewer(tmp_path):
    run_ranks(four_ranks, 4, str(tmp_path))
    first, second = run_ranks(fewer_ranks, 2, str(tmp_path))
    expected = state_of(Layers([0, 1, 2]))
    train(expected, 2)
    assert_same({**second, **first}, contents(expected))
