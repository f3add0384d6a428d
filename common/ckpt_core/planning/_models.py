"""The model of a plan: a number, a `config.json`, or a function that builds it."""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from ckpt_core.errors import ConfigError
from ckpt_core.validation import imported

_COUNT: Final = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([kKmMbBgGtT]?)\s*")
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model, as far as its checkpoints are concerned.

    Attributes:
        source: how it is known, for users.
        parameters: tied ones once.
        trained: those of them that an optimizer has state for.
        tensors: how many tensors they are; None if only a number is known.
        kept: those of other dtypes than most, and their bytes.
        buffer_bytes: of its persistent buffers.
        dtype: of its weights, where the model says it.
    """

    name: str
    source: str
    parameters: int
    trained: int
    tensors: int | None = None
    kept: tuple[int, int] = (0, 0)
    buffer_bytes: int = 0
    dtype: str = ""


def find_model(text: str) -> ModelShape:
    """Find out what a model holds.

    Args:
        text: a number of parameters ("70B"); a `config.json` or the directory of one, which Transformers
            builds, or `package.module:function`, which is called: both under torch's meta device.

    Raises:
        ConfigError: it is none of these, or the model cannot be built.
    """
    if found := _COUNT.fullmatch(text):
        number = float(found[1].replace("_", "").replace(",", "")) * _FACTORS[found[2].lower()]
        if not math.isfinite(number):
            raise ConfigError("so many parameters are no model: give fewer than 1e300")
        if count := round(number):
            return ModelShape(
                name=text.strip(), source="a number of parameters", parameters=count, trained=count
            )
    path = Path(text).expanduser()
    if text and path.is_dir():
        path /= "config.json"
    if path.is_file():
        return _of_config(path)
    module, colon, function = text.partition(":")
    if colon and all(part.isidentifier() for part in f"{module}.{function}".split(".")):
        return _of_function(text)
    raise ConfigError(
        f"{text!r} is no model: neither a number of parameters such as 70B, nor a config.json or the "
        "directory of one, nor package.module:function"
    )


def _of_config(path: Path) -> ModelShape:
    instead = "give the number of parameters, such as 7B, or package.module:function that builds the model"
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"{path}: only Transformers builds a config, and it is not installed: install it, or {instead}"
        ) from error
    try:
        # Never code from the model's directory, or kernels of the Hub: `trust_remote_code` stays off.
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            make: Any = AutoModelForCausalLM.from_config
            model = make(config, attn_implementation="eager")
    except Exception as error:
        raise ConfigError(
            f"{path}: Transformers cannot build a causal language model of it: "
            f"{type(error).__name__}: {error}".partition("\n")[0]
            + f"; {instead}"
        ) from error
    return _shape_of(model, str(path), "built by Transformers on the meta device", config.dtype or "bf16")


def _of_function(text: str) -> ModelShape:
    import torch

    if "" not in sys.path:
        sys.path.insert(0, "")
    make: Any = imported("plan", text)
    try:
        with torch.device("meta"):
            model = make()
    except (Exception, SystemExit) as error:
        kind = type(error).__name__
        raise ConfigError(f"{text} failed on the meta device: {kind}: {error}") from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{text}: it returned {type(model).__name__}, not a torch.nn.Module")
    return _shape_of(model, text, "built on the meta device", None)


def _shape_of(model: Any, name: str, source: str, dtype: Any) -> ModelShape:
    parameters = list(model.parameters())  # a tied one once
    sizes: Counter[Any] = Counter()
    for each in parameters:
        sizes[each.dtype] += each.numel()
    main = max(sizes, key=lambda each: sizes[each], default=None)  # which `--weights` replaces
    others = [each for each in parameters if each.dtype != main]
    own = {id(each) for each in parameters}
    saved = {id(each): each for each in model.state_dict(keep_vars=True).values() if id(each) not in own}
    return ModelShape(
        name=name,
        source=source,
        parameters=sum(sizes.values()),
        trained=sum(each.numel() for each in parameters if each.requires_grad),
        tensors=len(parameters),
        kept=(sum(each.numel() for each in others), sum(each.nbytes for each in others)),
        buffer_bytes=sum(getattr(each, "nbytes", 0) for each in saved.values()),
        dtype=str(main if dtype is None else dtype).removeprefix("torch."),
    )
