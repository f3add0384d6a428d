"""The parameters of a model, by shape: what its checkpoints are made of."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple, TypeAlias, final

from ckpt_core.errors import ConfigError

ParameterRole: TypeAlias = Literal["matrix", "embedding", "vector", "unknown"]
"""What an optimizer may treat apart: hidden matrices, embeddings and heads, biases and norms."""

_COUNT: Final = re.compile(r"\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE]\+?[0-9]+)?)\s*([kKmMbBgGtT]?)\s*")
_FACTORS: Final = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


class ParameterGroup(NamedTuple):
    """Parameters of one shape.

    Attributes:
        shape: of each.
        copies: how many there are.
        role: what they are; "unknown" where only a number is known.
        trained: whether an optimizer has state for them.
        item_bytes: of one element, where the model fixes its dtype; None: as the plan says.
        expert: whether they are of experts, of which each token uses some.
    """

    shape: tuple[int, ...]
    copies: int = 1
    role: ParameterRole = "matrix"
    trained: bool = True
    item_bytes: int | None = None
    expert: bool = False

    @property
    def parameters(self) -> int:
        """The elements of all of them."""
        return math.prod(self.shape) * self.copies


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A model, as far as its checkpoints are concerned.

    Attributes:
        name: as given, for users.
        source: how its shapes are known, for users.
        groups: its parameters; tied ones once.
        buffer_bytes: of its persistent buffers.
        dtype: of its weights, where the model says it.
    """

    name: str
    source: str
    groups: Sequence[ParameterGroup]
    buffer_bytes: int = 0
    dtype: str | None = None

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(group.parameters for group in self.groups)

    @property
    def trained(self) -> int:
        """The number of parameters that are trained."""
        return sum(group.parameters for group in self.groups if group.trained)

    @property
    def experts(self) -> int:
        """The number of parameters of experts."""
        return sum(group.parameters for group in self.groups if group.expert)

    @property
    def tensors(self) -> int | None:
        """The number of parameter tensors; None if it is unknown."""
        if any(group.role == "unknown" for group in self.groups):
            return None
        return sum(group.copies for group in self.groups)


def counted_model(text: str) -> ModelShape | None:
    """Return a model of so many parameters, such as "70B"; None if it is no number.

    Raises:
        ConfigError: there are more than a float can count.
    """
    found = _COUNT.fullmatch(text)
    if found is None:
        return None
    number = float(found[1].replace("_", "").replace(",", ""))
    product = number * _FACTORS[found[2].lower()]
    if not math.isfinite(product):
        raise ConfigError("so many parameters are no model: give fewer than 1e300")
    if (count := round(product)) < 1:
        return None
    group = ParameterGroup((count,), role="unknown")
    return ModelShape(name=text.strip(), source="a number of parameters", groups=(group,))


def with_experts(model: ModelShape, count: int) -> ModelShape:
    """Return a model of which so many parameters are those of experts.

    Raises:
        ConfigError: its shapes are known, and its experts with them; or it has not so many parameters.
    """
    if model.tensors is not None:
        raise ConfigError(
            f"--expert-parameters is for a number of parameters; the shapes of {model.name} tell its experts"
        )
    if not 0 < count < model.parameters:
        raise ConfigError(f"--expert-parameters must be a part of {model.parameters:,}, not {count:,}")
    dense = ParameterGroup((model.parameters - count,), role="unknown")
    return replace(model, groups=(dense, ParameterGroup((count,), role="unknown", expert=True)))
