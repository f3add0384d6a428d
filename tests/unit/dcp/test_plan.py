from __future__ import annotations

import io
import json
import weakref
from collections.abc import Collection, Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint._traverse import traverse_state_dict

from ckpt_core.dcp import Part, decide
from ckpt_core.dcp._plan import Leaves
from ckpt_core.errors import ConfigError


def part_of(tree: dict[str, Any]) -> Part:
    part = Part()
    part.update(tree)
    return part


def planned(tree: dict[str, Any]) -> Part:
    """A part whose plan is agreed, on one rank."""
    part = part_of(tree)
    (task,) = decide([part.local_plan()]).tasks
    part.accept(task)
    return part


def plans_of(*trees: dict[str, Any]):
    return [part_of(tree).local_plan() for tree in trees]


def shared_out(trees: Sequence[dict[str, Any]], uneven: Collection[str] = ()) -> list[list[str]]:
    """What each rank is to write, by name."""
    plans = plans_of(*trees)
    found = zip(plans, decide(plans, uneven).tasks, strict=True)
    return [
        sorted(".".join(map(str, paths[at])) for at in task.places(len(paths)))
        for plan, task in found
        for paths in (plan.outline.paths,)
    ]


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
        part_of({"layer": [{"weight": make()}]}).local_plan()


def test_replicas_are_written_once_and_shared_out():
    tree = {f"w{i}": torch.ones(10) for i in range(6)}
    written = shared_out([tree] * 3)
    assert sorted(chain.from_iterable(written)) == sorted(tree)
    assert all(written)


def test_entries_of_one_rank_only_are_kept_beside_those_of_all():
    trees = [{"a": torch.ones(1), "x": 1}, {"a": torch.ones(1), "y": 2}]
    index = decide(plans_of(*trees)).planned.index
    assert index.names == ["a", "x", "y"]
    assert index.paths == [("a",), ("x",), ("y",)]
    first, second = shared_out(trees)
    assert "x" in first
    assert "y" in second


def test_the_lowest_rank_that_has_an_uneven_key_writes_it():
    few, many = {"only": torch.ones(1)}, {"only": torch.ones(1), "stats": torch.ones(9)}
    assert ["stats" in names for names in shared_out([few, many, many], {"stats"})] == [False, True, False]


def test_the_lowest_rank_writes_uneven_keys_even_where_the_load_would_be_balanced():
    tree = {f"w{i}": torch.ones(10) for i in range(6)}
    assert shared_out([tree, tree], set(tree)) == [sorted(tree), []]


def test_a_rank_that_writes_all_it_has_is_told_in_one_word():
    assert all(task.share is None for task in decide(plans_of({"a": torch.ones(1)}, {"b": 1})).tasks)


def test_the_paths_of_leaves_survive_the_choice_of_ranks():
    tree = {"deep": {"a.b": torch.ones(1)}}
    index = decide(plans_of(tree, tree), {"deep.a.b"}).planned.index
    assert (index.names, index.paths) == (["deep.a.b"], [("deep", "a.b")])


def test_an_accepted_plan_gives_live_tensors_and_serialised_values():
    tree = {"w": torch.arange(3.0), "n": 5}
    part = planned(tree)
    (shard,) = part.shards()
    assert shard.data_ptr() == tree["w"].data_ptr()
    assert [index.fqn for index, _, _ in part.specs] == ["w"]
    assert [index.fqn for index in part.value_indices] == ["n"]


def test_values_are_those_of_the_moment_and_not_of_later():
    tree = {"n": [1, 2], "lr": 0.1, "zero": 0.0, "t": torch.ones(1)}
    part = planned(tree)
    before = part.values()
    tree["n"].append(3)
    assert [torch.load(io.BytesIO(value)) for value in before] == [[1, 2], 0.1, 0.0]
    tree |= {"lr": 0.01, "zero": -0.0}
    assert part.update(tree)
    after = [torch.load(io.BytesIO(value)) for value in part.values()]
    assert str(after) == str([[1, 2, 3], 0.01, -0.0])


def test_a_value_that_is_equal_but_of_another_type_is_saved_as_it_is():
    tree = {"n": 1}
    part = planned(tree)
    part.values()
    for value in (True, 1.0, 1):
        part.update({"n": value})
        (content,) = part.values()
        assert type(torch.load(io.BytesIO(content))) is type(value)


def test_states_that_are_planned_alike_need_no_new_plan():
    part = planned({"w": torch.ones(2, 3), "n": 5})
    assert part.update({"w": torch.zeros(2, 3), "n": [6]})
    assert part.update({"w": nn.Parameter(torch.zeros(2, 3)), "n": None})


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
def test_states_that_are_planned_differently_need_a_new_plan(other):
    assert not planned({"w": torch.ones(2, 3), "n": 5}).update(other)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a.b": torch.ones(1)}, {"a": {"b": torch.ones(1)}}),
        ({"a": [torch.ones(1)]}, {"a": {"0": torch.ones(1)}}),
    ],
    ids=["dots", "indices"],
)
def test_equal_names_from_other_paths_are_planned_anew(first, second):
    assert not planned(first).update(second)


_NESTED = st.recursive(
    st.sampled_from([1, None, "x", (1, 2), (torch.ones(1),)]) | st.builds(torch.ones, st.just(1)),
    lambda each: st.lists(each, max_size=3) | st.dictionaries(st.sampled_from("abc"), each, max_size=3),
    max_leaves=12,
)


@given(_NESTED)
def test_leaves_are_those_that_dcp_sees_in_its_order(inner):
    found: list[tuple[Any, ...]] = []
    traverse_state_dict({"top": inner}, lambda path, value: found.append((path, value)))
    leaves = Leaves({"top": inner})
    assert len(leaves.values) == len(found)
    assert all(own is value for own, (_, value) in zip(leaves.values, found, strict=True))


def _form_of(value):
    """Containers and keys alone, where every leaf is None."""
    if isinstance(value, dict):
        return {key: _form_of(each) for key, each in value.items()}
    held = [] if not isinstance(value, list) else value
    if any(isinstance(each, torch.Tensor) or _form_of(each) is not None for each in held):
        return [_form_of(each) for each in held]
    return None


@given(_NESTED, _NESTED)
def test_keys_are_equal_where_containers_and_names_are_and_nowhere_else(one, other):
    trees = [{"top": one}, {"top": other}]
    forms = [json.dumps(_form_of(tree)) for tree in trees]
    keys = [Leaves(tree).keys for tree in trees]
    assert (keys[0] == keys[1]) == (forms[0] == forms[1])


@pytest.mark.parametrize(
    "other",
    [
        [torch.ones(1), torch.ones(1)],
        {0: torch.ones(1), 1: torch.ones(1), 2: torch.ones(1)},
        {0: torch.ones(1), 1: {2: torch.ones(1)}},
        {0: {1: torch.ones(1)}, 2: torch.ones(1)},
        {1: torch.ones(1), 0: torch.ones(1)},
        {0: torch.ones(1), True: torch.ones(1)},
        {0: torch.ones(1), 1.0: torch.ones(1)},
    ],
)
def test_a_state_of_as_many_tensors_in_another_form_is_planned_anew(other):
    part = planned({"w": {0: torch.ones(1), 1: torch.ones(1)}})
    assert part.update({"w": {0: torch.zeros(1), 1: torch.zeros(1)}})
    assert not part.update({"w": other})


def test_a_part_keeps_no_live_tensor_between_saves():
    tensor = torch.ones(2)
    part = planned({"w": tensor})
    gone = weakref.ref(tensor)
    part.shards()
    part.release()
    del tensor
    assert gone() is None
