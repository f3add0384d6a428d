"""Who writes what: DCP's planner, asked only when the make-up of the state has changed."""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias, cast, final

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.utils import find_tensor_shard

from ckpt_core.dcp._dedup import assign
from ckpt_core.dcp._global import describe
from ckpt_core.dcp._image import ShardSpec
from ckpt_core.dcp._kinds import check_kind
from ckpt_core.dcp._leaves import PLAIN, Kinds, Leaves

Share: TypeAlias = tuple[int, ...] | None
"""The items of its plan that a rank writes, by their places in it; None for all of them."""

_Item: TypeAlias = tuple[int, MetadataIndex]


@final
class Part:
    """One DCP part of the state on one rank, from save to save.

    Who calls what: 1. (all ranks, every save) `look`. 2. (all ranks, if any rank's part has changed)
    `local_plan`; (coordinator) `decide` over all local plans; (all ranks) `accept` the share that came back.
    3. (all ranks, every save) `shards` and `values`, then `forget`.

    Attributes:
        specs: what a layout needs to know of the shards, in the order of `shards`.
        value_indices: the entries of `values`.
    """

    def __init__(self) -> None:
        self._paths: list[str] = []
        self._kinds = Kinds([])
        self._leaves: Sequence[Any] = ()
        self._tree: Mapping[str, Any] = {}
        self._plan = SavePlan([])
        self._shard_items: list[_Item] = []
        self._value_items: list[_Item] = []
        self._serialised: dict[MetadataIndex, tuple[str, bytes]] = {}
        self.specs: list[ShardSpec] = []
        self.value_indices: list[MetadataIndex] = []

    def look(self, tree: Mapping[str, Any]) -> bool:
        """Take the live state of a save; whether it is planned like the one before."""
        leaves = Leaves(tree)
        self._tree, self._leaves = tree, leaves.values
        if any(issubclass(kind, ShardedTensor) for kind in set(map(type, leaves.values))):
            # DCP takes those apart that hold other sharded tensors.
            self._leaves = list(_set_up(tree).state_dict.values())
        same = leaves.paths == self._paths and self._kinds.fit(self._leaves)
        if not same:
            self._paths, self._kinds = leaves.paths, Kinds(self._leaves)
        return same

    def local_plan(self) -> SavePlan:
        """What this rank could write.

        Raises:
            ConfigError: a tensor is of a kind that no checkpoint can hold.
        """
        planner = _set_up(self._tree)
        for fqn, value in planner.state_dict.items():
            if isinstance(value, torch.Tensor):
                check_kind(value, fqn)
        self._plan = planner.create_local_plan()
        return self._plan

    def accept(self, share: Share) -> None:
        """Take over this rank's share of the last local plan.

        Raises:
            ValueError: DCP sees other leaves than we do.
        """
        names = list(_set_up(self._tree).state_dict)
        if len(names) != len(self._leaves):
            raise ValueError(f"DCP sees {len(names)} entries where there are {len(self._leaves)}")
        position = {name: at for at, name in enumerate(names)}
        chosen = self._plan.items if share is None else [self._plan.items[place] for place in share]
        items = [(position[item.index.fqn], item) for item in chosen]
        byte_io = WriteItemType.BYTE_IO
        self._shard_items = [(at, item.index) for at, item in items if item.type != byte_io]
        self._value_items = [(at, item.index) for at, item in items if item.type == byte_io]
        self._serialised, self._plan = {}, SavePlan([])
        shapes = [(index, shard) for (_, index), shard in zip(self._shard_items, self.shards(), strict=True)]
        self.specs = [(index, shard.dtype, tuple(shard.shape)) for index, shard in shapes]
        self.value_indices = [index for _, index in self._value_items]

    def shards(self) -> list[torch.Tensor]:
        """The live local tensors that this rank is to write."""
        leaves = self._leaves
        return [_local(leaves[at], index) for at, index in self._shard_items]

    def values(self) -> list[bytes]:
        """The byte entries that this rank is to write, serialised now, as DCP does it."""
        return [self._serialise(self._leaves[at], index) for at, index in self._value_items]

    @property
    def tree(self) -> Mapping[str, Any]:
        """The live state, until `forget`."""
        return self._tree

    def odd_values(self) -> list[MetadataIndex]:
        """The entries of `values` that may need more than plain types to be read back."""
        return [index for at, index in self._value_items if not _is_plain(self._leaves[at])]

    def forget(self) -> None:
        """Let go of the live state, lest it be kept alive until the next save."""
        self._leaves, self._tree = (), {}

    def _serialise(self, value: Any, index: MetadataIndex) -> bytes:
        # Most entries are hyperparameters that never change, and `torch.save` takes its time.
        text = repr(value) if type(value) in _SCALARS else None
        before = self._serialised.get(index)
        if text is not None and before is not None and before[0] == text:
            return before[1]
        buffer = io.BytesIO()
        torch.save(value, buffer)
        if text is not None:
            self._serialised[index] = text, buffer.getvalue()
        return buffer.getvalue()


_SCALARS = frozenset({bool, int, float, str, type(None)})
"""Types whose `repr` tells every two values apart, whatever went before."""


_PLAIN: Final = _SCALARS | {bytes, torch.Size, torch.dtype}
_MOST_PLAIN: Final = 100_000


def _is_plain(value: Any) -> bool:
    if type(value) in _PLAIN:
        return True
    if type(value) not in {list, tuple} or len(value) > _MOST_PLAIN:
        return False
    return _PLAIN.issuperset(map(type, value)) or all(map(_is_plain, value))


def decide(plans: Sequence[SavePlan], uneven: Collection[str] = ()) -> tuple[list[Share], Metadata]:
    """Leave every chunk to one rank and build the metadata. Coordinator only.

    Args:
        plans: every rank's local plan, by rank.
        uneven: names of entries whose replicas may differ: the lowest rank that has them writes them.

    Returns:
        What each rank writes of its plan, and DCP's metadata of all of it.

    Raises:
        ConfigError: replicas differ in dtype or shape.
        ValueError: the ranks' shards overlap or leave holes.
    """
    chosen = assign(plans, uneven)
    metadata = describe(chosen)
    return [_share(plan, kept) for plan, kept in zip(plans, chosen, strict=True)], metadata


def _share(plan: SavePlan, kept: SavePlan) -> Share:
    if len(kept.items) == len(plan.items):
        return None
    own = {id(item) for item in kept.items}
    return tuple(place for place, item in enumerate(plan.items) if id(item) in own)


def _set_up(tree: Mapping[str, Any]) -> DefaultSavePlanner:
    planner = DefaultSavePlanner()
    planner.set_up_planner(dict(tree), None, is_coordinator=False)
    return planner


def _local(value: Any, index: MetadataIndex) -> torch.Tensor:
    if type(value) in PLAIN:
        return cast("torch.Tensor", value)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{index.fqn} was planned as a tensor and is a {type(value).__name__}")
    with torch.no_grad():
        return find_tensor_shard(value, index)
