"""The option `init_from`: the weights with which a run begins."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self, final

from ckpt_core.options._parsing import Problems, option_keys
from ckpt_core.validation import boolean, location, mapping, require


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """What `CheckpointManager.load` is asked for; see its arguments."""

    place: str = field(repr=False)
    rename: Mapping[str, str] = field(default_factory=dict[str, str])
    strict: bool = True
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, value: Any) -> Self | None:
        """Read the option: a place, or a mapping of these fields; None for None.

        Raises:
            ConfigError: it is neither, or one of the fields is wrong.
        """
        if value is None:
            return None
        given = value if isinstance(value, Mapping) else {"place": value}
        problems = Problems()
        problems.unknown("init_from", given, [each.name for each in fields(cls)])
        problems.raise_if_any()
        require(
            "init_from",
            location("place", given.get("place")),
            mapping("rename", given.get("rename", {})),
            boolean("strict", given.get("strict", True)),
            option_keys("storage_options", given.get("storage_options") or {}),
        )
        return cls(**{**given, "place": os.fspath(given["place"])})
