"""A whole training state, in files of torch, Lightning and stock DCP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ckpt_core.convert._laid_out import Conversion, ExportOptions, OutFile, Place, Wanted
from ckpt_core.convert._torch_file import Leaf, dcp_files, torch_file
from ckpt_core.dcp import load_value
from ckpt_core.errors import ConfigError, IncompatibleCheckpointError
from ckpt_core.loading import (
    CheckpointPart,
    CommittedFiles,
    LocatedTensor,
    located,
    values_beside,
)
from ckpt_core.names import KEPT, SHARED, shared_rank
from ckpt_core.sources import OURS, Path
from ckpt_core.state import PICKLED, get, put
from ckpt_core.types import matches_any

_MODEL: Final = "model"
_GROUPS: Final = "param_groups"
_OF_LIGHTNING: Final = "lightning."
"""In front of the keys of Lightning's own dictionary in a checkpoint of ours."""
_NOT_LIGHTNINGS: Final = frozenset({"positions", "prefetched", "training"})
_LARGE: Final = "lightning"
_MARK: Final = "$tensor"
"""Stands in a value of Lightning's for a large tensor, whose name under `_LARGE` it is."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WholeState:
    """Everything that a checkpoint holds; its large tensors are not read.

    Attributes:
        url: of the checkpoint, for messages.
        parts: by directory.
        shared: the values that all ranks have in common, by item.
        per_rank: the values of each rank, by item.
        small: the files of both, as they are.
        step: optimizer steps done; None if that is not known.
        dtype: of the floating tensors of models in the output; None for their own.
        include: patterns of what is wanted of it, as by `matches_any`.
    """

    url: str
    parts: Mapping[str, CheckpointPart]
    shared: Mapping[str, Any]
    per_rank: Mapping[str, Mapping[str, Any]]
    small: Mapping[str, bytes]
    step: int | None = None
    dtype: torch.dtype | None = None
    include: Sequence[str] = ()

    @classmethod
    def at(cls, source: Place, options: ExportOptions) -> Self:
        """Open a checkpoint to export.

        Raises:
            ConfigError: an option is for weights alone.
        """
        others = {"like": options.like, "adapters": options.adapters, "ema": options.ema}
        if given := [name for name, value in others.items() if value is not None]:
            raise ConfigError(f"{', '.join(given)} concerns weights alone, and this writes a whole state")
        manifest, files, parts = options.opened(source)
        step = next(iter(parts.values())).step if manifest is None else manifest.step
        return replace(cls.of(files, parts, step), dtype=options.dtype, include=options.include)

    @classmethod
    def of(cls, files: CommittedFiles, parts: Mapping[str, CheckpointPart], step: int | None = None) -> Self:
        """Read the small values of an open checkpoint.

        Raises:
            CorruptCheckpointError: a small file is damaged.
            UnsafeCheckpointError: a value can only be rebuilt by code.
        """
        shared, per_rank = values_beside(files, parts)
        others = [path for path in files.paths if shared_rank(path) is not None]
        small = {name: files.read(name) for name in (SHARED, *others, *per_rank) if files.has(name)}
        return cls(url=files.url, parts=parts, shared=shared, per_rank=per_rank, small=small, step=step)

    def conversion(self, files: Sequence[OutFile]) -> Conversion:
        return Conversion(files=files, tensors=located(self.parts), step=self.step)

    def entries(self, part: CheckpointPart) -> dict[str, tuple[Path, bytes]]:
        """Read the plain values of a part: key -> path, and bytes of `torch.save`."""
        entries = part.metadata.state_dict_metadata
        names = {
            name: path for name, path in part.paths.items() if isinstance(entries[name], BytesStorageMetadata)
        }
        wanted = {name: path for name, path in names.items() if matches_any(path, self.include)}
        places = part.find(map(MetadataIndex, wanted))
        return {name: (path, part.read_entry(places[MetadataIndex(name)])) for name, path in wanted.items()}

    def leaves(self, directory: str) -> Iterator[tuple[LocatedTensor, Leaf]]:
        """Yield the tensors of a part, as they will be in the output."""
        for name, each in located({directory: self.parts[directory]}).items():
            if matches_any(each.path, self.include):
                cast = self.dtype if each.path[0] == _MODEL and each.dtype.is_floating_point else None
                yield each, Leaf(Wanted(name, cast), cast or each.dtype, each.shape)

    def tree(self) -> dict[str, Any]:
        """Return item -> nested state; of several parts with an item of one name, by part."""
        found: dict[str, Any] = {}
        first: dict[Any, Leaf] = {}  # tensors that lie in one place are one
        for directory, part in self.parts.items():
            inner: dict[str, Any] = {}
            for tensor, leaf in self.leaves(directory):
                place = tuple(
                    (box, each.path, each.offset, each.strides) for box, each in tensor.boxes.items()
                )
                put(inner, tensor.path, first.setdefault((place, leaf.dtype, leaf.shape), leaf))
            for key, (path, content) in self.entries(part).items():
                if path[0] != PICKLED:
                    put(inner, path, load_value(content, key, allow_pickle=False))
            inner.pop(KEPT, None)
            taken = directory and not found.keys().isdisjoint(inner)
            found |= {directory: inner} if taken else inner
        return found

    def ours(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Return what restores a checkpoint of ours: the same tensors by our names."""
        if self.parts.keys() != {""} or self.include or self.dtype:
            return {}
        files = {name: each.decode() for name, each in self.small.items()}
        return {OURS: {"state": tree, "files": files, "step": self.step}}


