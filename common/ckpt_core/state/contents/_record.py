"""The record of a base in a checkpoint: its name, and a checksum for each tensor."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final, Self, final
from zlib import crc32

from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.types import SavedState

_ITEM: Final = "model.base."
"""The start of the names of shared items; ranks with other names in their bases have items of their own."""
_MOST_LISTED: Final = 5
_UNNAMED: Final = "a base without a name"


@final
@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What a record says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    checksum: str

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}, checksum {self.checksum}"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BaseRecord:
    """The base of one model, as a checkpoint refers to it.

    Attributes:
        source: path or hub id that the model names; "" if it names none.
        tensors: the tensors that are not in the checkpoint, by name.
    """

    source: str
    tensors: Mapping[str, TensorFacts]

    @property
    def digest(self) -> str:
        """The SHA-256 of names, dtypes, shapes and checksums."""
        facts = [[name, each.dtype, each.shape, each.checksum] for name, each in sorted(self.tensors.items())]
        return sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()

    def as_items(self, place: str) -> dict[str, Any]:
        """Return the shared item of this record; none of an empty base.

        Args:
            place: of the model in the state.
        """
        if not self.tensors:
            return {}
        names = crc32("\n".join((place, *sorted(self.tensors))).encode())
        tensors = {name: [each.dtype, list(each.shape), each.checksum] for name, each in self.tensors.items()}
        value = {"place": place, "source": self.source, "digest": self.digest, "tensors": tensors}
        return {f"{_ITEM}{names:08x}": value}

    @classmethod
    def of(cls, saved: SavedState, place: str) -> Self | None:
        """Return the record of a model in a checkpoint; None if all of it was saved."""
        items = saved.shared.items()
        found = [value for name, value in items if is_of_base(name) and value["place"] == place]
        if not found:
            return None
        tensors = {
            name: TensorFacts(dtype, tuple(shape), checksum)
            for value in found
            for name, (dtype, shape, checksum) in value["tensors"].items()
        }
        return cls(source=found[0]["source"], tensors=tensors)

    def compare(self, live: Self, *, alone: bool) -> None:
        """Refuse a live base that differs.

        Args:
            live: the live model's, of at least the names that both have.
            alone: whether no other rank can have names that this one lacks.

        Raises:
            IncompatibleCheckpointError: it differs.
        """
        lacking = sorted(self.tensors.keys() - live.tensors.keys()) if alone else []
        common = sorted(self.tensors.keys() & live.tensors.keys())
        differing = [name for name in common if self.tensors[name] != live.tensors[name]]
        if not lacking and not differing:
            return
        # What differs in more than its bytes tells most about the cause.
        differing.sort(key=lambda name: self.tensors[name].shape == live.tensors[name].shape)
        lines = [f"{name} is not in the model" for name in lacking]
        lines += [f"{name}: saved {self.tensors[name]}; live {live.tensors[name]}" for name in differing]
        raise IncompatibleCheckpointError(
            f"it holds only what was trained, and the live model has another base. Saved with "
            f"{self.source or _UNNAMED}; live is {live.source or _UNNAMED}; "
            f"{_listed(lines)}. Before the resume, load the same base in the same dtype and quantisation; "
            "or, to train on with the live one, load with strict=False",
            missing=lacking,
            mismatched=differing,
        )


def is_of_base(item: str) -> bool:
    """Return whether a shared item is a record of a base."""
    return item.startswith(_ITEM)


def base_names(saved: SavedState) -> list[str]:
    """Return the names of the bases that a checkpoint refers to; none if it is whole."""
    found = {str(value["source"]) for name, value in saved.shared.items() if is_of_base(name)}
    return sorted(each or _UNNAMED for each in found)


def _listed(lines: Iterable[str]) -> str:
    found = list(lines)
    more = f"; and {len(found) - _MOST_LISTED} more" if len(found) > _MOST_LISTED else ""
    return "; ".join(found[:_MOST_LISTED]) + more
