"""Shapes of models that are built without memory, on torch's meta device."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_core.errors import ConfigError
from ckpt_core.planning._shapes import ModelShape, ParameterGroup, ParameterRole

if TYPE_CHECKING:
    from torch import nn

_VECTOR_DIMENSIONS = 1
_EXPERTS = "experts"
"""The module of a layer's routed experts, in Transformers and torchtitan."""


def function_model(text: str) -> ModelShape:
    """Build the model that a function without arguments returns, on the meta device.

    Args:
        text: `package.module:function`; the working directory is looked in, too.

    Raises:
        ConfigError: there is none, it fails, or it returns no module.
    """
    module_name, _, function_name = text.partition(":")
    torch = _torch(text)
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        made: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            made = getattr(made, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{text}: cannot import it: {error}") from error
    try:
        with torch.device("meta"):
            model = made()
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ConfigError(f"{text}: {function_name}() failed on the meta device: {kind}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{text}: it returned {type(model).__name__}, not a torch.nn.Module")
    return _shape_of(model, text, "built on the meta device")


def transformers_model(path: Path, kind: object) -> ModelShape:
    """Build the causal language model of a config on the meta device.

    Raises:
        ConfigError: Transformers is not installed, or cannot build it.
    """
    torch = _torch(str(path))
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"{path}: there is no formula for the model type {kind!r}, and Transformers, which could build "
            "it, is not installed: install it, or give the number of parameters, such as 7B"
        ) from error
    try:
        # Never code from the model's directory: `trust_remote_code` stays off.
        config = AutoConfig.from_pretrained(path.parent if path.name == "config.json" else path)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:
        kind_of_error = type(error).__name__
        raise ConfigError(
            f"{path}: Transformers cannot build a causal language model of the type {kind!r}: "
            f"{kind_of_error}: {error}; give the number of parameters, such as 7B, or a function that "
            "builds it, package.module:function"
        ) from error
    return _shape_of(model, str(path), "built by Transformers on the meta device", dtype=config.dtype)


def _torch(what: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"{what}: to build a model, install torch") from error
    return torch


def _shape_of(model: nn.Module, name: str, source: str, dtype: Any = None) -> ModelShape:
    embeddings = _embeddings(model)
    main = _main_dtype(model)
    counted: Counter[ParameterGroup] = Counter()
    for path, parameter in model.named_parameters():  # a tied one once
        group = ParameterGroup(
            shape=tuple(parameter.shape),
            role=_role(len(parameter.shape), is_embedding=id(parameter) in embeddings),
            trained=parameter.requires_grad,
            item_bytes=None if parameter.dtype == main else parameter.element_size(),
            expert=_EXPERTS in path.split("."),
        )
        counted[group] += 1
    persistent = _persistent_buffers(model)
    return ModelShape(
        name=name,
        source=source,
        groups=tuple(group._replace(copies=count) for group, count in counted.items()),
        buffer_bytes=sum(size for _, size in persistent),
        dtype=str(main if dtype is None else dtype).removeprefix("torch."),
    )


def _main_dtype(model: nn.Module) -> Any:
    """Return the dtype of most of the parameters, which `--weights` replaces."""
    sizes: Counter[Any] = Counter()
    for parameter in model.parameters():
        sizes[parameter.dtype] += parameter.numel()
    return max(sizes, key=lambda each: sizes[each], default=None)


def _persistent_buffers(model: nn.Module) -> list[tuple[str, int]]:
    saved: Mapping[str, Any] = model.state_dict(keep_vars=True)
    own = {id(parameter) for parameter in model.parameters()}
    seen: dict[int, tuple[str, int]] = {}
    for name, tensor in saved.items():
        if hasattr(tensor, "element_size") and id(tensor) not in own:
            seen[id(tensor)] = (name, tensor.numel() * tensor.element_size())
    return list(seen.values())


def _embeddings(model: nn.Module) -> set[int]:
    """Return the ids of the weights of embeddings, and of heads of their shape."""
    from torch import nn

    found = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    shapes = {tuple(weight.shape) for weight in found}
    heads = [
        module.weight
        for module in model.modules()
        if isinstance(module, nn.Linear) and tuple(module.weight.shape) in shapes
    ]
    return {id(weight) for weight in (*found, *heads)}


def _role(dimensions: int, *, is_embedding: bool) -> ParameterRole:
    if is_embedding:
        return "embedding"
    return "vector" if dimensions <= _VECTOR_DIMENSIONS else "matrix"
