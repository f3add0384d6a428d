"""Plain Python values as exact JSON, for small items: no pickle, no execution.

Values without a JSON type are tagged: `{"$type": "tuple", "value": […]}`. Subclasses of dict are decoded as
dict, tensors on the CPU; all other values are decoded equal and of the same type.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping, Sequence
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
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, dict):
        return _encode_dict(value, path, depth + 1)
    if kind in {list, tuple, set, frozenset}:
        # The state of a random number generator is six hundred integers, encoded in every save.
        items = list(value)
        if not _AS_THEY_ARE.issuperset(map(type, items)):
            items = [_encode(each, f"{path}[{i}]", depth + 1) for i, each in enumerate(items)]
        # Ranks must agree on shared items byte by byte, and sets have no order of their own.
        items = items if kind in {list, tuple} else sorted(items, key=json.dumps)
        return items if kind is list else {_TAG: kind.__name__, "value": items}
    return _encode_leaf(value, path)


def _encode_leaf(value: Any, path: str) -> Any:
    kind = type(value)
    for base, name, encoder in _ENCODERS:
        if kind is base or (base in _WITH_SUBCLASSES and isinstance(value, base)):
            try:
                return {_TAG: name, "value": encoder(value)}
            except NotEncodableError as error:
                raise NotEncodableError(f"{path or 'the value'} {error}") from error
    raise NotEncodableError(
        f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold"
    )


def _encode_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(each, f"{path}.{key}", depth) for key, each in value.items()}
    pairs = [
        [_encode(key, f"{path} key {key!r}", depth), _encode(each, f"{path}[{key!r}]", depth)]
        for key, each in value.items()
    ]
    return {_TAG: "dict", "value": pairs}


def _encode_tensor(value: torch.Tensor) -> Any:
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise NotEncodableError(f"is a tensor without plain memory ({value.layout}, {value.device})")
    _check_size(value.numel() * value.element_size())
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = _to_text(flat.numpy().tobytes())
    return {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": data}


def _encode_array(value: Any) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None or value.dtype.subdtype is not None:
        raise NotEncodableError(f"is a numpy array of {value.dtype}, which JSON cannot hold")
    _check_size(value.nbytes)
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": _to_text(value.tobytes())}


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_ARRAY_BYTES:
        raise NotEncodableError(f"has {size_bytes} bytes, too many for JSON ({MAX_ARRAY_BYTES})")


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_WITH_SUBCLASSES = frozenset({np.generic, PurePath})
_ENCODERS: Sequence[tuple[type, str, Callable[[Any], Any]]] = (
    (float, "float", repr),
    (torch.Tensor, "tensor", _encode_tensor),
    (torch.nn.Parameter, "tensor", _encode_tensor),
    (np.ndarray, "ndarray", _encode_array),
    (np.generic, "numpy_scalar", _encode_array),
    (bytes, "bytes", _to_text),
    (PurePath, "path", str),
    (torch.Size, "size", list),
    (torch.dtype, "dtype", dtype_name),
    (torch.device, "device", str),
    (timedelta, "timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
)


def decode(encoded: Any) -> Any:
    """Convert back to the value that `encode` was given.

    Raises:
        CorruptCheckpointError: it is no output of `encode`.
    """
    try:
        return _decode(encoded, 0)
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
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
    return _DECODERS[name](_decode(value, depth + 1) if name in _CONTAINERS else value)


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


_CONTAINERS = frozenset({"tuple", "set", "frozenset", "dict"})
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "float": float,
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "tensor": _decode_tensor,
    "ndarray": _decode_array,
    "numpy_scalar": lambda value: _decode_array(value)[()],
    "size": lambda value: torch.Size(_shape(value)),
    "dtype": dtype_named,
    "device": torch.device,
    "timedelta": lambda value: timedelta(*value),
    "path": Path,
}
