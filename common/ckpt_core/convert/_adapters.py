"""Models with adapters of PEFT: kept or merged, as PEFT does."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import torch

from ckpt_core.convert._laid_out import Computed, Span
from ckpt_core.errors import ConfigError
from ckpt_core.loading import LocatedTensor
from ckpt_core.sources import MAGNITUDE, start_of

_PREFIX: Final = "base_model.model."
_BASE: Final = "base_layer"
_SAVED: Final = "modules_to_save"
_ORIGINAL: Final = "original_module"
_PLAIN: Final = frozenset(
    [
        "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
        "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout",
        "fan_in_fan_out", "bias", "use_rslora", "modules_to_save", "init_lora_weights",
        "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "loftq_config",
        "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "megatron_core",
        "ensure_weight_tying",
    ]
)  # fmt: skip
"""Fields of a configuration with which LoRA is merged by one product."""
_OTHERWISE: Final = (
    'keep it (adapters="keep", --adapters), or merge it with PEFT itself (merge_and_unload) and save that'
)


def has_adapters(names: Iterable[str]) -> bool:
    """Return whether PEFT has changed a model of these names."""
    return any(not {_BASE, _SAVED, "lora_A"}.isdisjoint(name.split(".")) for name in names)


def base_name(name: str) -> str:
    """Return the name that a tensor of the model itself has without PEFT."""
    return ".".join(part for part in _parts(name) if part != _BASE)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AdaptedModel:
    """A model with one adapter, taken apart; the values are names of the source.

    Attributes:
        config: that of the adapter.
        base: by the names of the model without PEFT, also of what stands for its own modules.
        factors: name of a weight -> the factors of LoRA by their kind, A first.
        own: of the adapter, by the names in its file.
    """

    config: Mapping[str, Any]
    base: Mapping[str, str]
    factors: Mapping[str, Mapping[str, str]]
    own: Mapping[str, str]

    @classmethod
    def of(cls, names: Mapping[str, str], config: Mapping[str, Any]) -> Self:
        """Take the tensors of a model apart.

        Raises:
            ConfigError: it has no adapter of the configuration's kind, or several.
        """
        kind = str(config.get("peft_type"))
        start = start_of(kind)
        base: dict[str, str] = {}
        factors: dict[str, dict[str, str]] = {}
        own: dict[str, str] = {}
        adapters: set[str] = set()
        for name, value in names.items():
            parts = _parts(name)
            at = next((i for i, part in enumerate(parts[:-1]) if part.startswith((_SAVED, start))), -1)
            if at < 0:
                if _ORIGINAL not in parts:
                    base.setdefault(base_name(name), value)
                continue
            adapters.add(parts[at + 1])
            is_module = parts[at] == _SAVED
            left = ".".join(parts[: at if is_module else at + 1] + parts[at + 2 :])
            own[_PREFIX + (left.removesuffix(".weight") if parts[at] == MAGNITUDE else left)] = value
            if is_module:
                base[left] = value
            else:
                factors.setdefault(".".join([*parts[:at], "weight"]), {})[parts[at]] = value
        if len(adapters) != 1:
            found = f"several ({', '.join(sorted(adapters))}): choose by include=" if adapters else "none"
            raise ConfigError(f"one adapter of the kind {kind} is needed, and there is {found}")
        ordered = {name: dict(sorted(each.items())) for name, each in factors.items()}
        own |= _biases(base, factors, config.get("bias", "none"))
        return cls(config=config, base=base, factors=ordered, own=own)

    def require_plain(self) -> None:
        """Raise if PEFT would not merge by adding one product of matrices.

        Raises:
            ConfigError: it names what is in the way.
        """
        odd = [f"{key}={value!r:.60}" for key, value in self.config.items() if value and key not in _PLAIN]
        if self.config.get("peft_type") != "LORA":
            odd = [f"peft_type={self.config.get('peft_type')!r:.60}"]
        if odd:
            raise ConfigError(
                f"only plain LoRA is merged, and this adapter has {', '.join(odd)}: {_OTHERWISE}"
            )

    def merged(self, name: str, weight: Computed, tensors: Mapping[str, LocatedTensor]) -> Computed:
        """Return a weight with its factors added, as `merge_and_unload` computes it.

        Raises:
            ConfigError: the factors are not two matrices that fit the weight.
        """
        factors = self.factors[name]
        shapes = [tensors[each].shape for each in factors.values()]
        transposed = bool(self.config.get("fan_in_fan_out")) or "lora_embedding_A" in factors
        expected = weight.shape[::-1] if transposed else weight.shape
        if [*map(len, shapes)] != [2, 2] or (shapes[1][0], shapes[0][1]) != expected:
            raise ConfigError(
                f"{name!r:.200} has shape {weight.shape}, its adapter {shapes}: only LoRA of matrices is "
                f"merged; {_OTHERWISE}"
            )
        module, rank, columns = name.removesuffix(".weight"), shapes[0][0], weight.shape[1]
        patterns = self.config.get("alpha_pattern") or {}  # the first that fits, as PEFT looks for it
        alphas = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
        alpha = next(alphas, self.config.get("lora_alpha", 8))
        scaling = alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)
        both: list[Span] = [
            (each, 0, math.prod(shape)) for each, shape in zip(factors.values(), shapes, strict=True)
        ]

        def compute(start: int, stop: int, origins: Sequence[torch.Tensor]) -> torch.Tensor:
            a, b = (each.view(shape) for each, shape in zip(origins[-2:], shapes, strict=True))
            first, last, kind = start // columns, -(-stop // columns), b.dtype
            if kind in {torch.float16, torch.bfloat16}:
                a, b = a.float(), b.float()
            product = (b @ a[:, first:last]).T if transposed else b[first:last] @ a
            delta = (product * scaling).to(kind).reshape(-1)
            found = weight.compute(start, stop, origins[:-2])
            found += delta[start - first * columns : stop - first * columns]
            return found

        return Computed(
            what=f"{weight.what} + {scaling!r} * LoRA{' transposed' if transposed else ''}",
            shape=weight.shape,
            dtype=weight.dtype,
            spans=lambda start, stop: [*weight.spans(start, stop), *both],
            compute=compute,
        )


def _parts(name: str) -> list[str]:
    return (name.partition(_PREFIX)[2] or name).split(".")


def _biases(base: Mapping[str, str], factors: Iterable[str], trained: str) -> dict[str, str]:
    modules = {name.removesuffix(".weight") for name in factors}
    found = {name: each for name, each in base.items() if name.endswith(".bias") and trained != "none"}
    inner = {name: name.removesuffix(".bias") for name in found}
    return {
        f"{_PREFIX}{module}.{_BASE}.bias" if module in modules else _PREFIX + name: found[name]
        for name, module in inner.items()
        if trained == "all" or module in modules
    }
