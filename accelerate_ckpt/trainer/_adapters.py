"""Weights that are once in a checkpoint, in the file that others read.

Adapters are in the file of PEFT, and the weights of a whole model in `model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import torch
from safetensors.torch import load
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ckpt_core.errors import CorruptCheckpointError, FileFailure, IncompatibleCheckpointError
from ckpt_core.state import shard_like
from ckpt_core.types import SavedState

ADAPTERS: Final = "model.adapters"
"""Shared item: name of a tensor -> file and name in it."""

_FILE: Final = "adapter_model.safetensors"
_DEFAULT: Final = "default"
_PREFIX: Final = "base_model.model."

Places = Mapping[str, tuple[str, str]]
"""Name of a tensor of the model -> file, and name in that file."""


def has_adapters(model: Any) -> bool:
    """Return whether PEFT has changed the model, so that only adapters are written."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def gathered_adapters(model: torch.nn.Module) -> Mapping[str, Any]:
    """Gather what is trained, or belongs to an adapter by its name. Collective."""
    if isinstance(model, FullyShardedDataParallel):
        # Its state dict holds shards of another kind, which only torch itself can put together.
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
        return get_model_state_dict(model, options=whole)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = set(getattr(model, "peft_config", {}))
    return {
        name: value.full_tensor().cpu() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
        if name in trained or adapters & set(name.split("."))
    }


def places_of(model: Any, names: Collection[str]) -> Places:
    """Return where PEFT writes the tensors of these names; the same on every rank.

    What it writes in another form is not there.
    """
    if not has_adapters(model):
        return {}
    from peft import get_peft_model_state_dict

    standing = {name: torch.empty(0) for name in names}
    name_of = {id(each): name for name, each in standing.items()}
    is_peft = hasattr(model, "peft_type")
    adapters = list(model.peft_config) if is_peft else model.active_adapters()
    places: dict[str, tuple[str, str]] = {}
    for adapter in adapters:
        file = _FILE if adapter == _DEFAULT or not is_peft else f"{adapter}/{_FILE}"
        written = get_peft_model_state_dict(
            model, state_dict=standing, adapter_name=adapter, save_embedding_layers=False
        )
        for key, value in written.items():
            if id(value) in name_of:
                places[name_of[id(value)]] = file, key if is_peft else f"{_PREFIX}{key}"
    return places


def written_places(places: Places, files: Mapping[str, bytes], state: Mapping[str, Any]) -> Places:
    """Return the places with exactly the values of `state`. The rank that writes."""
    contents = {file: load(files[file]) for file in {file for file, _ in places.values()} if file in files}
    found: dict[str, tuple[str, str]] = {}
    for name, (file, key) in places.items():
        value, there = state.get(name), contents.get(file, {}).get(key)
        if isinstance(value, torch.Tensor) and there is not None and _equal(value, there):
            found[name] = file, key
    return found


def places_in(files: Mapping[str, bytes], state: Mapping[str, torch.Tensor]) -> Places:
    """Return where files hold exactly the values of `state`, under whatever name.

    What a file leaves out because it is tied to another tensor has the place of that one.
    """
    contents = {path: load(content) for path, content in files.items() if path.endswith(".safetensors")}
    found: dict[str, tuple[str, str]] = {}
    tied: dict[tuple[int, torch.Size], tuple[str, str]] = {}
    for name, value in state.items():
        # Files of one module hold its own names, without those of what it is in.
        shorter = [name.split(".", start)[-1] for start in range(name.count(".") + 1)]
        for file, key in ((file, key) for file in contents for key in shorter if key in contents[file]):
            if name not in found and _equal(value, contents[file][key]):
                found[name] = tied[value.data_ptr(), value.shape] = file, key
    others = state.keys() - found.keys()
    places = {name: tied.get((state[name].data_ptr(), state[name].shape)) for name in others}
    return found | {name: place for name, place in places.items() if place is not None}


def loaded_adapters(
    saved: SavedState,
    live: Mapping[str, Any],
    read: Callable[[Collection[str]], Mapping[str, bytes]],
    *,
    whole: bool,
) -> dict[str, Any]:
    """Read the weights that files hold, as shards where the live ones are."""
    places: Places = saved.shared.get(ADAPTERS, {})
    if not places:
        return {}
    files = {path: load(content) for path, content in read({file for file, _ in places.values()}).items()}
    taken = dict(_taken(places, live, files, saved.name))
    odd = [f"{name} is not in the model" for name in places if name not in live] if whole else []
    odd += [
        f"{name}: shape {tuple(value.shape)} in the checkpoint, {tuple(live[name].shape)} here"
        for name, value in taken.items()
        if value.shape != live[name].shape
    ]
    if odd:
        more = f", and {len(odd) - 5} more" if len(odd) > 5 else ""
        raise IncompatibleCheckpointError(
            f"checkpoint {saved.name} is of another model, and nothing was loaded: {', '.join(odd[:5])}{more}"
        )
    return taken


def _taken(
    places: Places, live: Mapping[str, Any], files: Mapping[str, Mapping[str, torch.Tensor]], where: str
) -> Iterator[tuple[str, Any]]:
    for name, (file, key) in places.items():
        if name not in live:
            continue
        found = files.get(file, {}).get(key)
        if found is None:
            failure = FileFailure(path=file, problem=f"lacks {key!r:.200}")
            raise CorruptCheckpointError(f"{where}: {failure}. Nothing was loaded", failures=(failure,))
        yield name, shard_like(found, live[name])


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same bit for bit."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    flat = [each.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*flat)
