"""The weights of one model in a checkpoint, under the names of the model itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

from ckpt_core.convert._laid_out import ExportOptions, Place
from ckpt_core.errors import ConfigError
from ckpt_core.loading import CommittedFiles, LocatedTensor, located, values_beside
from ckpt_core.state import PICKLED
from ckpt_core.types import matches_any

_MODEL: Final = "model"
_OTHERS: Final = "lightning"
"""The item of what Lightning keeps of its own."""
_WRAPPERS: Final = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
_PARALLEL: Final = "module."
_AVERAGED: Final = "n_averaged"
_LIGHTNING: Final = "pytorch-lightning_version"
_MOST_PREFIX: Final = 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Weights:
    """The weights of one model.

    Attributes:
        files: those beside them.
        tensors: of the checkpoint, by the names that an `OutFile` uses.
        names: of the model -> in `tensors`.
        shared: the plain values of the checkpoint.
        step: the training's; None if it is not known.
        of_lightning: whether the model is an attribute of a LightningModule.
    """

    files: CommittedFiles
    tensors: Mapping[str, LocatedTensor]
    names: Mapping[str, str]
    shared: Mapping[str, Any]
    step: int | None
    of_lightning: bool

    @classmethod
    def of(cls, source: Place, options: ExportOptions) -> Self:
        """Find the weights in a checkpoint, or in a folder or file of others.

        Raises:
            CheckpointError: there is no checkpoint, or it is damaged.
            ConfigError: nothing is of a name that the options give, or several models are.
        """
        item, include = options.ema, options.include
        manifest, files, parts = options.opened(source)
        tensors: dict[str, LocatedTensor] = {}
        found: dict[tuple[str, str], dict[str, str]] = {}
        for part, each in parts.items():
            others = {_OTHERS, *each.heavy()}
            for name, tensor in located({part: each}).items():
                tensors[name] = tensor
                top, *rest = tensor.path if len(tensor.path) > 1 else ("", *tensor.path)
                if item is not None:
                    dotted, inner = ".".join(map(str, tensor.path)), item.removeprefix(f"{part}.")
                    top, rest = (
                        item if dotted.startswith(f"{inner}.") else PICKLED,
                        [dotted[len(inner) + 1 :]],
                    )
                if top not in others:
                    found.setdefault((part, str(top)), {})[".".join(map(str, rest))] = name
        shared = values_beside(files, parts)[0] if files.is_ours else {}
        if item is None:
            found = {key: each for key, each in found.items() if key[1] == _MODEL} or found
        bare = {key: chosen for key, each in found.items() if (chosen := _chosen(_bare(each), include))}
        if len(bare) != 1:
            there = ", ".join(f"{part}.{top}" if part else top for part, top in bare or found)
            raise ConfigError(
                f"{files.url} holds {there or 'no weights'}; {'several fit' if bare else 'nothing fits'}: "
                "name the item with the weights (ema=, --ema), or patterns of names (include=, --include)"
            )
        values = {name for each in parts.values() for name in each.metadata.state_dict_metadata}
        return cls(
            files=files,
            tensors=tensors,
            names=next(iter(bare.values())),
            shared=shared,
            step=None if manifest is None else manifest.step,
            of_lightning=_LIGHTNING in values or f"lightning.{_LIGHTNING}" in shared,
        )


def unwrapped(weights: Weights, wanted: Collection[str]) -> dict[str, str]:
    """Return the names without the attribute that holds the model.

    `wanted` are the names that the model itself has; empty if they are not known.
    """
    names, counts = weights.names, Counter[str]()
    for name in names:
        parts = name.split(".")
        for depth in range(min(_MOST_PREFIX, len(parts))):
            if not wanted or ".".join(parts[depth:]) in wanted:
                counts["".join(f"{part}." for part in parts[:depth])] += 1
    if wanted:
        prefix = max(counts, key=lambda each: (counts[each], -len(each)), default="")
    else:
        prefix = next((each for each in counts if each.count(".") == 1), "") if weights.of_lightning else ""
        if counts[prefix] < len(names):
            raise ConfigError(
                f"{weights.files.url} has several attributes of a LightningModule, such as {prefix!r} and "
                f"{next(name for name in names if not name.startswith(prefix))!r:.200}: name the model's by "
                f'include=["{prefix}*"] (--include), or give like= (--like)'
            )
    return {name[len(prefix) :]: found for name, found in names.items() if name.startswith(prefix)}


def _bare(names: Mapping[str, str]) -> dict[str, str]:
    """Return names without those of the wrappers of hosts and of torch."""
    found = {
        ".".join(part for part in name.split(".") if part not in _WRAPPERS): value
        for name, value in names.items()
    }
    own = {name for name in found if name != _AVERAGED}
    while own and all(name.startswith(_PARALLEL) for name in own):
        found = {name[len(_PARALLEL) :]: found[name] for name in own}
        own = set(found)
    return found


def _chosen(names: Mapping[str, str], include: Sequence[str]) -> dict[str, str]:
    return {name: value for name, value in names.items() if matches_any((name,), include)}
