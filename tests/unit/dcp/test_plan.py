from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt_core.dcp import PartPlanner, decide, lowest_rank_only
from ckpt_core.errors import ConfigError


def plans_of(*trees: dict[str, Any]):
    return [PartPlanner(tree).local_plan() for tree in trees]


def keys(plan: Any) -> list[str]:
    return sorted(item.index.fqn for item in plan.items)


def quantised() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (quantised, "quantised.*dequantize"),
        (lambda: torch.eye(3).to_sparse(), "torch.sparse_coo.*to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "torch.sparse_csr.*to_dense"),
        (lambda: torch.empty(3, device="meta"), "meta device.*materialise"),
        (lambda: nn.Parameter(torch.empty(3, device="meta")), "meta device.*materialise"),
    ],
    ids=["quantised", "coo", "csr", "meta", "meta parameter"],
)
def test_tensors_that_no_checkpoint_can_hold_are_refused_by_name_with_the_remedy(make, told):
    with pytest.raises(ConfigError, match=f"layer.0.weight is .*{told}"):
        PartPlanner({"layer": [{"weight": make()}]}).local_plan()


def test_replicas_are_written_once_and_shared_out():
    tree = {f"w{i}": torch.ones(10) for i in range(6)}
    plans, metadata = decide(plans_of(tree, tree, tree))
    assert sorted(key for plan in plans for key in keys(plan)) == sorted(tree)
    assert all(plan.items for plan in plans)
    assert sorted(metadata.state_dict_metadata) == sorted(tree)


def test_entries_of_one_rank_only_are_kept_beside_those_of_all():
    plans, metadata = decide(plans_of({"a": torch.ones(1), "x": 1}, {"a": torch.ones(1), "y": 2}))
    assert sorted(metadata.state_dict_metadata) == ["a", "x", "y"]
    assert "y" in keys(plans[1])
    assert "x" in keys(plans[0])
    assert metadata.planner_data == {"a": ("a",), "x": ("x",), "y": ("y",)}


def test_the_lowest_rank_that_has_a_key_writes_it():
    few, many = {"only": torch.ones(1)}, {"only": torch.ones(1), "stats": torch.ones(9)}
    kept = lowest_rank_only(plans_of(few, many, many), {"stats"})
    assert [keys(plan) for plan in kept] == [["only"], ["only", "stats"], ["only"]]


def test_other_keys_are_left_to_dcp():
    tree = {"a": torch.ones(1), "b": torch.ones(1)}
    plans = plans_of(tree, tree)
    assert [plan.items for plan in lowest_rank_only(plans, ())] == [plan.items for plan in plans]


def test_the_lowest_rank_writes_even_where_dcp_would_balance_the_load():
    tree = {f"w{i}": torch.ones(10) for i in range(6)}
    plans, _ = decide(lowest_rank_only(plans_of(tree, tree), set(tree)))
    assert keys(plans[0]) == sorted(tree)
    assert not plans[1].items


def test_the_paths_of_leaves_survive_the_choice_of_ranks():
    tree = {"deep": {"a.b": torch.ones(1)}}
    _, metadata = decide(lowest_rank_only(plans_of(tree, tree), {"deep.a.b"}))
    assert metadata.planner_data == {"deep.a.b": ("deep", "a.b")}


def test_a_resolved_plan_holds_live_tensors_and_serialised_values():
    tree = {"w": torch.arange(3.0), "n": 5}
    planner = PartPlanner(tree)
    (plan,), _ = decide([planner.local_plan()])
    resolved = planner.resolve(plan)
    (shard,) = resolved.shards.values()
    assert shard.data_ptr() == tree["w"].data_ptr()
    assert [index.fqn for index in resolved.values] == ["n"]


def test_values_are_serialised_when_resolved_and_not_later():
    tree = {"n": [1, 2]}
    tree_live = {"n": tree["n"], "t": torch.ones(1)}
    planner = PartPlanner(tree_live)
    (plan,), _ = decide([planner.local_plan()])
    before = dict(planner.resolve(plan).values)
    tree["n"].append(3)
    assert before == dict(PartPlanner({"n": [1, 2], "t": torch.ones(1)}).resolve(plan).values)


def test_states_that_are_planned_alike_have_equal_fingerprints():
    same = [{"w": torch.ones(2, 3), "n": 5}, {"w": torch.zeros(2, 3), "n": [6]}]
    first, second = (PartPlanner(tree).fingerprint() for tree in same)
    assert first == second


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(3, 2), "n": 5},
        {"w": torch.ones(2, 3, dtype=torch.bfloat16), "n": 5},
        {"w": torch.ones(2, 3), "n": torch.ones(1)},
        {"w": torch.ones(2, 3), "m": 5},
        {"w": torch.ones(2, 3)},
        {"w": torch.ones(2, 3).to_sparse(), "n": 5},
        {"n": 5, "w": torch.ones(2, 3)},
    ],
    ids=["shape", "dtype", "kind", "key", "fewer", "layout", "order"],
)
def test_states_that_are_planned_differently_have_other_fingerprints(other):
    assert PartPlanner(other).fingerprint() != PartPlanner({"w": torch.ones(2, 3), "n": 5}).fingerprint()


def test_equal_names_from_other_paths_are_planned_anew():
    flat, nested = PartPlanner({"a.b": torch.ones(1)}), PartPlanner({"a": {"b": torch.ones(1)}})
    assert flat.fingerprint() != nested.fingerprint()
