"""A whole training state, and the files of others that hold one: `torch.save`, Lightning, DCP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self, final

from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ckpt_core.convert._files import OutFile, Wanted
from ckpt_core.convert._torch_file import Leaf, dcp_files, torch_file
from ckpt_core.dcp import load_value
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.loading import CheckpointPart, CommittedFiles, located, values_beside
from ckpt_core.names import KEPT, SHARED, shared_rank
from ckpt_core.state import PICKLED, put

_OF_LIGHTNING: Final = "lightning."
"""In front of the keys of Lightning's own dictionary in a checkpoint of ours."""
_NOT_LIGHTNINGS: Final = frozenset({"positions", "prefetched", "training"})
_LARGE: Final = "lightning"
_MARK: Final = "$tensor"
"""Stands in a value of Lightning's for a large tensor, whose name under `_LARGE` it is."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class WholeState:
    """Everything that a checkpoint holds; its large tensors as leaves, located and not read.

    Attributes:
        url: of the checkpoint, for messages.
        parts: by directory.
        shared: the values that all ranks have in common, by item.
        per_rank: the values of each rank, by item.
        small: the files of both, as they are.
    """

    url: str
    parts: Mapping[str, CheckpointPart]
    shared: Mapping[str, Any]
    per_rank: Mapping[str, Mapping[str, Any]]
    small: Mapping[str, bytes]

    @classmethod
    def of(cls, files: CommittedFiles, parts: Mapping[str, CheckpointPart]) -> Self:
        """Read the small values of an open checkpoint.

        Raises:
            CorruptCheckpointError: a small file is damaged.
            UnsafeCheckpointError: a value can only be rebuilt by code.
        """
        shared, per_rank = values_beside(files, parts)
        others = [path for path in files.paths if shared_rank(path) is not None]
        small = {name: files.read(name) for name in (SHARED, *others, *per_rank) if files.has(name)}
        return cls(url=files.url, parts=parts, shared=shared, per_rank=per_rank, small=small)

    def entries(self, part: CheckpointPart) -> dict[str, bytes]:
        """Read the plain values of a part, as `torch.save` has written each."""
        names = [
            name
            for name, entry in part.metadata.state_dict_metadata.items()
            if isinstance(entry, BytesStorageMetadata)
        ]
        places = part.find(map(MetadataIndex, names))
        return {name: part.read_entry(places[MetadataIndex(name)]) for name in names}

    def tree(self) -> dict[str, Any]:
        """Return item -> nested state; of several parts with an item of one name, by part.

        Optimizers are in the form of `torch.optim.Optimizer.state_dict`, with the names of their parameters
        as `param_names`.
        """
        found: dict[str, Any] = {}
        first: dict[Any, Leaf] = {}  # tensors that lie in one place are one
        for directory, part in self.parts.items():
            inner: dict[str, Any] = {}
            for name, tensor in located({directory: part}).items():
                place = tuple((box, each.path, each.offset) for box, each in tensor.boxes.items())
                leaf = Leaf(Wanted(name), tensor.dtype, tensor.shape)
                put(inner, tensor.path, first.setdefault((place, tensor.dtype, tensor.shape), leaf))
            paths = part.metadata.planner_data or {}
            for key, content in self.entries(part).items():
                if (path := tuple(paths.get(key, (key,))))[0] != PICKLED:
                    put(inner, path, load_value(content, key, allow_pickle=False))
            inner.pop(KEPT, None)
            taken = directory and not found.keys().isdisjoint(inner)
            found |= {directory: inner} if taken else inner
        return {name: numbered(each) for name, each in found.items()}


def numbered(tree: Any) -> Any:
    """Return nested state with its optimizers in the form of torch, by number."""
    if not isinstance(tree, Mapping):
        return tree
    if not isinstance(groups := tree.get("param_groups"), list):
        return {key: numbered(each) for key, each in tree.items()}
    names = [name for group in groups for name in group["params"]]
    number = {str(name): index for index, name in enumerate(names)}
    state = {number.get(name, name): each for name, each in tree.get("state", {}).items()}
    packed = []
    for group in groups:
        own = [number[str(name)] for name in group["params"]]
        named = {} if own == group["params"] else {"param_names": list(group["params"])}
        packed.append({**group, **named, "params": own})
    return {**tree, "state": state, "param_groups": packed}


def torch_files(state: WholeState, name: str) -> list[OutFile]:
    """Lay out one file with every key of the state, as `torch.save` would write it.

    Its keys are the items. A shared value of an item that has tensors, too, is under `NAME.values`, and what
    each rank has of its own under `per_rank`.
    """
    tree = state.tree()
    shared = {f"{key}.values" if key in tree else key: value for key, value in state.shared.items()}
    of_ranks = {"per_rank": dict(state.per_rank)} if any(state.per_rank.values()) else {}
    return [torch_file(name, {**tree, **shared, **of_ranks})]


def lightning_files(state: WholeState, name: str) -> list[OutFile]:
    """Lay out the `.ckpt` that Lightning itself would have saved.

    Raises:
        IncompatibleCheckpointError: no Trainer of Lightning saved the checkpoint.
    """
    tree = state.tree()
    own = {
        key.removeprefix(_OF_LIGHTNING): _with_tensors(value, tree.get(_LARGE, {}))
        for key, value in state.shared.items()
        if key.startswith(_OF_LIGHTNING)
    }
    if "loops" not in own or "model" not in tree:
        raise IncompatibleCheckpointError(
            f"{state.url} cannot become a .ckpt of Lightning: no Trainer saved it, so that it has neither "
            f"loops nor callbacks (it holds {', '.join(sorted({*tree, *state.shared}))}). Use --to torch for "
            "one file, or --to hf for its weights"
        )
    optimizer = tree.get("optimizer", {})
    several = [] if not optimizer else [optimizer]
    if several and "param_groups" not in optimizer:
        several = [optimizer[number] for number in sorted(optimizer, key=int)]
    rest = {key: value for key, value in own.items() if key not in _NOT_LIGHTNINGS}
    checkpoint = {**rest, "state_dict": tree["model"], "optimizer_states": several}
    return [torch_file(name, {"lr_schedulers": [], **checkpoint})]


def _with_tensors(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_MARK}:
            return tensors[value[_MARK]]
        return {key: _with_tensors(each, tensors) for key, each in value.items()}
    return (
        type(value)(_with_tensors(each, tensors) for each in value) if type(value) in {list, tuple} else value
    )


def stock_files(state: WholeState) -> list[OutFile]:
    """Lay out directories of stock DCP, as many as the checkpoint has parts.

    Values that lie beside DCP's data, such as the states of schedulers and random numbers, stay in the files
    that they are in: stock DCP passes over them, and our loads read them.
    """
    files = [OutFile(path=name, pieces=[content]) for name, content in state.small.items()]
    for directory, part in state.parts.items():
        prefix = f"{directory}: " if directory else ""
        leaves = {
            name.removeprefix(prefix): Leaf(Wanted(name), each.dtype, each.shape)
            for name, each in located({directory: part}).items()
        }
        paths = part.metadata.planner_data or {name: (name,) for name in part.metadata.state_dict_metadata}
        for file in dcp_files(leaves, state.entries(part), paths):
            path = f"{directory}/{file.path}" if directory else file.path
            files.append(replace(file, path=path))
    return files
