"""Every private name of torch that the core uses, under a name of ours.

When a new torch moves one, this module is where to mend it, and `tests/test_private_names.py` fails by name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor
from torch._utils import _rebuild_tensor_v3 as rebuild_tensor_of_new_dtype
from torch.distributed._shard.sharded_tensor import Shard as TensorShard
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list as chunks_of
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM
from torch.distributed.tensor import DTensor
from torch.storage import _dtype_to_storage_type_map as storage_types_by_dtype
from torch.storage import _new_dtypes as new_dtypes
from torch.storage import _storage_type_to_dtype_map as dtypes_by_storage_type
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter as LoaderIterator


def loads_itself(module: nn.Module, *, is_root: bool) -> bool:
    """Return whether a module has a way of its own to load its state, or hooks.

    Torch asks the `load_state_dict` of the root only. Hooks of FSDP2 and of torch's other wrappers change
    placements and prefixes, batch norms add a counter: they take no other shapes.
    """
    kind = type(module)
    hooks = module._load_state_dict_pre_hooks.values()
    return (
        kind._load_from_state_dict
        not in {nn.Module._load_from_state_dict, nn.BatchNorm1d._load_from_state_dict}
        or kind.set_extra_state is not nn.Module.set_extra_state
        or (is_root and kind.load_state_dict is not nn.Module.load_state_dict)
        or not all(str(each.__module__).startswith("torch.distributed.") for each in hooks)
    )


def without_step_hooks() -> dict[str, Any]:
    """Return attributes for an optimizer without step hooks; new ones, to be added to."""
    return {"_optimizer_step_pre_hooks": OrderedDict(), "_optimizer_step_post_hooks": OrderedDict()}


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy any number of tensors with one call; from devices it may only be enqueued."""
    if sources:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources, non_blocking=True)


def version_of(tensor: torch.Tensor) -> int:
    """Return the counter of in-place changes; -1 for an inference tensor, without one."""
    return -1 if tensor.is_inference() else tensor._version


PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that are one shard, with elements of their own."""


def is_wrapped(value: object) -> bool:
    """Return whether a tensor is made of others, by torch's `__tensor_flatten__`.

    Quantised weights and optimizer states are. Spread over ranks they are the local part of a DTensor.
    """
    return (
        type(value) not in PLAIN and not isinstance(value, DTensor) and is_traceable_wrapper_subclass(value)
    )


def own_part(value: Any) -> Any:
    """Return this rank's part of a DTensor itself, of which `to_local` returns a view."""
    return value._local_tensor if isinstance(value, DTensor) else value


def changes_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, on this rank."""
    return int(own_part(tensor)._version)


def placed_like(part: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has `part` on this rank, spread over ranks as `like`."""
    if not isinstance(like, DTensor):
        return part
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def inner_tensors(tensor: torch.Tensor, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and value of the plain tensors that make up a tensor."""
    if not is_wrapped(tensor):
        yield name, tensor
        return
    wrapped: Any = tensor
    for each in wrapped.__tensor_flatten__()[0]:
        yield from inner_tensors(getattr(tensor, each), f"{name}.{each}" if name else each)


def layout_named(name: str) -> torch.layout:
    """Return the `torch.layout` of a name in a pickle."""
    get_layout: Callable[[str], torch.layout] = torch.serialization._get_layout
    return get_layout(name)


def default_store() -> Any:
    """Return the store of the default process group; its stubs know no `clone`."""
    return torch.distributed.distributed_c10d._get_default_store()


def sharded_tensor(shards: list[TensorShard], metadata: Any, like: ShardedTensor) -> ShardedTensor:
    """Make a ShardedTensor of this rank's shards, in the process group of `like`."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=like._process_group
    )


def process_group_of(tensor: ShardedTensor) -> Any:
    """Return the ranks that hold the shards of a ShardedTensor."""
    return tensor._process_group


