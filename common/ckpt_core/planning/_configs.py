"""Shapes of well-known models, computed from their `config.json`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from ckpt_core.errors import ConfigError
from ckpt_core.planning._shapes import ModelShape, ParameterGroup

_Groups: TypeAlias = list[ParameterGroup]


class _Config:
    """The numbers of a config; every one that is wrong is named."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values = values
        self._where = where

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0.

        Raises:
            ConfigError: it is missing, or none.
        """
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        problem = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{self._where}: {key!r} must be a whole number above 0, and {problem}")

    def switch(self, key: str, *, default: bool) -> bool:
        """Return a truth value."""
        value = self.values.get(key, default)
        return default if value is None else bool(value)


def config_model(values: Mapping[str, Any], name: str, where: str) -> ModelShape | None:
    """Compute the shapes of a causal language model; None for a type without formula.

    Args:
        values: the content of a `config.json`.
        name: of the model, for users.
        where: the file, for messages.

    Raises:
        ConfigError: a number that the formula needs is missing or wrong.
    """
    kind = values.get("model_type")
    make = _FORMULAS.get(kind) if isinstance(kind, str) else None
    if make is None or values.get("quantization_config") or values.get("add_cross_attention"):
        return None
    dtype = values.get("dtype", values.get("torch_dtype"))
    return ModelShape(
        name=name,
        source=f"formula for {kind}",
        groups=make(_Config(values, where)),
        dtype=dtype if isinstance(dtype, str) else None,
    )


def known_types() -> Sequence[str]:
    """Return the model types that have a formula."""
    return sorted(_FORMULAS)


def _llama(config: _Config) -> _Groups:
    bias = config.switch("attention_bias", default=False)
    return _decoder(config, _attention(config, qkv_bias=bias, output_bias=bias) + _gated_mlp(config))


def _mistral(config: _Config) -> _Groups:
    return _decoder(config, _attention(config, heads_of_key=8) + _gated_mlp(config, may_have_bias=False))


def _qwen2(config: _Config) -> _Groups:
    return _decoder(config, _attention(config, qkv_bias=True) + _gated_mlp(config, may_have_bias=False))


def _qwen3(config: _Config) -> _Groups:
    bias = config.switch("attention_bias", default=False)
    attention = _attention(config, qkv_bias=bias, output_bias=bias, head_size=128)
    norms = [ParameterGroup((config.number("head_dim", 128),), 2, "vector")]
    return _decoder(config, [*attention, *norms, *_gated_mlp(config, may_have_bias=False)])


def _mixtral(config: _Config) -> _Groups:
    hidden, wide = config.number("hidden_size"), config.number("intermediate_size")
    experts = config.number("num_local_experts", 8)
    layer = [
        *_attention(config, heads_of_key=8),
        ParameterGroup((experts, hidden)),
        ParameterGroup((wide, hidden), 2 * experts, expert=True),
        ParameterGroup((hidden, wide), experts, expert=True),
    ]
    return _decoder(config, layer)


def _attention(
    config: _Config,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    heads_of_key: int | None = None,
    head_size: int | None = None,
) -> _Groups:
    """Return the parameters of one attention with grouped keys and values."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    size = config.number("head_dim", head_size or max(hidden // heads, 1))
    keys = config.number("num_key_value_heads", heads_of_key or heads) * size
    queries = heads * size
    groups = [
        ParameterGroup((queries, hidden)),
        ParameterGroup((keys, hidden), 2),
        ParameterGroup((hidden, queries)),
    ]
    if qkv_bias:
        groups += [ParameterGroup((queries,), 1, "vector"), ParameterGroup((keys,), 2, "vector")]
    return [*groups, ParameterGroup((hidden,), 1, "vector")] if output_bias else groups


def _gated_mlp(config: _Config, *, may_have_bias: bool = True) -> _Groups:
    hidden, wide = config.number("hidden_size"), config.number("intermediate_size")
    groups = [ParameterGroup((wide, hidden), 2), ParameterGroup((hidden, wide))]
    if may_have_bias and config.switch("mlp_bias", default=False):
        groups += [ParameterGroup((wide,), 2, "vector"), ParameterGroup((hidden,), 1, "vector")]
    return groups


def _decoder(config: _Config, layer: _Groups) -> _Groups:
    """Return a decoder with two norms per layer, one at the end, and a head."""
    hidden, words = config.number("hidden_size"), config.number("vocab_size")
    layers = config.number("num_hidden_layers")
    tied = config.switch("tie_word_embeddings", default=False)
    return [
        ParameterGroup((words, hidden), 1 if tied else 2, "embedding"),
        *_repeated(layer, layers),
        ParameterGroup((hidden,), 2 * layers + 1, "vector"),
    ]


def _gpt2(config: _Config) -> _Groups:
    hidden, layers = config.number("n_embd"), config.number("n_layer")
    words, places = config.number("vocab_size"), config.number("n_positions")
    wide = config.number("n_inner", 4 * hidden)
    tied = config.switch("tie_word_embeddings", default=True)
    return [
        ParameterGroup((words, hidden), 1 if tied else 2, "embedding"),
        ParameterGroup((places, hidden), 1, "embedding"),
        *_repeated(_dense_layer(hidden, wide), layers),
        ParameterGroup((hidden,), 2, "vector"),
    ]


def _gpt_neox(config: _Config) -> _Groups:
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    words, wide = config.number("vocab_size"), config.number("intermediate_size")
    tied = config.switch("tie_word_embeddings", default=False)
    bias = config.switch("attention_bias", default=True)
    return [
        ParameterGroup((words, hidden), 1 if tied else 2, "embedding"),
        *_repeated(_dense_layer(hidden, wide, attention_bias=bias), layers),
        ParameterGroup((hidden,), 2, "vector"),
    ]


def _dense_layer(hidden: int, wide: int, *, attention_bias: bool = True) -> _Groups:
    """Return a layer with one matrix for queries, keys and values, and two norms."""
    biases = [ParameterGroup((3 * hidden,), 1, "vector"), ParameterGroup((hidden,), 1, "vector")]
    return [
        ParameterGroup((3 * hidden, hidden)),
        ParameterGroup((hidden, hidden)),
        *(biases if attention_bias else ()),
        ParameterGroup((wide, hidden)),
        ParameterGroup((hidden, wide)),
        ParameterGroup((wide,), 1, "vector"),
        ParameterGroup((hidden,), 1 + 4, "vector"),
    ]


def _repeated(layer: _Groups, layers: int) -> _Groups:
    return [group._replace(copies=group.copies * layers) for group in layer]


_FORMULAS: Final[Mapping[str, Callable[[_Config], _Groups]]] = {
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
