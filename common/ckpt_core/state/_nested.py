"""Nested state dicts as DCP's planners see them, and the tensors in them.

DCP descends into mappings, and into lists only if an element is a tensor or a container; every other value, a
tuple included, is one leaf. Mapping keys become strings; empty mappings are not recorded.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise, zip_longest
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_core._torch_internals import (
    ShardedTensor,
    TensorShard,
    is_wrapped,
    own_part,
    placed_like,
    same_bytes,
    sharded_tensor,
)
from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.types import SavedEntries, SavedTensor

Path: TypeAlias = tuple[str | int, ...]


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf below `tree` with its path, in order."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            if isinstance(value, torch.Tensor):
                yield (*path, str(key)), value
            else:
                yield from leaves(value, (*path, str(key)))
    elif is_leaf(tree):
        yield path, tree
    else:
        for index, value in enumerate(tree):
            yield from leaves(value, (*path, index))


def is_leaf(value: Any) -> bool:
    if isinstance(value, Mapping):
        return False
    if not isinstance(value, list):
        return True
    return not any(isinstance(each, torch.Tensor) or not is_leaf(each) for each in value)


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    here: Any = tree
    for key, following in pairwise((*path, None)):
        is_list = isinstance(here, list)
        if is_list:
            here.extend([None] * (int(key or 0) + 1 - len(here)))
        if following is None:
            here[key] = value
            return
        inner = here[key] if is_list else here.get(key)
        if inner is None:
            inner = here[key] = [] if isinstance(following, int) else {}
        here = inner


def get(tree: Any, path: Path) -> Any:
    for key in path:
        if isinstance(tree, Mapping):
            tree = tree.get(key)
        elif isinstance(tree, list) and isinstance(key, int):
            tree = next(iter(tree[key : key + 1]), None)
        else:
            return None
    return tree


def rekeyed(loaded: Any, like: Any) -> Any:
    """Restore keys that are no strings, and dict types, from `like`."""
    if isinstance(loaded, dict) and isinstance(like, Mapping):
        keys = {str(key): key for key in like}
        return _in_kind_of(
            like,
            {
                keys.get(key, key): rekeyed(value, like.get(keys.get(key, key)))
                for key, value in loaded.items()
            },
        )
    if isinstance(loaded, list) and isinstance(like, list):
        return [rekeyed(*pair) for pair in zip_longest(loaded, like[: len(loaded)])]
    return loaded


def _in_kind_of(like: Mapping[Any, Any], values: dict[Any, Any]) -> dict[Any, Any]:
    if type(like) is defaultdict:
        return defaultdict(like.default_factory, values)
    if type(like) is OrderedDict:
        return OrderedDict(values)
    return Counter(values) if type(like) is Counter else values


def with_empties(loaded: Any, like: Any) -> Any:
    """Add the mappings of `like` that `loaded` lacks: they were empty when saved."""
    if isinstance(loaded, dict) and isinstance(like, Mapping):
        for key, value in like.items():
            if key in loaded:
                loaded[key] = with_empties(loaded[key], value)
            elif isinstance(value, Mapping):
                loaded[key] = with_empties(_in_kind_of(value, {}), value)
    return loaded


def under(entries: SavedEntries, *prefix: str | int) -> SavedEntries:
    """Return the entries below `prefix`, with paths relative to it."""
    depth = len(prefix)
    return {path[depth:]: value for path, value in entries.items() if path[:depth] == prefix and path[depth:]}


def dtype_named(name: str) -> torch.dtype:
    """Return the dtype with torch's name `name`, e.g. `bfloat16`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise CorruptCheckpointError(f"the checkpoint names a dtype that torch does not know: {name!r}")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of `dtype`, e.g. `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    # `ShardedTensor.shape` warns of its deprecation at every call.
    return tuple(tensor.metadata().size if isinstance(tensor, ShardedTensor) else tensor.shape)


def is_sharded(value: object) -> bool:
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
        # `torch.empty_like` of a ShardedTensor is a collective and forgets the process group.
        shards = [
            TensorShard(torch.empty_like(shard.tensor, dtype=dtype), shard.metadata)
            for shard in reference.local_shards()
        ]
        metadata = copy.deepcopy(reference.metadata())
        metadata.tensor_properties.dtype = dtype
        return sharded_tensor(shards, metadata, like=reference)
    own = own_part(reference)
    if is_wrapped(own):
        return placed_like(torch.empty(own.shape, dtype=dtype, device=own.device), reference)
    return torch.empty_like(reference, dtype=dtype, requires_grad=False).detach()


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
