from __future__ import annotations

import pytest
import torch

from ckpt_core.errors import CheckpointError
from ckpt_core.staging import HostStager


def test_copies_do_not_follow_later_changes():
    live = torch.arange(4.0)
    staged = HostStager().stage({"w": live})
    live.add_(100)
    assert staged.tensors["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base.reshape(3, 4).t(),
        lambda base: base[::3],
        lambda base: base[5:9],
        lambda base: base[:1].expand(3, 2),
        lambda base: torch.complex(base, base).conj(),
        lambda base: torch.complex(base, base).conj().imag,
        lambda base: base[0],
        lambda base: base[:0],
        lambda base: torch.nn.Parameter(base.clone()),
    ],
    ids=["transposed", "strided", "offset", "expanded", "conjugate", "negative", "0-d", "empty", "parameter"],
)
def test_a_copy_is_plain_contiguous_and_equal_whatever_the_view(view):
    live = view(torch.arange(12.0))
    copy = HostStager().stage({"w": live}).tensors["w"]
    assert torch.equal(copy, live.detach())
    assert copy.is_contiguous()
    assert not (copy.is_conj())
    assert not (copy.is_neg())
    assert not (copy.requires_grad)
    assert copy.untyped_storage().nbytes() == live.numel() * live.element_size()


def test_memory_is_used_again_from_save_to_save():
    stager = HostStager()
    first = stager.stage({"a": torch.zeros(100), "b": torch.zeros(3, 5)})
    places = {key: tensor.data_ptr() for key, tensor in first.tensors.items()}
    first.release()
    second = stager.stage({"a": torch.ones(100), "b": torch.ones(3, 5)})
    assert {key: tensor.data_ptr() for key, tensor in second.tensors.items()} == places
    assert second.tensors["a"].sum() == 100


def test_copies_that_are_still_being_written_are_never_overwritten():
    stager = HostStager()
    first = stager.stage({"a": torch.zeros(4)})
    with pytest.raises(CheckpointError, match="wait for the save in flight"):
        stager.stage({"a": torch.ones(4)})
    assert first.tensors["a"].tolist() == [0, 0, 0, 0]
    first.release()
    assert stager.stage({"a": torch.ones(4)}).tensors["a"].tolist() == [1, 1, 1, 1]


def test_shapes_and_dtypes_may_change_between_saves():
    stager = HostStager()
    for live in (torch.ones(4), torch.full((2, 3), 7), torch.zeros((), dtype=torch.bool)):
        staged = stager.stage({"a": live})
        assert torch.equal(staged.tensors["a"], live)
        assert staged.tensors["a"].dtype == live.dtype
        staged.release()


def test_memory_of_tensors_that_are_gone_is_not_kept():
    stager = HostStager()
    stager.stage({"a": torch.zeros(1000), "b": torch.zeros(1)}).release()
    staged = stager.stage({"b": torch.zeros(1)})
    assert set(staged.tensors) == {"b"}
    assert staged.size_bytes == 4


def test_a_failed_stage_does_not_block_the_next():
    stager = HostStager()
    with pytest.raises(NotImplementedError):
        stager.stage({"a": torch.ones(1), "b": torch.empty(2, device="meta")})
    assert stager.stage({"a": torch.ones(2)}).tensors["a"].tolist() == [1, 1]


def test_the_size_is_that_of_all_copies():
    staged = HostStager().stage({"a": torch.zeros(10), "b": torch.zeros(3, dtype=torch.int8)})
    assert staged.size_bytes == 43
