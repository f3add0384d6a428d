"""The `torch_dist` of Megatron-Core: DCP with `common.pt` and `metadata.json`.

Source: `dist_checkpointing` and `optimizer/optimizer.py` of Megatron-Core 0.16.
"""

from __future__ import annotations

import json
from typing import Any, Final

from ckpt_core.convert._conversion import Conversion, ExportOptions, Place
from ckpt_core.convert._laid_out import OutFile
from ckpt_core.convert._torch_file import Leaf, dcp_files, torch_file
from ckpt_core.convert._whole_state import WholeState
from ckpt_core.dcp import load_value
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.names import KEPT
from ckpt_core.sources import Path
from ckpt_core.state import PICKLED, put

_CONFIG: Final = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_COMMON: Final = "common"
_OF_RANKS: Final = "/shard_"
"""In names of objects that ranks have of their own, which are entries of DCP."""


def torch_dist(source: Place, options: ExportOptions) -> Conversion:
    """Lay out a directory for `dist_checkpointing.load`.

    Tensors of `model` have their names, masters and optimizer state `optimizer.state.KIND.NAME`, others their
    dotted path; everything else is in `common.pt`.

    Raises:
        IncompatibleCheckpointError: the checkpoint has several parts, or two tensors would have one name.
        UnsafeCheckpointError: a value can only be rebuilt by code.
    """
    state = WholeState.at(source, options)
    if state.parts.keys() != {""}:
        raise IncompatibleCheckpointError(f"{state.url} has several parts, and torch_dist has one")
    common: dict[str, Any] = {"iteration": state.step, "checkpoint_version": 3.0, **state.shared}
    leaves: dict[str, tuple[Path, Leaf]] = {}
    for tensor, leaf in state.leaves(""):
        key = _key(tensor.path)
        if tensor.path[0] == _COMMON or (tensor.path[0] == "optimizer" and not tensor.shape):
            put(common, _in_common(tensor.path), leaf)
        elif key in leaves:
            raise IncompatibleCheckpointError(f"{state.url}: two tensors would be called {key!r:.200}")
        else:
            leaves[key] = (key,), leaf
    objects: dict[str, tuple[Path, bytes]] = {}
    for name, (path, content) in state.entries(state.parts[""]).items():
        if len(path) == 1 and _OF_RANKS in name:
            objects[name] = path, content
        elif path[0] not in {PICKLED, KEPT}:
            put(common, _in_common(path), load_value(content, name, allow_pickle=False))
    return state.conversion(
        [
            *dcp_files(leaves, objects),
            torch_file("common.pt", common),
            OutFile(path="metadata.json", pieces=[json.dumps(_CONFIG).encode()]),
        ]
    )


def _key(path: Path) -> str:
    """Return Megatron-Core's name of a tensor."""
    match path:
        case ("model", *rest):
            return ".".join(map(str, rest))
        case ("master", *rest):
            return ".".join(map(str, ("optimizer.state.fp32_param", *rest)))
        case ("optimizer", "state", name, *kind):
            return ".".join(map(str, ("optimizer.state", *kind, name)))
        case _:
            return ".".join(map(str, path))


def _in_common(path: Path) -> Path:
    return path[1:] if path[0] == _COMMON else path
