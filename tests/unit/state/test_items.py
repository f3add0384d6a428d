from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from ckpt_core.dcp import load_value
from ckpt_core.errors import CorruptCheckpointError, IncompatibleCheckpointError, UnsafeCheckpointError
from ckpt_core.state._items import decode_items, encode_items, load_item, pickled_key


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
    assert json.loads(encode_items({}).content) == {"format_version": 2, "items": {}, "pickled": []}


def scheduled(rates: list[float], make: Callable[[Any], Any]) -> Any:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return make(torch.optim.SGD(groups, lr=1.0))


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, partial(pow, 0.5)),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 10),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [lr_scheduler.ConstantLR(optimizer), lr_scheduler.StepLR(optimizer, 2)],
            milestones=[1],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_a_schedule_follows_parameters_that_are_cut_into_other_groups(make):
    saved = scheduled([0.1, 0.1, 0.1], make)
    saved.step()
    live = scheduled([0.1], make)
    for group in live.optimizer.param_groups:
        group["lr"] = saved.get_last_lr()[0]  # as the optimizer's state has it
    load_item("scheduler", live, saved.state_dict())
    for _ in range(3):
        assert live.get_last_lr() == saved.get_last_lr()[:1]
        live.step()
        saved.step()


def test_a_schedule_of_groups_with_different_rates_is_refused_for_another_number_of_groups():
    saved = scheduled([0.1, 0.2], lambda optimizer: lr_scheduler.StepLR(optimizer, 2))
    live = scheduled([0.1], lambda optimizer: lr_scheduler.StepLR(optimizer, 2))
    before = live.state_dict()
    with pytest.raises(IncompatibleCheckpointError, match="2 parameter groups with different values"):
        load_item("scheduler", live, saved.state_dict())
    assert live.state_dict() == before
