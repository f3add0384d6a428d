from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from ckpt_core.dcp import PartPlanner, ResolvedPlan, decide
from ckpt_core.errors import CheckpointError
from ckpt_core.lifecycle._stage import StagedParts, Stager


def resolved(**parts: dict[str, Any]) -> dict[str, ResolvedPlan]:
    found = {}
    for part, tree in parts.items():
        planner = PartPlanner(tree)
        (plan,), _ = decide([planner.local_plan()])
        found[part] = planner.resolve(plan)
    return found


def read(staged: StagedParts, part: str) -> dict[str, torch.Tensor]:
    """The tensors in the image of a part, read from its bytes."""
    image = staged.images[part]
    data = b"".join(bytes(piece) for piece in image.pieces())
    return {
        slot.index.fqn: torch.load(io.BytesIO(data[slot.start : slot.end]), weights_only=True)
        for slot in image.layout.slots
    }


def places(staged: StagedParts) -> list[int]:
    return [target.data_ptr() for image in staged.images.values() for target in image.targets]


def test_copies_do_not_follow_later_changes():
    live = {"w": torch.arange(5.0), "n": [1]}
    staged = Stager().stage(resolved(a=live))
    live["w"].add_(1)
    live["n"].append(2)
    assert read(staged, "a")["w"].tolist() == [0, 1, 2, 3, 4]
    (value,) = staged.values["a"].values()
    assert torch.load(io.BytesIO(value), weights_only=True) == [1]


def test_memory_and_layout_are_used_again_from_save_to_save():
    stager = Stager()
    first = stager.stage(resolved(a={"w": torch.zeros(100)}, b={"v": torch.zeros(3, 5)}))
    before, layouts = places(first), [id(image.layout) for image in first.images.values()]
    first.release()
    second = stager.stage(resolved(a={"w": torch.ones(100)}, b={"v": torch.ones(3, 5)}))
    assert places(second) == before
    assert [id(image.layout) for image in second.images.values()] == layouts
    assert read(second, "a")["w"].sum() == 100


def test_copies_that_are_still_being_written_are_never_overwritten():
    stager = Stager()
    first = stager.stage(resolved(a={"w": torch.zeros(4)}))
    with pytest.raises(CheckpointError, match="wait for the save in flight"):
        stager.stage(resolved(a={"w": torch.ones(4)}))
    assert read(first, "a")["w"].tolist() == [0, 0, 0, 0]
    first.release()
    assert read(stager.stage(resolved(a={"w": torch.ones(4)})), "a")["w"].tolist() == [1, 1, 1, 1]


def test_shapes_dtypes_and_parts_may_change_between_saves():
    stager = Stager()
    for tree in (
        {"w": torch.ones(4)},
        {"w": torch.full((200, 300), 7)},
        {"w": torch.zeros((), dtype=torch.bool), "x": torch.ones(2)},
        {"x": torch.ones(0)},
        {},
        {"w": torch.ones(4)},
    ):
        staged = stager.stage(resolved(a=tree))
        found = read(staged, "a")
        assert found.keys() == tree.keys()
        for name, tensor in tree.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
        staged.release()


def test_a_copy_that_fails_does_not_block_the_next():
    stager = Stager()
    plans = resolved(a={"w": torch.ones(2)})
    (index,) = plans["a"].shards
    broken = ResolvedPlan(plan=plans["a"].plan, shards={index: torch.empty(2, device="meta")}, values={})
    with pytest.raises((NotImplementedError, RuntimeError)):
        stager.stage({"a": broken})
    assert read(stager.stage(plans), "a")["w"].tolist() == [1, 1]


def test_a_state_without_tensors_is_staged_too():
    staged = Stager().stage(resolved(a={"n": 1}))
    assert staged.size_bytes == 0
    assert read(staged, "a") == {}
    assert len(staged.values["a"]) == 1


def test_memory_is_given_back_when_closed_and_taken_again():
    stager = Stager()
    stager.stage(resolved(a={"w": torch.ones(1 << 20)})).release()
    stager.close()
    assert read(stager.stage(resolved(a={"w": torch.ones(3)})), "a")["w"].tolist() == [1, 1, 1]
