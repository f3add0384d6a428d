from __future__ import annotations

import contextlib
import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict
from datetime import timedelta
from enum import IntEnum
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.state import NotEncodableError, decode, encode
from tests.unit.state.round_trip import assert_equal

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.none() | st.just("$type")
VALUES = st.recursive(
    SCALARS | st.timedeltas(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.sets(st.integers() | st.text(), max_size=4)
        | st.frozensets(st.binary(), max_size=4)
    ),
    max_leaves=20,
)
JSON = st.recursive(
    SCALARS.filter(lambda value: not isinstance(value, bytes)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text() | st.sampled_from(["$type", "value"]), inner, max_size=3)
        | st.fixed_dictionaries(
            {
                "$type": st.sampled_from(["tuple", "set", "dict", "float", "bytes", "tensor", "ndarray"])
                | st.sampled_from(
                    ["numpy_scalar", "size", "dtype", "device", "timedelta", "path", "os.system"]
                ),
                "value": inner
                | st.fixed_dictionaries({"dtype": inner, "shape": inner, "data": inner})
                | st.fixed_dictionaries(
                    {"dtype": st.sampled_from(["float32", "<f4", "O", "V"]), "shape": inner, "data": inner}
                ),
            }
        )
    ),
    max_leaves=10,
)


def through_json(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


@given(VALUES)
def test_plain_values_come_back_equal_and_of_the_same_type(value):
    assert_equal(through_json(value), value)
    assert_equal(through_json(encode(value)), encode(value))


@given(JSON)
def test_hostile_input_gives_a_value_or_a_corrupt_checkpoint(encoded):
    with contextlib.suppress(CorruptCheckpointError):
        decode(encoded)


@pytest.mark.parametrize(
    "encoded",
    [
        {"$type": "tensor", "value": {"dtype": "float32", "shape": [1 << 60], "data": ""}},
        {"$type": "tensor", "value": {"dtype": "nn", "shape": [], "data": "AAAA"}},
        {"$type": "ndarray", "value": {"dtype": "O", "shape": [1], "data": "AAAAAAAAAAA="}},
        {"$type": "ndarray", "value": {"dtype": "<f4", "shape": [-1], "data": "AAAAAA=="}},
        {"$type": "bytes", "value": "not base64!"},
        {"$type": "set", "value": [[1]]},
        {"$type": "posix.system", "value": "true"},
        {"$type": "tuple"},
        {"$type": ["tuple"], "value": []},
        {"$type": "timedelta", "value": [10**12, 0, 0]},
    ],
)
def test_what_was_never_encoded_is_a_corrupt_checkpoint(encoded):
    with pytest.raises(CorruptCheckpointError):
        decode(encoded)


def test_deep_input_is_a_corrupt_checkpoint():
    nested: list = []
    for _ in range(500):
        nested = [nested]
    with pytest.raises(CorruptCheckpointError, match="deep"):
        decode(nested)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_come_back_bit_for_bit(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    found = through_json({"tensor": tensor})["tensor"]
    assert found.dtype == dtype
    assert found.shape == tensor.shape
    assert torch.equal(found.to(torch.complex128), tensor.to(torch.complex128))
    found.zero_()


def test_views_parameters_and_conjugates_are_taken_as_they_look():
    base = torch.arange(6.0).reshape(2, 3)
    for tensor in (base.t(), base[:, 1], torch.nn.Parameter(base), torch.tensor([1 + 2j]).conj()):
        found = through_json(tensor)
        assert torch.equal(found, tensor)
        assert not found.requires_grad


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3).T,
        np.float64(0.1),
        np.int8(-3),
        np.bool_(True),
        np.datetime64("2024-02-29"),
        np.array("text"),
        np.zeros((0, 2)),
    ],
)
def test_numpy_values_come_back(value):
    found = through_json(value)
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert np.array_equal(found, value)


def test_special_values_come_back():
    values = [math.inf, -math.inf, -0.0, 5e-324, torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")]
    values += [timedelta(days=-1, microseconds=1), PurePosixPath("a") / "b", 2**200]
    found = through_json(values)
    assert str(found.pop(8)) == str(values.pop(8))
    assert_equal(found, values)
    assert math.copysign(1, found[2]) == -1
    assert math.isnan(through_json(math.nan))
    assert struct.pack("d", through_json(0.1)) == struct.pack("d", 0.1)


@pytest.mark.parametrize("kind", [OrderedDict, Counter, lambda pairs: defaultdict(list, pairs)])
def test_dict_subclasses_come_back_as_dicts(kind):
    found = through_json(kind({"b": 1, "a": 2}))
    assert type(found) is dict
    assert list(found.items()) == [("b", 1), ("a", 2)]


class Color(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"a": [1, {"b": object()}]}, r"\.a\[1\]\.b is a builtins\.object"),
        ([Color.RED], r"\[0\] is a .*Color"),
        ({"f": test_deep_input_is_a_corrupt_checkpoint}, r"\.f is a builtins\.function"),
        ({(1, 2): torch.zeros(1, device="meta")}, r"\[\(1, 2\)\] is a tensor without plain memory"),
        ({"t": torch.zeros(2, 2).to_sparse()}, r"\.t is a tensor without plain memory"),
        ({"o": np.array([None])}, r"\.o is a numpy array of object"),
        ({"big": torch.zeros(1 << 23)}, r"\.big has 33554432 bytes"),
    ],
)
def test_what_json_cannot_hold_is_named_by_its_path(value, path):
    with pytest.raises(NotEncodableError, match=path):
        encode(value)


def test_a_value_that_contains_itself_is_refused():
    loop: list = []
    loop.append(loop)
    with pytest.raises(NotEncodableError, match="contains itself"):
        encode(loop)