def _numbered(tree: Any) -> Any:
    """Return nested state with its optimizers in the form of torch, by number."""
    if not isinstance(tree, Mapping):
        return tree
    groups, state = tree.get(_GROUPS), tree.get("state", {})
    params = [get(group, ("params",)) for group in groups] if isinstance(groups, list) else []
    if not params or not isinstance(state, dict) or not all(isinstance(own, list) for own in params):
        return {key: _numbered(each) for key, each in tree.items()}
    number = {str(name): index for index, name in enumerate(name for own in params for name in own)}
    packed = []
    for group, names in zip(groups or (), params, strict=True):
        own = [number[str(name)] for name in names]
        named = {} if own == names else {"param_names": names}
        packed.append({**group, **named, "params": own})
    return {
        **tree,
        "state": {number.get(str(name), name): each for name, each in state.items()},
        _GROUPS: packed,
    }


def torch_save(source: Place, options: ExportOptions) -> Conversion:
    """Lay out one file with every item of the state, as `torch.save` would write it.

    Optimizers are in the form of `torch.optim.Optimizer.state_dict`, with the names of their parameters as
    `param_names`. What the ranks have of their own is under `OURS`, with all else that a load by us needs; it
    refers to the same tensors.

    Raises:
        ConfigError: nothing is included.
        UnsafeCheckpointError: a value can only be rebuilt by code.
    """
    state = WholeState.at(source, options)
    tree = state.tree()
    shared = {key: value for key, value in state.shared.items() if matches_any((key,), state.include)}
    if not shared and not tree:
        raise ConfigError(f"nothing in {state.url} matches {', '.join(state.include)}")
    return state.conversion([torch_file("", {**shared, **_numbered(tree), **state.ours(tree)})])


def lightning(source: Place, options: ExportOptions) -> Conversion:
    """Lay out the `.ckpt` that Lightning itself would have saved.

    Raises:
        IncompatibleCheckpointError: no Trainer of Lightning saved the checkpoint.
        UnsafeCheckpointError: a value can only be rebuilt by code.
    """
    state = WholeState.at(source, options)
    tree = state.tree()
    own = {
        key.removeprefix(_OF_LIGHTNING): _with_tensors(value, tree.get(_LARGE, {}))
        for key, value in state.shared.items()
        if key.startswith(_OF_LIGHTNING)
    }
    if "loops" not in own or _MODEL not in tree:
        raise IncompatibleCheckpointError(
            f"{state.url} cannot become a .ckpt of Lightning: no Trainer saved it, so that it has neither "
            f"loops nor callbacks (it holds {', '.join(sorted({*tree, *state.shared}))}). Use --to torch for "
            "one file, or --to hf for its weights"
        )
    optimizer = _numbered(tree.get("optimizer", {}))
    several = [] if not optimizer else [optimizer]
    if several and _GROUPS not in optimizer:
        several = [optimizer[number] for number in sorted(optimizer, key=int)]
    rest = {key: value for key, value in own.items() if key not in _NOT_LIGHTNINGS}
    checkpoint = {"lr_schedulers": [], **rest, "state_dict": tree[_MODEL], "optimizer_states": several}
    return state.conversion([torch_file("", {**checkpoint, **state.ours(tree)})])


def _with_tensors(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            return tensors[value[_MARK]]
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    return (
        type(value)(_with_tensors(each, tensors) for each in value) if type(value) in {list, tuple} else value
    )


def stock_dcp(source: Place, options: ExportOptions) -> Conversion:
    """Lay out directories of stock DCP, as many as the checkpoint has parts.

    Values that lie beside DCP's data, such as the states of schedulers and random numbers, stay in the files
    that they are in: stock DCP passes over them, and our loads read them.
    """
    state = WholeState.at(source, options)
    files = [OutFile(path=name, pieces=[content]) for name, content in state.small.items()]
    for directory, part in state.parts.items():
        prefix = f"{directory}: " if directory else ""
        leaves = {each.name.removeprefix(prefix): (each.path, leaf) for each, leaf in state.leaves(directory)}
        for file in dcp_files(leaves, state.entries(part)):
            path = f"{directory}/{file.path}" if directory else file.path
            files.append(replace(file, path=path))
    return state.conversion(files)
