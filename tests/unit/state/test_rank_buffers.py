from __future__ import annotations

import pytest
import torch

from ckpt_core.state._items import RankBuffers, decode_buffers, encode_buffers, put_buffers

KEY, OTHER = ("", "model.norm.running_mean"), ("part", "a.b")


def test_equal_tensors_have_equal_digests_whatever_their_strides():
    tensor = torch.arange(12.0).reshape(3, 4)
    assert RankBuffers({KEY: tensor.t().contiguous().t()}).digests() == RankBuffers({KEY: tensor}).digests()


def test_digests_tell_a_single_bit_from_none():
    tensor = torch.zeros(5)
    changed = tensor.clone()
    changed[3] = torch.finfo(torch.float32).tiny
    assert RankBuffers({KEY: tensor}).digests() != RankBuffers({KEY: changed}).digests()


def test_tensors_without_elements_and_conjugate_views_have_digests():
    base = torch.complex(torch.ones(2), torch.ones(2))
    conjugate = RankBuffers({KEY: torch.empty(0), ("", "c"): base.conj()})
    resolved = RankBuffers({KEY: torch.empty(0), ("", "c"): base.conj().resolve_conj()})
    assert conjugate.digests() == resolved.digests()


@pytest.mark.parametrize("num_keys", [2, 200], ids=["told singly", "told as one"])
def test_what_differs_from_the_reference_is_kept_and_nothing_is_forgotten(num_keys):
    reference = {("", f"b{i}"): torch.full((3,), i) for i in range(num_keys)}
    own = {key: value.clone() for key, value in reference.items()}
    assert RankBuffers(own).differing(RankBuffers(reference).digests()) == frozenset()
    own["", "b1"][0] = -1
    differing = RankBuffers(own).differing(RankBuffers(reference).digests())
    assert ("", "b1") in differing
    assert len(differing) == (1 if num_keys == 2 else num_keys)


def test_the_message_of_digests_does_not_grow_with_the_model():
    many = {("", f"b{i}"): torch.ones(1) for i in range(5000)}
    assert len(RankBuffers(many).digests()) <= 512


def test_copies_do_not_follow_the_training():
    live = torch.ones(3)
    values = RankBuffers({KEY: live})
    before = values.digests()
    live.zero_()
    assert values.digests() == before == RankBuffers({KEY: torch.ones(3)}).digests()


def test_a_rank_that_does_not_differ_writes_no_file():
    assert encode_buffers(3, {KEY: torch.ones(2)}, ()) == {}


def decoded(files: dict[str, bytes], rank: int) -> dict:
    name = f"local-{rank:05d}.json"
    return decode_buffers(files[name], name)


def test_a_rank_reads_back_only_its_own():
    files = {
        **encode_buffers(0, {KEY: torch.tensor([1.0, 2.0]), OTHER: torch.ones(1)}, {KEY}),
        **encode_buffers(1, {KEY: torch.tensor(7)}, {KEY}),
    }
    own = decoded(files, 0)
    assert list(own) == [KEY]
    assert own[KEY].tolist() == [1, 2]
    assert decoded(files, 1)[KEY].item() == 7
    assert len(files) == 2


def test_what_a_rank_keeps_is_its_value_at_the_save():
    live = torch.zeros(3)
    files = encode_buffers(0, {KEY: live}, {KEY})
    live.add_(1)
    assert decoded(files, 0)[KEY].tolist() == [0, 0, 0]


def test_a_large_tensor_is_kept_too():
    live = torch.arange(5 << 20, dtype=torch.int32)
    own = decoded(encode_buffers(0, {KEY: live}, {KEY}), 0)
    assert torch.equal(own[KEY], live)


def test_own_values_replace_those_loaded_and_only_where_they_were_asked_for():
    loaded = {KEY[1]: torch.zeros(2), "unrelated": torch.zeros(2), "shape": torch.zeros(3), "plain": None}
    own = {
        KEY: torch.ones(2),
        ("", "shape"): torch.ones(2),
        ("", "plain"): torch.ones(2),
        ("", "absent"): torch.ones(2),
        ("part", "unrelated"): torch.ones(2),
    }
    put_buffers(own, "", loaded)
    assert loaded[KEY[1]].tolist() == [1, 1]
    assert loaded["unrelated"].tolist() == [0, 0]
    assert loaded["shape"].tolist() == [0, 0, 0]
    assert loaded["plain"] is None
