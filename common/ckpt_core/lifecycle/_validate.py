"""Whether a checkpoint fits the live state, told in full before anything is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ckpt_core.dcp import is_expanded
from ckpt_core.errors import IncompatibleCheckpointError

_SHOWN = 8


@final
@dataclass(slots=True)
class Misfits:
    """Everything that does not fit, over all parts of a checkpoint."""

    missing: list[str] = field(default_factory=list[str])
    unexpected: list[str] = field(default_factory=list[str])
    mismatched: list[str] = field(default_factory=list[str])

    def compare(self, target: Mapping[str, Any], metadata: Metadata, *, cast: bool = False) -> list[str]:
        """Note what differs between flattened live entries and what one part of the checkpoint holds.

        Args:
            target: the live entries.
            metadata: of the part.
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
        self.unexpected += _unexpected(target, metadata)
        return [*missing, *mismatched]

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
            "It is probably another model's: check the configuration; or load only what fits, with items=, "
            "include= or strict=False, under other names with rename=, in another dtype with cast=True",
            missing=tuple(self.missing),
            unexpected=tuple(self.unexpected),
            mismatched=tuple(self.mismatched),
        )


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


def _unexpected(target: Mapping[str, Any], metadata: Metadata) -> Iterator[str]:
    """Saved entries of items that are being loaded; items not asked for at all are nobody's business."""
    paths: Mapping[str, tuple[str | int, ...]] = metadata.planner_data or {}
    items = {paths.get(key, (key,))[0] for key in target if key in metadata.state_dict_metadata}
    return (
        key
        for key in metadata.state_dict_metadata
        if key not in target and paths.get(key, (key,))[0] in items
    )


def _shorten(keys: list[str]) -> str:
    more = f", … and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
