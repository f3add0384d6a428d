"""The formats of DeepSpeed and Megatron-Core, which their own loaders read.

Sources: `runtime/base_optimizer.py` and `checkpoint/universal_checkpoint.py` of DeepSpeed 0.19;
`dist_checkpointing` and `optimizer/optimizer.py` of Megatron-Core 0.16.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch

from ckpt_core.convert._laid_out import Conversion, ExportOptions, OutFile, Place
from ckpt_core.convert._torch_file import Leaf, dcp_files, torch_file
from ckpt_core.convert._whole_state import WholeState
from ckpt_core.dcp import load_value
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.names import KEPT
from ckpt_core.sources import Path
from ckpt_core.state import PICKLED, put

_VERSION: Final = "0.19.8"
"""Of DeepSpeed, whose layout it is."""


def universal(source: Place, options: ExportOptions) -> Conversion:
    """Lay out a directory for DeepSpeed's `load_checkpoint`.

    Its configuration needs `{"checkpoint": {"load_universal": true}}`. Masters are those of the checkpoint,
    or its weights in fp32; groups keep their order.

    Raises:
        IncompatibleCheckpointError: it has no step, or not one optimizer, of parameters of its model.
        UnsafeCheckpointError: a value can only be rebuilt by code.
    """
    state = WholeState.at(source, options)
    tree = state.tree()
    model, optimizer = tree.get("model", {}), tree.get("optimizer", {})
    groups: Any = optimizer.get("param_groups")
    if not isinstance(groups, list) or state.step is None:
        raise IncompatibleCheckpointError(
            f"{state.url} lacks what a Universal Checkpoint of DeepSpeed has: a step and a single optimizer. "
            "For the weights alone use --to hf"
        )
    members = [list(map(str, group["params"])) for group in groups]
    if strange := sorted({name for own in members for name in own} - model.keys()):
        raise IncompatibleCheckpointError(
            f"{state.url}: the optimizer trains {strange[0]!r:.200}, which is no name of the model"
        )
    tag = f"global_step{state.step}_universal"
    files = [
        torch_file(f"{tag}/zero/{name}/{kind}.pt", each if kind == "step" else {"param": each, "cat_dim": 0})
        for own in members
        for name in own
        for kind, each in {
            "fp32": tree.get("master", {}).get(name, model[name]).cast(torch.float32),
            **optimizer.get("state", {}).get(name, {}),
        }.items()
    ]
    shared = {
        "param_groups": [{**group, "params": [index]} for index, group in enumerate(groups)],
        "ds_version": _VERSION,
    }
    scheduler = state.shared.get("scheduler", tree.get("scheduler"))
    states = _model_states(model, members, scheduler, step=state.step)
    return state.conversion(
        [
            *files,
            torch_file(f"{tag}/zero/optimizer_state.pt", shared),
            torch_file(f"{tag}/mp_rank_00_model_states.pt", states),
            OutFile(path="latest_universal", pieces=[tag.encode()]),
        ]
    )


def _model_states(
    model: Mapping[str, Any], members: Sequence[Sequence[str]], scheduler: Any, *, step: int
) -> dict[str, Any]:
    shapes = [{name: torch.Size(model[name].shape) for name in own} for own in members]
    return {
        "module": dict(model), "param_shapes": shapes, "lr_scheduler": scheduler, "global_steps": step,
        "buffer_names": [], "optimizer": None, "frozen_param_shapes": None, "frozen_param_fragments": None,
        "shared_params": {}, "data_sampler": None, "random_ltd": None, "skipped_steps": 0, "dp_world_size": 1,
        "mp_world_size": 1, "ds_config": {}, "ds_version": _VERSION,
    }  # fmt: skip


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
