"""The leaves of a nested state dict, found fast enough for every save.

They are the leaves of DCP's planners: mappings are descended, and lists only when they contain a tensor or a
container; every other value, a tuple included, is one leaf.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from ckpt_core._torch_internals import (
    PLAIN,
    ShardedTensor,
    inner_tensors,
    is_wrapped,
    new_dtypes,
    own_part,
    storage_types_by_dtype,
)
from ckpt_core.dcp._wrapped_tensors import problem_of
from ckpt_core.errors import ConfigError


def check_kind(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor whose value the checkpoint format cannot store bit for bit."""
    if type(tensor) in PLAIN and _is_usual(tensor):
        return
    for local in _local(tensor, name):
        wrapped = is_wrapped(local) and not local.is_nested
        for inner, plain in inner_tensors(local, name) if wrapped else [(name, local)]:
            if (problem := _unreadable(plain) or _foreign(plain) or _without_memory(plain)) is not None:
                raise ConfigError(f"{inner} is {problem}")
        if wrapped and (problem := problem_of(local)) is not None:
            raise ConfigError(f"{name} is {problem}")


_USUAL: Final = frozenset(
    {
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
    }
)


def _is_usual(tensor: torch.Tensor) -> bool:
    """Return whether a plain tensor is as nearly all are, for which no more is asked."""
    usual = tensor.dtype in _USUAL and tensor.layout == torch.strided and not tensor.is_nested
    return usual and not tensor.is_meta and tensor.is_contiguous() and tensor.untyped_storage().nbytes() > 0


def _local(tensor: torch.Tensor, name: str) -> Iterator[torch.Tensor]:
    """Yield this rank's shards of a tensor: wrappers of shards lack most attributes."""
    if isinstance(tensor, ShardedTensor):
        yield from (shard.tensor for shard in tensor.local_shards())
    elif isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(
                f"{name} is placed as {tensor.placements}: ranks hold parts not yet added up, so it "
                "has no value; redistribute() it to Replicate() or Shard() before saving"
            )
        with torch.no_grad():
            yield tensor.to_local()
    else:
        yield tensor


def _unreadable(tensor: Any) -> str | None:
    if is_lazy(tensor):
        return "not initialised and has no shape; run the model once on a batch before saving"
    plain: Any = torch.Tensor
    if getattr(tensor, "__torch_dispatch__", None) is not plain.__torch_dispatch__:
        return (
            f"a {type(tensor).__module__}.{type(tensor).__qualname__}, a tensor with its own kind of "
            "storage, which the checkpoint format cannot hold; save the plain tensors that it is made of"
        )
    return None


def _foreign(tensor: torch.Tensor) -> str | None:
    """Return what is wrong with the layout or dtype."""
    if tensor.is_quantized or tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.layout == torch.strided else str(tensor.layout)
        kind = "quantised" if tensor.is_quantized else layout
        return (
            f"a {kind} tensor, which the checkpoint format cannot hold; "
            "convert it (dequantize(), to_dense(), unbind()) before saving, or leave it out of the state"
        )
    dtype = tensor.dtype
    has_bytes = dtype in new_dtypes() or dtype in storage_types_by_dtype()
    if not has_bytes or str(dtype).removeprefix("torch.").startswith(("q", "bits")):
        return (
            f"of dtype {dtype}, which no checkpoint can hold; view() it as torch.uint8 before saving, "
            "or leave it out of the state"
        )
    return None


