"""Accelerate's own methods, called so that they do only the small things.

Under `small_things_only` the accelerator has no models, optimizers and loaders, so that the stock method
saves schedulers, scaler, random states and registered objects, and leaves the rest to the core. Under
`large_things_only` it has nothing else, so that of what it wrote itself it loads only that.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.other import clean_state_dict_for_safetensors
from safetensors.torch import save as safetensors_bytes
from torch.distributed.tensor import DTensor

UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
"""Engines that keep their shards to themselves; their checkpoints stay what they are."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StockMethods:
    """The methods as they were before `enable`."""

    save_state: Callable[..., Any]
    load_state: Callable[..., Any]
    end_training: Callable[..., Any]


@contextmanager
def small_things_only(accelerator: Accelerator) -> Generator[None]:
    """An accelerator without anything large, whose save goes exactly where it is told."""
    configuration = accelerator.project_configuration
    naming, iteration = configuration.automatic_checkpoint_naming, configuration.iteration
    # The stock rotation deletes before anything is written.
    configuration.automatic_checkpoint_naming = False
    try:
        with _with(
            accelerator,
            _models=[],
            _optimizers=[],
            _dataloaders=[],
            _save_model_state_pre_hook=OrderedDict(),
            _load_model_state_pre_hook=OrderedDict(),
        ):
            yield
    finally:
        configuration.automatic_checkpoint_naming, configuration.iteration = naming, iteration


@contextmanager
def large_things_only(accelerator: Accelerator) -> Generator[None]:
    """An accelerator without schedulers, scaler and registered objects."""
    with _with(accelerator, _schedulers=[], _custom_objects=[], scaler=None):
        yield


@contextmanager
def _with(accelerator: Accelerator, **replaced: Any) -> Generator[None]:
    kept = {name: accelerator.__dict__[name] for name in replaced}
    accelerator.__dict__.update(replaced)
    try:
        yield
    finally:
        accelerator.__dict__.update(kept)


def files_in(directory: Path) -> dict[str, bytes]:
    """Content of every file at or below `directory`, by POSIX-relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def is_stock_layout(accelerator: Accelerator, states: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the stock loader wants single files: plain replicas, nothing sharded."""
    if accelerator.distributed_type in {*UNSUPPORTED, DistributedType.FSDP}:
        return False
    return not any(isinstance(value, DTensor) for state in states for value in state.values())


def weight_files(weights: Sequence[Mapping[str, Any]], *, safe: bool) -> dict[str, bytes]:
    """`model.safetensors` and its like, as the stock `load_state` of plain replicas expects them."""
    names = ["model" if safe else "pytorch_model"] * len(weights)
    suffix = "safetensors" if safe else "bin"
    return {
        f"{name}_{index}.{suffix}" if index else f"{name}.{suffix}": _weights(state, safe=safe)
        for index, (name, state) in enumerate(zip(names, weights, strict=True))
    }


def _weights(state: Mapping[str, Any], *, safe: bool) -> bytes:
    if not safe:
        return torch_bytes(dict(state))
    return safetensors_bytes(clean_state_dict_for_safetensors(dict(state)), metadata={"format": "pt"})


def optimizer_files(optimizers: Sequence[Any]) -> dict[str, bytes]:
    """`optimizer.bin` and its like."""
    return {
        f"optimizer_{index}.bin" if index else "optimizer.bin": torch_bytes(optimizer.state_dict())
        for index, optimizer in enumerate(optimizers)
    }


def torch_bytes(value: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