def has_flat_parameters(model: Any) -> bool:
    """Return whether FSDP1 shows its flat parameters in place of the model's own."""
    return any(name.rpartition(".")[2] == FLAT_PARAM for name, _ in model.named_parameters())


def metadata_path(reader: Any, rank: int | None) -> Any:
    """Return the path of `.metadata` that a stock `FileSystemReader` reads."""
    return reader._get_metadata_path(rank)


def holds_unreduced_gradients(module: Any) -> bool:
    """Return whether FSDP2 keeps gradients of a module that it has not reduced yet."""
    get_state = getattr(module, "_get_fsdp_state", None)
    group = None if get_state is None else get_state()._fsdp_param_group
    if group is None:
        return False
    unsharded = [getattr(each, "_unsharded_param", None) for each in group.fsdp_params]
    return (
        group._partial_reduce_output is not None
        or any(each.unsharded_accumulated_grad is not None for each in group.fsdp_params)
        or any(each is not None and each.grad is not None for each in unsharded)
    )


MAKES_ITERATOR = "_get_iterator"
"""Method by which a DataLoader makes the iterator of an epoch."""

BEGINS_AGAIN = "_reset"
"""Method by which an iterator with persistent workers begins another epoch."""


def kept_iterator(loader: DataLoader[Any]) -> Any:
    """Return the iterator that a loader with persistent workers keeps; else None."""
    return loader._iterator


def let_go_of_kept(loader: DataLoader[Any]) -> None:
    """Let a loader with persistent workers make new ones for the next epoch."""
    loader._iterator = None


def index_sampler_of(iterator: Any) -> Any:
    """Return what an iterator takes its indices from, epoch by epoch."""
    return iterator._index_sampler


def let_draw_from(iterator: Any, sampler: Any, indices: Any = None) -> None:
    """Let an iterator draw from `sampler`, and in this epoch from `indices`."""
    iterator._index_sampler = sampler
    if indices is not None:
        iterator._sampler_iter = indices


def fetch_ahead(iterator: Any, given: int) -> None:
    """Let idle workers fetch what follows `given` batches, each in its turn."""
    for _ in range(given % iterator._num_workers):
        next(iterator._worker_queue_idx_cycle)
    for _ in range(iterator._prefetch_factor * iterator._num_workers):
        iterator._try_put_index()


def batches_given(iterator: Any) -> int:
    """Return how many batches of this epoch an iterator has given."""
    return int(iterator._num_yielded)


def data_ended(iterator: Any) -> bool:
    """Return whether a worker-less iterator has exhausted an iterable data set."""
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    return bool(getattr(fetcher, "ended", False))


def count_as_given(iterator: Any, batches: int) -> None:
    """Let an iterator count batches that were skipped as given."""
    iterator._num_yielded = batches
    if hasattr(iterator, "_sampler_iter_yielded"):  # torchdata's
        iterator._sampler_iter_yielded += batches


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors have the same dtype, shape and bytes, NaN included."""
    pair = [each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*pair)


__all__ = [
    "BEGINS_AGAIN",
    "MAKES_ITERATOR",
    "PLAIN",
    "LoaderIterator",
    "PrefixStore",
    "ShardedTensor",
    "StorageInfo",
    "TensorShard",
    "batches_given",
    "chunks_of",
    "copy_all",
    "count_as_given",
    "data_ended",
    "default_store",
    "dtypes_by_storage_type",
    "fetch_ahead",
    "has_flat_parameters",
    "holds_unreduced_gradients",
    "index_sampler_of",
    "inner_tensors",
    "is_wrapped",
    "kept_iterator",
    "layout_named",
    "let_draw_from",
    "let_go_of_kept",
    "loads_itself",
    "metadata_path",
    "new_dtypes",
    "own_part",
    "placed_like",
    "process_group_of",
    "rebuild_tensor",
    "rebuild_tensor_of_new_dtype",
    "same_bytes",
    "set_element",
    "sharded_tensor",
    "storage_types_by_dtype",
    "version_of",
    "without_step_hooks",
]
