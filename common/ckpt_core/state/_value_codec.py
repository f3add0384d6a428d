"""Plain Python values as exact JSON, for small items: no pickle, no execution.

Values without a JSON type are tagged: `{"$type": "tuple", "value": […]}`. Subclasses of dict are decoded as
dict, tensors on the CPU; all other values are decoded equal and of the same type.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from ckpt_core.errors import CheckpointError, CorruptCheckpointError
from ckpt_core.state._tensors import dtype_name, dtype_named

MAX_ARRAY_BYTES = 16 << 20
"""Larger arrays are not encoded as JSON."""

_TAG = "$type"
_MAX_DEPTH = 100


class NotEncodableError(CheckpointError, TypeError):
    """JSON cannot hold this value exactly; the message names it by its path."""


def encode(value: Any) -> Any:
    """Convert `value` for `json.dumps`.

    Raises:
        NotEncodableError: `decode` could not restore some of it.
    """
    return _encode(value, "", 0)


_AS_THEY_ARE = frozenset({bool, int, str, type(None)})


def _encode(value: Any, path: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise NotEncodableError(
            f"{path[:200]}… is nested deeper than {_MAX_DEPTH} levels, or contains itself"
        )
    kind = type(value)
    if value is None or kind in {bool, int, str}:
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", repr(value))
    if kind is list:
        return _encode_each(value, path, depth)
    if isinstance(value, dict):
        return _encode_dict(value, path, depth + 1)
    if kind in {tuple, set, frozenset}:
        items = _encode_each(value, path, depth)
        # Ranks must agree on shared items byte by byte, and sets have no order of their own.
        return _tagged(kind.__name__, items if kind is tuple else sorted(items, key=json.dumps))
    return _encode_leaf(value, path)


def _encode_each(values: Collection[Any], path: str, depth: int) -> list[Any]:
    # The state of a random number generator is six hundred integers, encoded in every save.
    if _AS_THEY_ARE.issuperset(map(type, values)):
        return list(values)
    return [_encode(each, f"{path}[{i}]", depth + 1) for i, each in enumerate(values)]


def _encode_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(each, f"{path}.{key}", depth) for key, each in value.items()}
    pairs = [
        [_encode(key, f"{path} key {key!r}", depth), _encode(each, f"{path}[{key!r}]", depth)]
        for key, each in value.items()
    ]
    return _tagged("dict", pairs)


def _encode_leaf(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in {torch.Tensor, torch.nn.Parameter}:
        return _encode_tensor(value, path)
    if kind is np.ndarray or isinstance(value, np.generic):
        return _encode_array(value, path)
    if isinstance(value, PurePath):
        return _tagged("path", str(value))
    if kind in _ENCODERS:
        name, encoder = _ENCODERS[kind]
        return _tagged(name, encoder(value))
    raise NotEncodableError(
        f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold"
    )


def _tagged(name: str, value: Any) -> dict[str, Any]:
    return {_TAG: name, "value": value}


def _encode_tensor(value: torch.Tensor, path: str) -> Any:
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise NotEncodableError(f"{path} is a tensor without plain memory ({value.layout}, {value.device})")
    _check_size(value.numel() * value.element_size(), path)
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = _to_text(flat.numpy().tobytes())
    return _tagged("tensor", {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": data})


def _encode_array(value: Any, path: str) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None or value.dtype.subdtype is not None:
        raise NotEncodableError(f"{path} is a numpy array of {value.dtype}, which JSON cannot hold")
    _check_size(value.nbytes, path)
    content = {"dtype": value.dtype.str, "shape": list(value.shape), "data": _to_text(value.tobytes())}
    return _tagged("ndarray" if isinstance(value, np.ndarray) else "numpy_scalar", content)


def _check_size(size_bytes: int, path: str) -> None:
    if size_bytes > MAX_ARRAY_BYTES:
        raise NotEncodableError(f"{path} has {size_bytes} bytes, too many for JSON ({MAX_ARRAY_BYTES})")


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_ENCODERS: Mapping[type, tuple[str, Callable[[Any], Any]]] = {
    bytes: ("bytes", _to_text),
    torch.Size: ("size", list),
    torch.dtype: ("dtype", dtype_name),
    torch.device: ("device", str),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
}


def decode(encoded: Any) -> Any:
    """Convert back to the value that `encode` was given.

    Raises:
        CorruptCheckpointError: it is no output of `encode`.
    """
    try:
        return _decode(encoded, 0)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        OverflowError,
        RuntimeError,
        binascii.Error,
    ) as error:
        raise CorruptCheckpointError(f"an item of the checkpoint is not what was encoded: {error}") from error


def _decode(encoded: Any, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH + 2:
        raise ValueError("nested too deeply")
    if isinstance(encoded, list):
        return [_decode(each, depth + 1) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TAG not in encoded:
        return {key: _decode(each, depth + 1) for key, each in encoded.items()}
    name, value = encoded[_TAG], encoded["value"]
    if name in _CONTAINERS:
        return _CONTAINERS[name](_decode(value, depth + 1))
    return _DECODERS[name](value)


def _decode_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = dtype_named(value["dtype"]), _shape(value["shape"])
    data = bytearray(base64.b64decode(value["data"], validate=True))
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a tensor of shape {shape} and dtype {dtype}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _decode_array(value: Mapping[str, Any]) -> Any:
    dtype, shape = np.dtype(str(value["dtype"])), _shape(value["shape"])
    data = base64.b64decode(value["data"], validate=True)
    if dtype.hasobject or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} and dtype {dtype}")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"not a shape: {value!r}")
    return tuple(value)


def _decode_device(value: str) -> torch.device:
    return torch.device(value)


_CONTAINERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
}
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "tensor": _decode_tensor,
    "ndarray": _decode_array,
    "numpy_scalar": lambda value: _decode_array(value)[()],
    "size": lambda value: torch.Size(_shape(value)),
    "dtype": dtype_named,
    "device": _decode_device,
    "timedelta": lambda value: timedelta(*value),
    "path": Path,
}
