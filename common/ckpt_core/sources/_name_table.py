"""Tables of names: data that says what a name in one program is in another."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from ckpt_core.errors import ConfigError
from ckpt_core.options import read_document

_ANY: Final = "*"


@final
@dataclass(frozen=True, slots=True)
class NameTable:
    """Pairs of a name in the source and ours; the first that fits a name renames it.

    A name fits if its first parts, between dots, are those of the pattern; the rest stays, as with `rename=`
    of a load. A part `*` fits any one part, which takes the place of the `*` of the same order in the other
    name: `{"decoder.layers.*.mlp.linear_fc2": "layers.*.mlp.down_proj"}`. The pattern "" fits every name.
    """

    pairs: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        """Raise ConfigError for pairs with different numbers of `*`."""
        uneven = [f"{one} -> {two}" for one, two in self.pairs if _stars(one) != _stars(two)]
        if uneven:
            raise ConfigError(f"names with different numbers of parts '*': {', '.join(uneven)}")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Self:
        """Read one from JSON, YAML or TOML: a mapping of names to names, in order.

        Raises:
            ConfigError: it is not such a file.
        """
        file, pairs = Path(path), None
        if file.suffix != ".json":
            pairs = read_document(file)
        else:
            try:
                pairs = json.loads(file.read_bytes())
            except (OSError, ValueError, RecursionError) as error:
                raise ConfigError(f"{path}: cannot read the names: {error}") from error
        if not isinstance(pairs, Mapping) or not {str}.issuperset(map(type, [*pairs, *pairs.values()])):
            raise ConfigError(f"{path}: not a mapping of names to names")
        return cls(tuple(pairs.items()))

    @property
    def inverse(self) -> NameTable:
        """The table from our names to those of the source, the longest of ours first."""
        pairs = ((ours, theirs) for theirs, ours in self.pairs)
        return NameTable(
            tuple(sorted(pairs, key=lambda pair: bool(pair[0]) + pair[0].count("."), reverse=True))
        )

    def back(self, names: Iterable[str]) -> dict[str, str]:
        """Map our names to those of the source.

        Raises:
            ConfigError: two would have one name, or the table would not bring one back.
        """
        found = self.inverse.of_all(names)
        if lost := [name for name, there in found.items() if self.renamed(there) != name]:
            raise ConfigError(
                f"{lost[0]!r} would be called {found[lost[0]]!r}, which the table does not bring back"
            )
        return found

    def renamed(self, name: str) -> str:
        """Return the new name; the name itself if no pattern fits."""
        parts = name.split(".")
        for pattern, new in self.pairs:
            own = pattern.split(".") if pattern else []
            if len(own) <= len(parts) and all(p in {_ANY, part} for p, part in zip(own, parts, strict=False)):
                found = iter([part for p, part in zip(own, parts, strict=False) if p == _ANY])
                begun = [next(found) if part == _ANY else part for part in new.split(".")] if new else []
                return ".".join([*begun, *parts[len(own) :]])
        return name

    def of_all(self, names: Iterable[str]) -> dict[str, str]:
        """Map names to new ones.

        Raises:
            ConfigError: two would have one name, or one would have none.
        """
        found = {name: self.renamed(name) for name in names}
        twice = [name for name, count in Counter(found.values()).items() if count > 1 or not name]
        if twice:
            olds = [name for name, new in found.items() if new == twice[0]]
            raise ConfigError(f"{' and '.join(olds[:3])} would be called {twice[0]!r}")
        return found


def _stars(name: str) -> int:
    return name.split(".").count(_ANY)
