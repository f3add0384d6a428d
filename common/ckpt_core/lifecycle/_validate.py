"""Whether a checkpoint fits the live state, told in full before anything is read.

A rank needs only the names that it has, as a stage of a pipeline has only its own: that a checkpoint holds
names which nobody wants is a statement of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpt_core.coordination import Coordinator
from ckpt_core.dcp import is_expanded
from ckpt_core.errors import IncompatibleCheckpointError

_SHOWN = 8
_Item: TypeAlias = tuple[str, str]
Paths: TypeAlias = Mapping[str, tuple[str | int, ...]]


@final
@dataclass(slots=True)
class Misfits:
    """Everything that does not fit, over all parts of a checkpoint.

    Attributes:
        missing: live names that the checkpoint lacks.
        mismatched: names that differ in shape or dtype, and how.
        foreign: (part, item) that is loaded -> names in the checkpoint that this rank does not have; after
            `settle`, that no rank has.
        partial: whether other ranks have some of the names that this one lacks.
    """

    missing: list[str] = field(default_factory=list[str])
    mismatched: list[str] = field(default_factory=list[str])
    foreign: dict[_Item, list[str]] = field(default_factory=dict[_Item, list[str]])
    partial: bool = False

    def compare(
        self,
        target: Mapping[str, Any],
        metadata: Metadata,
        *,
        part: str = "",
        paths: Paths = MappingProxyType({}),
        cast: bool = False,
    ) -> list[str]:
        """Note what differs between flattened live entries and what one part of the checkpoint holds.

        Args:
            target: the live entries.
            metadata: of the part.
            part: its name.
            paths: of the live entries in the nested state, for those that the checkpoint lacks.
            cast: whether another dtype is no misfit.

        Returns:
            The live entries that cannot be loaded.
        """
        saved = metadata.state_dict_metadata
        missing = [key for key in target if key not in saved]
        problems = {
            key: _mismatch(value, saved[key], cast=cast) for key, value in target.items() if key in saved
        }
        mismatched = {key: problem for key, problem in problems.items() if problem is not None}
        self.missing += missing
        self.mismatched += [f"{key}: {problem}" for key, problem in mismatched.items()]
        known: Paths = metadata.planner_data or {}
        loaded = {str((known.get(key) or paths.get(key, (key,)))[0]) for key in target}
        self.foreign |= {(part, item): names for item, names in _foreign(target, loaded, metadata).items()}
        return [*missing, *mismatched]

    @property
    def unexpected(self) -> list[str]:
        """Names in the checkpoint, of items that are loaded, which are not in the live state."""
        return [name for names in self.foreign.values() for name in names]

    def settle(self, coordinator: Coordinator) -> None:
        """Keep of the foreign names those that no rank has. Collective."""
        nobody = coordinator.gather_scatter(self.foreign, _nobodys, what="comparing the names of all ranks")
        self.partial = len(self.unexpected) > sum(map(len, nobody.values()))
        self.foreign = nobody

    @property
    def lines(self) -> list[str]:
        """Everything that does not fit, a line each."""
        return [
            *(f"the checkpoint lacks {key}" for key in self.missing),
            *(f"the training state lacks {key}" for key in self.unexpected),
            *self.mismatched,
        ]

    def raise_if_any(self, place: str) -> None:
        """Raise one error that lists everything.

        Raises:
            IncompatibleCheckpointError: something does not fit.
        """
        kinds = {
            "the checkpoint lacks": self.missing,
            "the training state lacks": self.unexpected,
            "differ": self.mismatched,
        }
        if not any(kinds.values()):
            return
        told = "; ".join(f"{len(keys)} {verb}: {_shorten(keys)}" for verb, keys in kinds.items() if keys)
        raise IncompatibleCheckpointError(
            f"{place} does not fit the training state, and nothing was loaded. {told}. "
            "It is probably another model's: check the configuration; or load only what fits, by "
            "CheckpointManager.load with items=, include= or strict=False, under other names with rename=, "
            "in another dtype with cast=True",
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            mismatched=tuple(self.mismatched),
        )


def _nobodys(foreign: list[dict[_Item, list[str]]]) -> list[dict[_Item, list[str]]]:
    """For every rank, what all ranks that load an item find foreign in it."""
    found: dict[_Item, list[str]] = {}
    for own in foreign:
        for item, names in own.items():
            known = set(names)
            found[item] = [name for name in found.get(item, names) if name in known]
    return [found] * len(foreign)


def _mismatch(value: Any, saved: object, *, cast: bool) -> str | None:
    tensor_like = hasattr(value, "size") and hasattr(value, "dtype")
    if not isinstance(saved, TensorStorageMetadata):
        return "a tensor here, a plain value in the checkpoint" if tensor_like else None
    if not tensor_like:
        return "a plain value here, a tensor in the checkpoint"
    if torch.Size(value.size()) != saved.size:
        return f"shape {tuple(value.size())} here, {tuple(saved.size)} in the checkpoint"
    if value.dtype != saved.properties.dtype and not cast:
        return f"{value.dtype} here, {saved.properties.dtype} in the checkpoint"
    if isinstance(value, torch.Tensor) and is_expanded(value):
        return "expanded here (elements share memory), so that nothing can be loaded into it; clone() it"
    return None


def _foreign(target: Mapping[str, Any], items: Collection[str], metadata: Metadata) -> dict[str, list[str]]:
    """Saved entries of items that are being loaded; items not asked for at all are nobody's business."""
    paths: Paths = metadata.planner_data or {}
    found: dict[str, list[str]] = {item: [] for item in items}
    for key in metadata.state_dict_metadata:
        names = found.get(str(paths.get(key, (key,))[0]))
        if names is not None and key not in target:
            names.append(key)
    return found


def _shorten(keys: Sequence[str]) -> str:
    more = f", … and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
