"""The model of a plan: a number, a `config.json`, or a function that builds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from ckpt_core.errors import ConfigError
from ckpt_core.planning._configs import config_model, known_types
from ckpt_core.planning._shapes import ModelShape, counted_model

_CONFIG: Final = "config.json"


def find_model(text: str) -> ModelShape:
    """Find the shapes of a model.

    Args:
        text: a number of parameters ("70B"), a `config.json` or the directory of one, or
            `package.module:function`, which is called under the meta device.

    Raises:
        ConfigError: it is none of these, or the model cannot be built.
    """
    counted = counted_model(text)
    if counted is not None:
        return counted
    path = Path(text).expanduser()
    if text and path.is_dir():
        path /= _CONFIG
    if path.is_file():
        return _configured(path)
    module, found, function = text.partition(":")
    if found and _is_dotted(module) and _is_dotted(function):
        from ckpt_core.planning._meta_models import function_model

        return function_model(text)
    raise ConfigError(
        f"{text!r} is no model: neither a number of parameters such as 70B, nor a config.json or the "
        "directory of one, nor package.module:function"
    )


def _configured(path: Path) -> ModelShape:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ConfigError(
            f"{path}: names no model_type, as a config.json of Hugging Face does; formulas are there "
            f"for {', '.join(known_types())}"
        )
    model = config_model(values, str(path), str(path))
    if model is not None:
        return model
    from ckpt_core.planning._meta_models import transformers_model

    return transformers_model(path, values["model_type"])


def _is_dotted(text: str) -> bool:
    return bool(text) and all(part.isidentifier() for part in text.split("."))
