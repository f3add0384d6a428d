"""The form in which transformers would save a model, without its weights.

A model in memory may have other tensors than its files: experts are one tensor there, tied weights two. A
model of the configuration on the meta device goes through the functions that `save_pretrained` calls; each
tensor that comes out is a view of one that went in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch.overrides import TorchFunctionMode

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError

_logger = logger_of(__name__)


class StateView(NamedTuple):
    """A tensor of a file, as a view of one of the state, in elements."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after another, row-major."""
        return torch.empty(self.shape, device="meta").stride() == self.strides


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class HubForm:
    """What the files of a model hold.

    Attributes:
        shapes: of every tensor in the state of the model.
        twins: name -> names of tensors that are tied to it, of those that are saved.
        views: name in the files -> where it is in the state.
    """

    shapes: Mapping[str, tuple[int, ...]]
    twins: Mapping[str, Sequence[str]]
    views: Mapping[str, StateView]


def hub_form(config: Mapping[str, Any]) -> HubForm | None:
    """Return the form of a configuration's model; None if it is not known.

    Raises:
        ConfigError: no model can be built of it.
    """
    try:
        import transformers
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict
    except ImportError:
        return None
    names = config.get("architectures") or [None]
    kind: Any = getattr(transformers, str(names[0]), None)
    of_kind: Any = getattr(kind, "config_class", None)
    if of_kind is None or "quantization_config" in config:
        return None
    try:
        # No code of the model's own: the classes are those of transformers, without kernels of the Hub.
        with torch.device("meta"):
            model: Any = kind(of_kind.from_dict(dict(config), attn_implementation="eager"))
    except Exception as error:  # a wrong value in a configuration raises nearly anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise ConfigError(
            f"config.json: transformers cannot build {names[0]} of it: {reason:.300}"
        ) from error
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items() if name not in ignored}
    weights = {name: each for name, each in model.named_parameters(remove_duplicate=False) if name in shapes}
    # Without buffers, on which transformers 5.10 and before fail; none is tied.
    tied_away = weights.keys() - remove_tied_weights_from_state_dict(dict(weights), model).keys()
    kept = {name: shape for name, shape in shapes.items() if name not in tied_away}
    of_tensor: dict[int, list[str]] = {}
    for name in shapes:
        of_tensor.setdefault(id(model.get_parameter_or_buffer(name)), []).append(name)
    tied = {name: names for names in of_tensor.values() for name in names if name in kept}
    return HubForm(
        shapes=shapes,
        twins={name: [each for each in names if each != name] for name, names in tied.items()},
        views=_views(kept, lambda stand_ins: revert_weight_conversion(model, stand_ins)),
    )


def _views(
    shapes: Mapping[str, tuple[int, ...]], convert: Callable[[dict[str, torch.Tensor]], Mapping[str, Any]]
) -> dict[str, StateView]:
    # Each has a storage of a size of its own, by which its views are known.
    most = max((prod(shape) for shape in shapes.values()), default=0)
    whole = {
        name: torch.empty(most + place, dtype=torch.uint8, device="meta")[: prod(shape)].view(shape)
        for place, (name, shape) in enumerate(shapes.items())
    }
    names = {each.untyped_storage().nbytes(): name for name, each in whole.items()}
    with _WithoutCopies():
        found = convert(dict(whole))
    joined = [name for name, each in found.items() if each.untyped_storage().nbytes() not in names]
    if joined:
        _logger.warning(
            "the weights are written under their names in memory: transformers joins several into %s, "
            "which an export does not",
            joined[0],
        )
        found = whole
    return {
        target: StateView(name, tuple(each.shape), each.stride(), int(each.storage_offset()))
        for target, each in found.items()
        for name in [names[each.untyped_storage().nbytes()]]
    }


@final
class _WithoutCopies(TorchFunctionMode):
    """Lets `contiguous` return the tensor itself, still a view."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.contiguous else func(*args, **(kwargs or {}))
