"""Empty tensors to load into, of every kind a training state holds."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import (
    ShardedTensor,
    TensorShard,
    chunks_of,
    is_wrapped,
    own_part,
    placed_like,
    same_bytes,
    sharded_tensor,
)
from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.state._nested import leaves, put
from ckpt_core.types import SavedEntries, SavedTensor


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with torch's name `name`, e.g. `bfloat16`.

    Raises:
        CorruptCheckpointError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"the checkpoint names a dtype that torch does not know: {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of `dtype`, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the global shape."""
    # `ShardedTensor.shape` warns of its deprecation at every call.
    return tuple(tensor.metadata().size if isinstance(tensor, ShardedTensor) else tensor.shape)


def is_sharded(value: object) -> bool:
    """Return whether `value` is spread over ranks."""
    return isinstance(value, DTensor | ShardedTensor)


def matches(value: object, saved: SavedTensor) -> TypeGuard[torch.Tensor]:
    """Return whether the saved tensor can be read directly into `value`."""
    return (
        isinstance(value, torch.Tensor)
        and shape_of(value) == saved.shape
        and dtype_name(value.dtype) == saved.dtype
        and saved.wrapped in {None, is_wrapped(own_part(value))}
    )


def empty_like(reference: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Allocate plain memory with the shape, placement and device of `reference`."""
    if isinstance(reference, ShardedTensor):
        return _empty_sharded(reference, dtype)
    own = own_part(reference)
    if is_wrapped(own):
        return placed_like(torch.empty(own.shape, dtype=dtype, device=own.device), reference)
    return torch.empty_like(reference, dtype=dtype, requires_grad=False).detach()


def shard_like(whole: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a whole tensor, of the kind and placement of `live`."""
    if not is_sharded(live):
        return whole
    made = empty_like(live, whole.dtype)
    own = [each.tensor for each in made.local_shards()] if isinstance(made, ShardedTensor) else [made]
    own = [each.to_local() if isinstance(each, DTensor) else each for each in own]
    for local, chunk in zip(own, chunks_of(made), strict=False):
        part = whole[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]
        local.copy_(part)
    return made


def _empty_sharded(reference: ShardedTensor, dtype: torch.dtype) -> torch.Tensor:
    # `torch.empty_like` of a ShardedTensor is a collective and forgets the process group.
    shards = [
        TensorShard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata)
        for shard in reference.local_shards()
    ]
    metadata = copy.deepcopy(reference.metadata())
    metadata.tensor_properties.dtype = dtype
    return sharded_tensor(shards, metadata, like=reference)


def template(live: Any, saved: SavedEntries) -> dict[str, Any]:
    """Build a load target: live tensors that match, else new memory of their kind."""
    found = dict(leaves(live))
    tree: dict[str, Any] = {}
    for path, entry in saved.items():
        put(tree, path, None if entry is None else _target(found.get(path), entry))
    return tree


def _target(live: Any, saved: SavedTensor) -> torch.Tensor:
    if matches(live, saved):
        return live.detach() if not isinstance(live, ShardedTensor) else live
    dtype = dtype_named(saved.dtype)
    if isinstance(live, torch.Tensor) and shape_of(live) == saved.shape:
        return empty_like(live, dtype)
    return torch.empty(saved.shape, dtype=dtype)


def put_back_packed(model: nn.Module, values: Mapping[str, torch.Tensor]) -> list[str]:
    """Put back entries of a `state_dict` that the model's `load_state_dict` left out.

    Modules of bitsandbytes pack the form of 4-bit weights into such entries, with the offset of their scales.
    Return the keys whose live value still differs.
    """
    changed = _changed(model, values)
    for name, parameter in model.named_parameters(remove_duplicate=False) if changed else ():
        own = {key.removeprefix(f"{name}."): values[key] for key in values if key.startswith(f"{name}.")}
        packed: Any = getattr(parameter, "quant_state", None)
        if hasattr(packed, "from_dict") and any(f"{name}.{key}" in changed for key in own):
            rebuilt = type(packed).from_dict(own, device=parameter.device)
            holders: tuple[Any, ...] = parameter, model.get_submodule(name.rpartition(".")[0])
            for holder in holders:
                if getattr(holder, "quant_state", None) is packed:
                    holder.quant_state = rebuilt
    return _changed(model, {key: values[key] for key in changed}) if changed else []


def _changed(model: nn.Module, values: Mapping[str, torch.Tensor]) -> list[str]:
    live = model.state_dict() if values else {}
    return [key for key, value in values.items() if not _is_same(live[key], value)]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if type(one) is torch.Tensor and one.data_ptr() != other.data_ptr():
        return same_bytes(one, other)
    return (one.shape, one.dtype) == (other.shape, other.dtype)  # loaded in place
