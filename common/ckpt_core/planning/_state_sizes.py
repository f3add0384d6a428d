"""Bytes of a training's state: weights, master weights, moments, others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, final, get_args

from ckpt_core.errors import ConfigError
from ckpt_core.planning._shapes import ModelShape, ParameterGroup

Optimizer: TypeAlias = Literal[
    "adamw", "adam", "sgd", "sgd-momentum", "lion", "adafactor", "muon", "adamw-8bit", "none"
]
OPTIMIZERS: Final[tuple[Optimizer, ...]] = get_args(Optimizer)

DTYPE_BYTES: Final[Mapping[str, int]] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "fp64": 8}
_TORCH_NAMES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}

_SQUARE: Final = 4096
"""The side of the matrices of a model of which only the number of parameters is known."""

_BLOCK: Final = 256
"""Elements of a quantised moment that share one scale, in bitsandbytes and torchao."""

_SMALLEST_QUANTISED: Final = 4096
"""Tensors of fewer elements keep moments of 4 bytes, in bitsandbytes and torchao."""

_FLOAT: Final = 4


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedState:
    """What a training holds beside the shapes of its model.

    Attributes:
        optimizer: whose state is saved; "none" for weights alone.
        weights: dtype of the weights.
        master: dtype of a second copy of the weights in the optimizer; None if there is none.
        moments: dtype of the optimizer's moments.
        gradients: dtype of gradients that are saved; None if none are.
    """

    optimizer: Optimizer = "adamw"
    weights: str = "bf16"
    master: str | None = None
    moments: str = "fp32"
    gradients: str | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer must be one of {', '.join(OPTIMIZERS)}, not {self.optimizer!r}; for another one "
                "give the bytes that it saves per parameter: --optimizer-bytes 8"
            )
        for name in ("weights", "master", "moments", "gradients"):
            dtype = getattr(self, name)
            if dtype is not None and dtype not in DTYPE_BYTES:
                raise ConfigError(f"{name} must be one of {', '.join(DTYPE_BYTES)}, not {dtype!r}")


class StateComponent(NamedTuple):
    """One component of a checkpoint.

    Attributes:
        name: of the component.
        size_bytes: of all ranks together, each byte once.
        detail: what it is made of, for users.
    """

    name: str
    size_bytes: int
    detail: str


def dtype_word(name: str) -> str | None:
    """Translate a dtype of a config into a word of this module; None if it has none."""
    return _TORCH_NAMES.get(name)


def state_components(
    model: ModelShape, state: TrainedState, *, optimizer_bytes: float | None = None, others: int = 0
) -> list[StateComponent]:
    """List what a checkpoint of a training holds, with its size.

    Args:
        model: the shapes.
        state: optimizer and dtypes.
        optimizer_bytes: bytes per trained parameter, instead of those of the optimizer's moments.
        others: bytes of everything else: per-rank values and metadata.
    """
    trained = [group for group in model.groups if group.trained]
    size = DTYPE_BYTES[state.weights]
    weights = sum(group.parameters * (group.item_bytes or size) for group in model.groups)
    found = [StateComponent("weights", weights, f"{model.parameters:,} parameters, {state.weights}")]
    if state.master is not None:
        master = model.trained * DTYPE_BYTES[state.master]
        found.append(StateComponent("master weights", master, f"{state.master}, in the optimizer"))
    if optimizer_bytes is not None:
        moments = math.ceil(model.trained * optimizer_bytes)
        found.append(StateComponent("moments", moments, f"{optimizer_bytes:g} bytes per parameter, as given"))
    elif state.optimizer != "none":
        found.append(_moments(trained, state))
    if state.gradients is not None:
        gradients = model.trained * DTYPE_BYTES[state.gradients]
        found.append(StateComponent("gradients", gradients, f"{state.gradients}, of accumulation windows"))
    if model.buffer_bytes:
        found.append(StateComponent("buffers", model.buffer_bytes, "persistent buffers of the modules"))
    return [*found, StateComponent("others", others, "per-rank values, manifest and metadata")]


def optimizer_note(model: ModelShape, optimizer: Optimizer) -> str | None:
    """Return the assumption about shapes that an optimizer needs, or None."""
    if optimizer in {"adafactor", "muon"} and any(group.role == "unknown" for group in model.groups):
        return f"all parameters are in hidden matrices of {_SQUARE:,} x {_SQUARE:,}, as the model is a number"
    return None


def _moments(groups: Sequence[ParameterGroup], state: TrainedState) -> StateComponent:
    each, detail = _MOMENTS[state.optimizer]
    item = DTYPE_BYTES[state.moments]
    total = math.ceil(sum(each(group, item) for group in groups))
    text = detail.format(moments=state.moments)
    return StateComponent("moments", total, f"{state.optimizer}: {text}")


def _one(group: ParameterGroup, item: int) -> float:
    return group.parameters * item


def _two(group: ParameterGroup, item: int) -> float:
    return 2 * group.parameters * item


def _nothing(group: ParameterGroup, item: int) -> float:
    del group, item
    return 0


def _muon(group: ParameterGroup, item: int) -> float:
    hidden = group.role in {"matrix", "unknown"}
    return _one(group, item) if hidden else _two(group, item)


def _factored(group: ParameterGroup, item: int) -> float:
    """Count rows and columns of the second moment, always of 4 bytes."""
    del item
    if group.role == "unknown":
        return group.parameters * 2 / _SQUARE * _FLOAT
    if len(group.shape) < 2:
        return group.parameters * _FLOAT
    *outer, rows, columns = group.shape
    return math.prod(outer) * (rows + columns) * group.copies * _FLOAT


def _quantised(group: ParameterGroup, item: int) -> float:
    """Count two moments of a byte with a scale per block; small tensors in full."""
    del item
    if group.role != "unknown" and math.prod(group.shape) < _SMALLEST_QUANTISED:
        return 2 * group.parameters * _FLOAT
    return 2 * group.parameters * (1 + _FLOAT / _BLOCK)


_MOMENTS: Final[Mapping[str, tuple[Callable[[ParameterGroup, int], float], str]]] = {
    "adamw": (_two, "2 moments, {moments}"),
    "adam": (_two, "2 moments, {moments}"),
    "sgd": (_nothing, "no state"),
    "sgd-momentum": (_one, "1 moment, {moments}"),
    "lion": (_one, "1 moment, {moments}"),
    "adafactor": (_factored, "rows and columns of the second moment, fp32, no first moment"),
    "muon": (_muon, "1 moment for hidden matrices, 2 for the rest, {moments}"),
    "adamw-8bit": (_quantised, f"2 moments of a byte, a scale of 4 bytes per {_BLOCK}"),
}
