"""The selection of a checkpoint's entries to load, and their new names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

from torch.distributed.checkpoint.metadata import Metadata

from ckpt_core.errors import ConfigError
from ckpt_core.state import State, StateSource, TrainState, as_source
from ckpt_core.types import SavedState, matches_any
from ckpt_core.validation import boolean, require

Path: TypeAlias = tuple[str | int, ...]


Narrowed: TypeAlias = tuple[Metadata, Mapping[str, str]]
"""DCP's metadata of selected entries by live names, and their names in the checkpoint."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The entries of a checkpoint to load, as `CheckpointManager.load` describes them."""

    items: Collection[str] | None = None
    include: Collection[str] = ()
    rename: Mapping[str, str] = field(default_factory=dict[str, str])
    strict: bool = True
    cast: bool = False

    @property
    def is_all(self) -> bool:
        """Whether everything is selected, and nothing may be skipped."""
        return self.items is None and not self.include and self.strict

    @classmethod
    def of(
        cls,
        *,
        items: Any,
        include: Any,
        rename: Any,
        strict: Any,
        cast: Any,  # as users give them
    ) -> Selection:
        """Make a selection of a user's arguments."""
        require(
            "load",
            None if items is None else _strings("items", items),
            _strings("include", include),
            _names(rename),
            boolean("strict", strict),
            boolean("cast", cast),
        )
        return cls(items=items, include=tuple(include), rename=dict(rename or {}), strict=strict, cast=cast)

    def of_state(self, saved: SavedState) -> SavedState:
        """Narrow the saved state to the selected items; its metadata is narrowed already."""
        saved = replace(saved, strict=self.strict, include=tuple(self.include))
        if self.items is None:
            return saved
        return replace(
            saved,
            sharded={
                part: {path: entry for path, entry in of_part.items() if path[0] in self.items}
                for part, of_part in saved.sharded.items()
            },
            per_rank={name: value for name, value in saved.per_rank.items() if name in self.items},
            # What the state notes of an item is called `<item>.…`.
            shared={
                name: value
                for name, value in saved.shared.items()
                if name in self.items or name.partition(".")[0] in self.items
            },
        )

    def of_metadata(self, metadata: Mapping[str, Metadata], place: str) -> Mapping[str, Narrowed]:
        """Rename the metadata of every part, and narrow it to the selected entries."""
        if not self.include and not self.rename:
            return {part: (each, {}) for part, each in metadata.items()}
        used: set[str] = set()
        found = {part: self._narrowed(each, place, used) for part, each in metadata.items()}
        idle = sorted({*self.include, *self.rename} - used)
        if idle:
            raise ConfigError(
                f"{place}: nothing in the checkpoint is called {', '.join(map(repr, idle))}; `ckpt show` "
                "lists its entries. rename= names what is inside items; an item is loaded under its name "
                'in the checkpoint, e.g. load({"model": ..., "optim": ...}). Nothing was loaded'
            )
        return found

    def _narrowed(self, metadata: Metadata, place: str, used: set[str]) -> Narrowed:
        paths: Mapping[str, Path] = metadata.planner_data or {}
        new_paths: dict[str, Path] = {}
        names: dict[str, str] = {}
        for key in metadata.state_dict_metadata:
            top, *inner = paths.get(key, (key,))
            path = top, *(self._renamed_part(each, used, is_all=len(inner) == 1) for each in inner)
            if not matches_any(path, self.include, used):
                continue
            name = ".".join(map(str, path))
            if name in new_paths:
                raise ConfigError(
                    f"{place}: two entries of the checkpoint would be called {name}; see rename="
                )
            names[key], new_paths[name] = name, path
        of_optimizer = [key in names for key, path in paths.items() if path[0] == "optimizer"]
        if self.include and any(of_optimizer) and not all(of_optimizer):
            raise ConfigError(
                f"{place}: include= leaves out a part of the optimizer's state, which is loaded "
                "whole or not at all; add 'optimizer.*', or begin patterns with the items you want"
            )
        narrowed = replace(
            metadata,
            state_dict_metadata={
                names[key]: entry for key, entry in metadata.state_dict_metadata.items() if key in names
            },
            planner_data=new_paths,
            storage_data=None,  # a `CheckpointPart` finds places by the names in the checkpoint
        )
        return narrowed, {name: key for key, name in names.items()}

    def _renamed_part(self, name: str | int, used: set[str], *, is_all: bool = False) -> str | int:
        """Rename a part of a path; by "" only what is all that is below an item."""
        if not isinstance(name, str):
            return name
        fits = (each for each in self.rename if name == each or name.startswith(f"{each}." if each else name))
        old = max((each for each in fits if each or is_all), key=len, default=None)
        if old is None:
            return name
        used.add(old)
        return ".".join(filter(None, (self.rename[old], name[len(old) :].removeprefix("."))))

    def renamed(self, names: Any) -> Any:
        """Rename the parameters listed in a saved parameter group."""
        if not self.rename or not isinstance(names, list):
            return names
        return [self._renamed_part(each, set()) for each in names]


def narrowed(state: State, selection: Selection) -> tuple[StateSource, Selection]:
    """Narrow the live state if it can be; return also the rest of the selection."""
    if not isinstance(state, TrainState):
        return as_source(state), selection
    # A `TrainState` is narrowed by its item names; others by the top-level keys of the checkpoint.
    items = selection.items
    if selection.include:
        firsts = {pattern.partition(".")[0] for pattern in selection.include}
        names = state.names if items is None else items
        items = {name for name in names if matches_any((name,), firsts)}
    return as_source(state, items), replace(selection, items=None)


def _strings(name: str, value: Any) -> str | None:
    fine = isinstance(value, Collection) and not isinstance(value, str)
    if fine and all(isinstance(each, str) for each in value):
        return None
    return f"{name} must be a list of names, not {value!r}"


def _names(rename: Any) -> str | None:
    if rename is None or (
        isinstance(rename, Mapping)
        and all(isinstance(each, str) and each == each.strip(".") for pair in rename.items() for each in pair)
    ):
        return None
    return f"rename must be a mapping of names to names, without a dot at either end, not {rename!r}"
