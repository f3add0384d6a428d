"""The leaves of a nested state dict, fast enough to be looked at in every save.

The same leaves as DCP's planners see: mappings are descended, and lists only when something in them is a
tensor or a container; every other value, a tuple included, is one leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

_KEY, _INDEX = "\x1e", "\x1f"


@final
class Leaves:
    """Names, values and kinds of all leaves, in order.

    Attributes:
        paths: one text per leaf that is unique even where DCP's names are not, and tells keys from indices.
        values: the leaves.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.paths: list[str] = []
        self.values: list[Any] = []
        self._walk("", tree)

    def names(self) -> list[str]:
        """DCP's flattened names."""
        return [path[1:].replace(_KEY, ".").replace(_INDEX, ".") for path in self.paths]

    def _walk(self, prefix: str, tree: Mapping[Any, Any]) -> None:
        paths, values = self.paths, self.values
        for key, value in tree.items():
            if isinstance(value, torch.Tensor):
                paths.append(f"{prefix}{_KEY}{key}")
                values.append(value)
            else:
                self._take(f"{prefix}{_KEY}{key}", value)

    def _take(self, path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            self._walk(path, value)
        elif _is_leaf(value):
            self.paths.append(path)
            self.values.append(value)
        else:
            for index, each in enumerate(value):
                self._take(f"{path}{_INDEX}{index}", each)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(isinstance(each, torch.Tensor) or not _is_leaf(each) for each in value)


@final
class Kinds:
    """What planning depends on of every leaf: whether it is a tensor, its dtype, shape and placement."""

    def __init__(self, values: list[Any]) -> None:
        self._kinds = [_kind(value) for value in values]
        # Most leaves are plain tensors, of which three attributes tell all.
        self._plain = [kind[1:] if kind[0] == "plain" else None for kind in self._kinds]

    def fit(self, values: list[Any]) -> bool:
        """Whether these values, as many as before, would be planned alike."""
        for value, plain, kind in zip(values, self._plain, self._kinds, strict=True):
            if (
                plain is not None
                and type(value) in PLAIN
                and (value.dtype, value.shape, value.layout) == plain
            ):
                continue
            if _kind(value) != kind:
                return False
        return True


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that are their own only shard."""


def _kind(value: object) -> tuple[object, ...]:
    if not isinstance(value, torch.Tensor):
        return ("value",)
    if is_lazy(value):
        return "lazy", object()  # without a shape; the plan refuses it by name
    if isinstance(value, ShardedTensor):
        shards = [(tuple(s.metadata.shard_offsets), tuple(s.tensor.shape)) for s in value.local_shards()]
        return "sharded", value.dtype, tuple(value.size()), tuple(shards)
    if isinstance(value, DTensor):
        return "placed", value.dtype, value.shape, value.placements, value.device_mesh
    if hasattr(value, "__get_tensor_shard__"):
        return "foreign", object()  # it decides itself what its shards are, so it is asked at every save
    return "plain", value.dtype, value.shape, value.layout
