from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.lifecycle._local import digests, diverging, encode_local, put_local, read_local
from ckpt_core.storage import MemoryStorage

KEY, OTHER = ("", "model.norm.running_mean"), ("part", "a.b")


def stored(*files: dict[str, bytes]) -> MemoryStorage:
    storage = MemoryStorage()
    storage.make_directory("step")
    for each in files:
        for name, content in each.items():
            storage.write_bytes(f"step/{name}", content)
    return storage


def test_equal_tensors_have_equal_digests_whatever_their_strides():
    tensor = torch.arange(12.0).reshape(3, 4)
    views = {KEY: tensor.t().contiguous().t(), OTHER: tensor}
    assert len(set(digests(views).values())) == 1


def test_digests_tell_a_single_bit_from_none():
    tensor = torch.zeros(5)
    changed = tensor.clone()
    changed[3] = torch.finfo(torch.float32).tiny
    assert digests({KEY: tensor}) != digests({KEY: changed})


def test_tensors_without_elements_and_conjugate_views_have_digests():
    base = torch.complex(torch.ones(2), torch.ones(2))
    found = digests({KEY: torch.empty(0), ("", "c"): base.conj(), ("", "d"): base.conj().resolve_conj()})
    assert found["", "c"] == found["", "d"]


def test_ranks_diverge_from_the_lowest_rank_that_has_the_key():
    ranks = [{KEY: 1}, {KEY: 1, OTHER: 5}, {KEY: 2, OTHER: 5}, {OTHER: 6}, {}]
    assert diverging(ranks) == [frozenset(), frozenset(), {KEY}, {OTHER}, frozenset()]


@given(st.lists(st.dictionaries(st.sampled_from([KEY, OTHER]), st.integers(0, 2)), min_size=1, max_size=5))
def test_every_rank_finds_its_own_value_again(ranks):
    reference: dict[tuple[str, str], int] = {}
    for of_rank in ranks:
        reference = of_rank | reference
    for of_rank, divergent in zip(ranks, diverging(ranks), strict=True):
        assert {key: of_rank[key] if key in divergent else reference[key] for key in of_rank} == of_rank


def test_a_rank_that_does_not_differ_writes_no_file():
    assert encode_local(3, {KEY: torch.ones(2)}, ()) == {}


def test_a_rank_reads_back_only_its_own():
    first = encode_local(0, {KEY: torch.tensor([1.0, 2.0]), OTHER: torch.ones(1)}, {KEY})
    second = encode_local(1, {KEY: torch.tensor(7)}, {KEY})
    storage = stored(first, second)
    own = read_local(storage, "step", 0)
    assert list(own) == [KEY]
    assert own[KEY].tolist() == [1, 2]
    assert read_local(storage, "step", 1)[KEY].item() == 7
    assert read_local(storage, "step", 2) == {}


def test_what_a_rank_keeps_is_its_value_at_the_save():
    live = torch.zeros(3)
    files = encode_local(0, {KEY: live}, {KEY})
    live.add_(1)
    assert read_local(stored(files), "step", 0)[KEY].tolist() == [0, 0, 0]


def test_a_large_tensor_is_kept_too():
    live = torch.arange(5 << 20, dtype=torch.int32)
    own = read_local(stored(encode_local(0, {KEY: live}, {KEY})), "step", 0)
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
    put_local(own, "", loaded)
    assert loaded[KEY[1]].tolist() == [1, 1]
    assert loaded["unrelated"].tolist() == [0, 0]
    assert loaded["shape"].tolist() == [0, 0, 0]
    assert loaded["plain"] is None
