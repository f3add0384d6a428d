from __future__ import annotations

import json
from collections import OrderedDict
from fractions import Fraction

import numpy as np
import pytest
import torch

from ckpt_core.dcp import load_value
from ckpt_core.errors import CorruptCheckpointError, UnsafeCheckpointError
from ckpt_core.state._items import decode_items, encode_items, pickled_key


def test_plain_values_come_back_equal_without_pickle():
    values = {"rng": {"state": (3, [1, 2], None)}, "step": 7, "lr": float("inf"), "ids": {1, 2}}
    encoded = encode_items(values)
    assert not encoded.pickled
    assert decode_items(encoded.content, "rank-00000.json").values == values


def test_tensors_and_arrays_come_back_equal_without_pickle():
    encoded = encode_items({"t": torch.arange(5, dtype=torch.bfloat16), "a": np.eye(2)})
    decoded = decode_items(encoded.content, "rank-00000.json").values
    assert torch.equal(decoded["t"], torch.arange(5, dtype=torch.bfloat16))
    assert np.array_equal(decoded["a"], np.eye(2))


def test_only_what_json_cannot_hold_goes_through_pickle():
    encoded = encode_items({"odd": Fraction(1, 3), "plain": 1})
    decoded = decode_items(encoded.content, "shared.json")
    assert decoded.values == {"plain": 1}
    assert decoded.pickled == ("odd",)
    assert list(encoded.pickled) == ["odd"]


def test_a_pickled_item_is_refused_unless_pickle_is_allowed():
    content = encode_items({"odd": Fraction(1, 3)}).pickled["odd"]
    with pytest.raises(UnsafeCheckpointError, match=r"item 'odd'.*allow_pickle=True"):
        load_value(content, "item 'odd'", allow_pickle=False)
    assert load_value(content, "item 'odd'", allow_pickle=True) == Fraction(1, 3)


def test_large_tensors_go_beside_json_and_need_no_pickle_to_load():
    encoded = encode_items({"big": torch.zeros(17 << 20, dtype=torch.uint8)})
    assert len(encoded.content) < 1000
    assert load_value(encoded.pickled["big"], "big", allow_pickle=False).numel() == 17 << 20


def test_values_are_those_of_the_moment_of_the_save():
    live = {"counter": [1], "tensor": torch.zeros(2), "odd": [Fraction(1, 2)]}
    encoded = encode_items(live)
    live["counter"].append(2)
    live["tensor"].add_(1)
    live["odd"].append(3)
    decoded = decode_items(encoded.content, "x").values
    assert decoded["counter"] == [1]
    assert decoded["tensor"].tolist() == [0, 0]
    assert load_value(encoded.pickled["odd"], "odd", allow_pickle=True) == [Fraction(1, 2)]


def test_the_same_values_give_the_same_bytes():
    assert encode_items({"s": {"b", "a", "c"}}).content == encode_items({"s": {"c", "b", "a"}}).content


def test_subclasses_of_dict_come_back_as_dict():
    assert decode_items(encode_items({"d": OrderedDict(a=1)}).content, "x").values == {"d": {"a": 1}}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[]",
        b"{}",
        b'{"items": []}',
        b'{"items": {}}',
        b'{"items": {"a": {"$type": "tensor", "value": 3}}, "pickled": []}',
        b'{"items": {"a": {"$type": "posix.system", "value": "id"}}, "pickled": []}',
        b"[" * 100_000,
    ],
    ids=range(9),
)
def test_a_damaged_file_is_corrupt_and_named(content):
    with pytest.raises(CorruptCheckpointError) as caught:
        decode_items(content, "step-000000001/rank-00003.json")
    assert [failure.path for failure in caught.value.failures] == ["step-000000001/rank-00003.json"]
    assert "rank-00003.json" in str(caught.value)


def test_keys_of_ranks_never_collide():
    assert len({pickled_key(s, "rng") for s in ("shared", "rank-00000.json", "rank-00001.json")}) == 3


def test_the_file_says_its_format_version():
    assert json.loads(encode_items({}).content) == {"format_version": 1, "items": {}, "pickled": []}