def _without_memory(tensor: torch.Tensor) -> str | None:
    if tensor.device.type == "meta":
        return "on the meta device and has no data; materialise the model before saving"
    # Reading such memory ends the process, not the save.
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return (
            "without memory: its storage was freed, as FSDP frees gathered parameters; save the sharded one"
        )
    if is_expanded(tensor):
        return (
            f"expanded: strides {tensor.stride()} for shape {tuple(tensor.shape)} make several elements one "
            "place in memory, into which nothing can be loaded; keep a copy (contiguous() or clone()), or "
            "leave it out of the state (register_buffer(..., persistent=False))"
        )
    return None


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory so that torch refuses to write into them.

    Other overlapping views (`as_strided`, `unfold`) can be loaded into.
    """
    if isinstance(tensor, ShardedTensor):
        return any(is_expanded(shard.tensor) for shard in tensor.local_shards())
    if isinstance(tensor, DTensor):
        return is_expanded(tensor.to_local())
    if is_wrapped(tensor):
        return any(is_expanded(each) for _, each in inner_tensors(tensor))
    if tensor.layout != torch.strided or tensor.is_contiguous() or not tensor.numel():
        return False
    return any(not stride and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


_KEY, _INDEX = "\x1e", "\x1f"
_STEPS: Final = re.compile(f"([{_KEY}{_INDEX}])([^{_KEY}{_INDEX}]*)")


@final
class Leaves:
    """All leaves, in order.

    Attributes:
        paths: one text per leaf, unique even where DCP's names are not, with keys and indices distinct.
    """

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.paths: list[str] = []
        self.values: list[Any] = []
        self._walk("", tree)

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

    def by_name(self) -> dict[str, tuple[str | int, ...]]:
        """Return DCP's flattened names, each with its path, in order."""
        found: dict[str, tuple[str | int, ...]] = {}
        for text in self.paths:
            path: tuple[str | int, ...] = tuple(text.split(_KEY)[1:])
            if _INDEX in text:
                path = tuple(int(key) if kind == _INDEX else key for kind, key in _STEPS.findall(text))
            name = ".".join(map(str, path))
            if name in found:
                raise ValueError(f"two entries of the state are called {name}")
            found[name] = path
        return found


def _is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(isinstance(each, torch.Tensor) or not _is_leaf(each) for each in value)


@final
class Kinds:
    """The planning input per leaf: whether a tensor, its dtype, shape and placement."""

    def __init__(self, values: list[Any]) -> None:
        self._kinds = [_kind(value) for value in values]
        # Most leaves are plain tensors, which three attributes describe completely.
        self._plain = [kind[1:] if kind[0] == "plain" else None for kind in self._kinds]

    def fit(self, values: list[Any]) -> bool:
        """Return whether these values, equal in number, have the same plan."""
        for value, plain, kind in zip(values, self._plain, self._kinds, strict=True):
            usual = plain is not None and type(value) in PLAIN  # a loop: every save waits for it
            if not (usual and (value.dtype, value.shape, value.layout) == plain) and _kind(value) != kind:
                return False
        return True


def _kind(value: object) -> tuple[object, ...]:
    if not isinstance(value, torch.Tensor):
        return ("value",)
    if is_lazy(value):
        return "lazy", object()  # never equal: it has no shape, and the plan refuses it by name
    if isinstance(value, ShardedTensor):
        shards = [(tuple(s.metadata.shard_offsets), tuple(s.tensor.shape)) for s in value.local_shards()]
        return "sharded", value.dtype, tuple(value.size()), tuple(shards)
    if isinstance(value, DTensor):
        placed = value.dtype, value.shape, value.placements, value.device_mesh
        return "placed", *placed, *_form(own_part(value))
    if hasattr(value, "__get_tensor_shard__"):
        return "foreign", object()  # never equal: it chooses its shards itself, at every save
    return "plain", value.dtype, value.shape, value.layout, *_form(value)


def _form(wrapped: Any) -> tuple[object, ...]:
    """Return what the record of a wrapped tensor depends on; nothing of others."""
    if type(wrapped) in PLAIN or not is_wrapped(wrapped):
        return ()
    inner = [(name, each.dtype, each.shape) for name, each in inner_tensors(wrapped)]
    return type(wrapped), repr(wrapped.__tensor_flatten__()[1]), tuple(inner)
