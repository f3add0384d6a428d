"""Large tensors inside small state: out of it, to be stored with the weights, and back in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

_MARK = "$tensor"
_SMALL_BYTES = 1 << 16


def hoist(value: Any, path: str, found: dict[str, torch.Tensor]) -> Any:
    """`value` with every large tensor replaced by a reference; the tensors go into `found` by their path."""
    if _is_large(value):
        found[path] = value
        return {_MARK: path}
    return _rebuild(value, lambda each, key: hoist(each, f"{path}/{key}", found))


def plant(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The reverse of `hoist`."""
    if isinstance(value, dict) and value.keys() == {_MARK}:
        return tensors[value[_MARK]]
    return _rebuild(value, lambda each, _: plant(each, tensors))


def _is_large(value: Any) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    # A DTensor or ShardedTensor is a shard on every rank, whatever its size.
    return type(value) not in {torch.Tensor, torch.nn.Parameter} or value.nbytes > _SMALL_BYTES


def _rebuild(value: Any, convert: Callable[[Any, Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: convert(each, key) for key, each in value.items()}
    if type(value) in {list, tuple}:
        return type(value)(convert(each, index) for index, each in enumerate(value))
    return value
