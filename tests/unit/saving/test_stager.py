from __future__ import annotations

import io
from typing import Any, final

import pytest
import torch

from ckpt_core.dcp import Part, decide
from ckpt_core.errors import CheckpointError, ConfigError
from ckpt_core.saving._stager import StagedParts, Stager
from ckpt_core.staging import Arenas


@final
class Saves:
    """Stages one state after another, as saves on one rank do."""

    def __init__(self) -> None:
        self.stager = Stager(Arenas())
        self.parts: dict[str, Part] = {}
        self.generation = 0

    def stage(self, **trees: dict[str, Any]) -> StagedParts:
        self.parts = {name: self.parts.get(name, Part()) for name in trees}
        alike = [self.parts[name].update(tree) for name, tree in trees.items()]
        if not all(alike) or not self.generation:
            self.generation += 1
            for part in self.parts.values():
                (task,) = decide([part.local_plan()]).tasks
                part.accept(task)
        return self.stager.stage(self.parts, self.generation)


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
    staged = Saves().stage(a=live)
    live["w"].add_(1)
    live["n"].append(2)
    assert read(staged, "a")["w"].tolist() == [0, 1, 2, 3, 4]
    (value,) = staged.values["a"].values()
    assert torch.load(io.BytesIO(value), weights_only=True) == [1]


def test_many_tiny_tensors_of_every_form_are_copied_bit_for_bit():
    forms = (
        torch.randn(4),
        torch.randn(3, 5).t(),
        torch.randn(2, 1, 3, 3).contiguous(memory_format=torch.channels_last),
        torch.randn(7, dtype=torch.complex64).conj(),
        torch.randn(6).bfloat16(),
        torch.arange(9) > 3,
        torch.randn(5).to(torch.float8_e4m3fn),
        torch.tensor(2.0),
        torch.empty(0),
        torch.randn(10)[::2],
        torch.randn(1025),
    )
    live = {f"{at}.{number}": form.clone() for number in range(20) for at, form in enumerate(forms)}
    live |= {f"v{number}": torch.randn(10)[number % 2 :: 2] for number in range(1100)}
    saves = Saves()
    for _ in range(2):
        staged = saves.stage(a=live)
        found = read(staged, "a")
        staged.release()
        for name, tensor in live.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name].to(torch.complex128), tensor.to(torch.complex128)), name
            if tensor.dtype == torch.float32:
                tensor.neg_()


def test_a_tiny_shard_of_another_length_than_planned_is_refused():
    saves = Saves()
    live = {f"w{number}": torch.zeros(4) for number in range(20)}
    staged = saves.stage(a=live)
    image = staged.images["a"]
    with pytest.raises(RuntimeError, match="size"):
        image.fill([torch.ones(3), torch.ones(5), *(torch.ones(4) for _ in range(18))], on_host=True)


def test_memory_and_layout_are_used_again_from_save_to_save():
    saves = Saves()
    first = saves.stage(a={"w": torch.zeros(100)}, b={"v": torch.zeros(3, 5)})
    before, layouts = places(first), [id(image.layout) for image in first.images.values()]
    first.release()
    second = saves.stage(a={"w": torch.ones(100)}, b={"v": torch.ones(3, 5)})
    assert places(second) == before
    assert [id(image.layout) for image in second.images.values()] == layouts
    assert read(second, "a")["w"].sum() == 100


def test_copies_that_are_still_being_written_are_never_overwritten():
    saves = Saves()
    first = saves.stage(a={"w": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="wait for the save in flight"):
        saves.stage(a={"w": torch.ones(4)})
    assert read(first, "a")["w"].tolist() == [0, 0, 0, 0]
    first.release()
    assert read(saves.stage(a={"w": torch.ones(4)}), "a")["w"].tolist() == [1, 1, 1, 1]


def test_shapes_dtypes_and_parts_may_change_between_saves():
    saves = Saves()
    for tree in (
        {"w": torch.ones(4)},
        {"w": torch.full((200, 300), 7)},
        {"w": torch.zeros((), dtype=torch.bool), "x": torch.ones(2)},
        {"x": torch.ones(0)},
        {},
        {"w": torch.ones(4)},
    ):
        staged = saves.stage(a=tree)
        found = read(staged, "a")
        assert found.keys() == tree.keys()
        for name, tensor in tree.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)
        staged.release()


def test_a_copy_that_fails_does_not_block_the_next():
    saves = Saves()
    saves.stage(a={"w": torch.ones(2)}).release()
    with pytest.raises(ConfigError, match="meta device"):
        saves.stage(a={"w": torch.empty(2, device="meta")})
    assert read(saves.stage(a={"w": torch.ones(2)}), "a")["w"].tolist() == [1, 1]


def test_a_state_without_tensors_is_staged_too():
    staged = Saves().stage(a={"n": 1})
    assert staged.size_bytes == 0
    assert read(staged, "a") == {}
    assert len(staged.values["a"]) == 1


def test_memory_is_given_back_when_closed_and_taken_again():
    saves = Saves()
    saves.stage(a={"w": torch.ones(1 << 20)}).release()
    saves.stager.close()
    assert read(saves.stage(a={"w": torch.ones(3)}), "a")["w"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("begin", [0, 50])
def test_a_tensor_whose_memory_was_freed_after_it_was_planned_is_refused_by_name(begin: int):
    saves, tensor = Saves(), torch.ones(100)[begin:]
    saves.stage(a={"w": tensor}).release()
    tensor.untyped_storage().resize_(0)
    with pytest.raises(ConfigError, match="no memory any more, first w"):
        saves.stage(a={"w": tensor})
