"""Which weights the Trainer's own files hold, so that none of them says something else than was trained."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor


def weights_for_files(trainer: Any, *, stock_files: bool) -> Mapping[str, Any] | None:
    """The weights that the Trainer is to write beside our shards. Collective if the model is sharded.

    Returns:
        What to write: None for what the Trainer would write by itself, and nothing if it is empty. Adapters
        are written always: they are small, and `PeftModel.from_pretrained` reads nothing else.
    """
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    if trainer.is_fsdp_enabled or getattr(trainer, "is_distributed_loading_by_transformers", False):
        if has_adapters(model):
            return _gathered_adapters(trainer.model)
        if trainer.is_fsdp_enabled or not stock_files:
            return {}
        gathered: Mapping[str, Any] = model.gather_sharded_state_dict_for_save(
            model,
            model.state_dict(),
            model.config.distributed_config,
            save_on_this_rank=trainer.args.should_save,
        )
        return gathered
    return None if stock_files or has_adapters(model) else {}


def has_adapters(model: Any) -> bool:
    """Whether PEFT has changed the model, so that only its adapters are written."""
    return hasattr(model, "peft_config") or bool(getattr(model, "_hf_peft_config_loaded", False))


def _gathered_adapters(model: torch.nn.Module) -> Mapping[str, Any]:
    """Everything that is trained, or belongs to an adapter by its name, in one piece. Collective."""
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


@contextmanager
def gathered_already(model: Any) -> Generator[None]:
    """A model that is saved by one rank alone: as it was distributed, it would wait for the others."""
    config = getattr(model, "config", None)
    distributed = getattr(config, "distributed_config", None)
    if config is not None and distributed is not None:
        config.distributed_config = None
    try:
        yield
    finally:
        if config is not None and distributed is not None:
            config.distributed_config = distributed


def remove_empty_weights(folder: Path) -> None:
    """Remove files of weights that hold none: whoever reads one gets a model that was never trained."""
    for path in folder.rglob("*.safetensors"):
        with safe_open(path, framework="pt") as weights:
            names = weights.keys()
        if not names:
            path.unlink()
