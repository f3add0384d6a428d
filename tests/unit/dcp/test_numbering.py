from __future__ import annotations

from typing import Any

from ckpt_core.dcp import Part, decide

GROUPS = ("optimizer", "param_groups")


def written(*ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Path -> who writes it, of optimizers with these groups."""
    parts = []
    for groups in ranks:
        part = Part()
        part.update({"optimizer": {"param_groups": groups} if groups else {}})
        parts.append(part)
    names = [{GROUPS: [tuple(group["params"]) for group in groups]} for groups in ranks]
    decision = decide([part.local_plan() for part in parts], groups=names)
    found: dict[str, Any] = {}
    for rank, (part, task) in enumerate(zip(parts, decision.tasks, strict=True)):
        part.accept(task, rank)
        for index, value in zip(part.value_indices, part.values(), strict=True):
            assert index.fqn not in found
            found[index.fqn] = rank
            assert value
    index = decision.planned.index
    assert found.keys() == set(index.names)
    assert [".".join(map(str, path)) for path in index.paths] == index.names
    return {name.removeprefix("optimizer.param_groups."): rank for name, rank in found.items()}


def group(*names: str) -> dict[str, Any]:
    return {"lr": 0.1, "params": list(names)}


def test_groups_that_all_ranks_have_are_written_once():
    found = written([group("a"), group("b")], [group("a"), group("b")])
    assert found.keys() == {"0.lr", "0.params", "1.lr", "1.params"}


def test_groups_of_other_parameters_get_numbers_of_their_own():
    found = written([group("a"), group("b")], [group("c"), group("b"), group("d")])
    assert found.keys() == {f"{n}.{key}" for n in range(4) for key in ("lr", "params")}
    assert {found["0.lr"], found["2.lr"], found["3.params"]} == {0, 1}
    assert found["2.params"] == found["3.lr"] == 1


def test_the_same_groups_in_another_order_are_the_same():
    assert written([group("a"), group("b")], [group("b"), group("a")]).keys() == {
        "0.lr",
        "0.params",
        "1.lr",
        "1.params",
    }


def test_a_rank_without_an_optimizer_changes_nothing():
    assert written([], [group("a")]).keys() == {"0.lr", "0.params"}


def test_empty_groups_stay_apart():
    found = written([group(), group("a")], [group(), group("b")])
    assert found.keys() == {f"{n}.{key}" for n in range(3) for key in ("lr", "params")}
