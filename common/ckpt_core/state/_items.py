"""Items of a training state: objects with state, encoded to files without pickle."""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, final

import torch
from torch.optim.lr_scheduler import LRScheduler

from ckpt_core.data import is_stateful
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, CorruptCheckpointError, FileFailure, IncompatibleCheckpointError
from ckpt_core.formats.checksums import crc32
from ckpt_core.names import FORMAT_VERSION
from ckpt_core.state._nested import get, leaves, rekeyed, with_empties
from ckpt_core.state._optimizer import (
    CLASS,
    PACKED,
    Fit,
    check_class,
    check_entries,
    class_names,
    unwrap_optimizer,
)
from ckpt_core.state._tensors import is_sharded, template
from ckpt_core.state._value_codec import NotEncodableError, decode, encode
from ckpt_core.types import SavedEntries

MAX_SHARED_BYTES = 1 << 20
"""Items with more tensor bytes than this are stored with the model, in the sharded data."""


@final
class Counters(SimpleNamespace):
    """Plain values to save with a run: `Counters(epoch=0, tokens=0)`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values by name."""
        return dict(vars(self))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved values; names that the checkpoint lacks keep theirs."""
        vars(self).update(state)


def check_stateful(name: str, value: Any) -> None:
    """Refuse an object without `state_dict` or `load_state_dict`."""
    if not is_stateful(value):
        raise ConfigError(
            f"{name} is a {type(value).__name__}, which has no state_dict and load_state_dict; "
            "keep plain values in ckpt_core.state.Counters"
        )


def check_placed(name: str, item: Any, state: Any) -> None:
    """Refuse sharded state of an optimizer that is saved as an item.

    A load into an optimizer that has made no step would not know the placement of its state.
    """
    if isinstance(item, torch.optim.Optimizer) and has_shards(state):
        raise ConfigError(
            f"{name} is a {type(item).__name__} with sharded state, which cannot be put back from an item: "
            "give it, or the optimizer inside it, as TrainState(optimizer=...)"
        )


def has_shards(state: Any) -> bool:
    """Return whether a nested state holds tensors of which this rank has a shard only."""
    return any(is_sharded(value) for _, value in leaves(state))


def is_large(state: Any) -> bool:
    """Return whether an item belongs into the sharded data: it is sharded or large."""
    tensors = [value for _, value in leaves(state) if isinstance(value, torch.Tensor)]
    return any(map(is_sharded, tensors)) or sum(each.nbytes for each in tensors) > MAX_SHARED_BYTES


def function_free(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a scheduler's state without functions: the live one has its own."""
    return {key: value for key, value in state.items() if not isinstance(value, FunctionType | MethodType)}


def item_state(item: Any) -> Any:
    """Return an object's state; an optimizer's with the names of its classes."""
    state = item.state_dict()
    if isinstance(item, torch.optim.Optimizer) and isinstance(state, Mapping) and state.keys() >= PACKED:
        return {**state, CLASS: class_names(unwrap_optimizer(item))}
    return state


def check_kind(item: Any, state: Any, *, fit: Fit) -> None:
    """Refuse the state of another kind of optimizer, where `item_state` recorded it."""
    if fit != "any" and isinstance(item, torch.optim.Optimizer) and (saved := get(state, (CLASS,))):
        check_class(unwrap_optimizer(item), saved)


def _keys(item: Any) -> Any:
    """Return a state with the keys that `item` expects."""
    state = item.state_dict()
    if isinstance(item, torch.optim.Optimizer) and state.keys() >= PACKED:
        # Before its first step it has no state to take the keys from.
        numbers = [number for group in state["param_groups"] for number in group["params"]]
        return {**state, "state": {number: state["state"].get(number) for number in numbers}}
    return state


def item_target(item: Any, saved: SavedEntries) -> dict[str, Any]:
    """Return the target of an object in the sharded data; refuse another optimizer's."""
    if isinstance(item, torch.optim.Optimizer):
        check_entries(item, saved)
    return template(item.state_dict(), saved)


def load_item(name: str, item: Any, state: Any, *, of_tree: bool = False) -> None:
    """Load the saved state of an object.

    Args:
        name: for messages.
        item: the object.
        state: what `item.state_dict()` returned at the save.
        of_tree: whether it was in the sharded data, which does not record empty mappings.

    Raises:
        IncompatibleCheckpointError: the object refuses the state.
    """
    if isinstance(item, torch.optim.Optimizer):
        check_entries(item, {path: None for path, _ in leaves(state)})
        state = {key: value for key, value in state.items() if key != CLASS}
    try:
        live = _keys(item)
        state = rekeyed(state, live)
        if isinstance(getattr(item, "scheduler", item), LRScheduler):  # Accelerate wraps it
            state = _of_live_groups(state, live)
        item.load_state_dict(with_empties(state, live) if of_tree else state)
    except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise IncompatibleCheckpointError(
            f"{name} ({type(item).__name__}) refused its saved state: {type(error).__name__}: {error}"
        ) from error


_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs")
"""Of a scheduler: lists with a value for each parameter group."""
_SCHEDULERS = "_schedulers"
"""Of a scheduler that is made of others: their states."""


def _of_live_groups(state: Any, live: Any) -> Any:
    """Give a scheduler's state as many values as the live optimizer has groups.

    Layouts may cut the same parameters into other groups, as transformers does by mesh.
    """
    if not isinstance(state, Mapping) or not isinstance(live, Mapping):
        return state
    fitted = dict(state)
    parts, own_parts = state.get(_SCHEDULERS), live.get(_SCHEDULERS)
    if isinstance(parts, list) and isinstance(own_parts, list) and len(parts) == len(own_parts):
        fitted[_SCHEDULERS] = [_of_live_groups(*pair) for pair in zip(parts, own_parts, strict=True)]
    for key in _OF_GROUPS:
        saved, own = state.get(key), live.get(key)
        if isinstance(saved, list) and isinstance(own, list) and saved and len(saved) != len(own):
            if any(value != saved[0] for value in saved):
                raise IncompatibleCheckpointError(
                    f"a scheduler has {key} of {len(saved)} parameter groups with different values in the "
                    f"checkpoint, and the live optimizer has {len(own)}; build it with the groups saved"
                )
            fitted[key] = saved[:1] * len(own)
    return fitted


PICKLED = "pickled"
"""Top-level key, in the checkpoint directory's own DCP part, of values that JSON cannot represent."""

_logger = logger_of(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedItems:
    """Items as JSON values, and the others as `torch.save` bytes by item."""

    plain: Mapping[str, Any]
    pickled: Mapping[str, bytes]

    @property
    def content(self) -> bytes:
        """The file of all items."""
        return self.content_of({*self.plain, *self.pickled})

    def content_of(self, names: Collection[str]) -> bytes:
        """Encode the file of some of the items."""
        document = {
            "format_version": FORMAT_VERSION,
            "items": {name: value for name, value in self.plain.items() if name in names},
            PICKLED: sorted(name for name in self.pickled if name in names),
        }
        return json.dumps(document, separators=(",", ":")).encode()

    def digest(self, name: str) -> int:
        """Return a number by which ranks compare an item; 0 for a pickled one."""
        if name not in self.plain:
            return 0
        return crc32(json.dumps(self.plain[name], sort_keys=True).encode())


def encode_items(values: Mapping[str, Any]) -> EncodedItems:
    """Serialise items now, so that later changes do not reach the checkpoint."""
    plain: dict[str, Any] = {}
    pickled: dict[str, bytes] = {}
    for name, value in values.items():
        try:
            plain[name] = encode(value)
        except NotEncodableError as error:
            _logger.debug("item %r goes through pickle: %s", name, error)
            buffer = io.BytesIO()
            torch.save(value, buffer)
            pickled[name] = buffer.getvalue()
    return EncodedItems(plain=plain, pickled=pickled)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodedItems:
    """Values read from a file, and the names of the items in the pickled part."""

    values: Mapping[str, Any]
    pickled: tuple[str, ...]


def decode_items(content: bytes, path: str) -> DecodedItems:
    """Decode the output of `encode_items`.

    Raises:
        CorruptCheckpointError: it is no such file.
    """
    try:
        document = json.loads(content)
        values = {str(name): decode(value) for name, value in document["items"].items()}
        names = tuple(str(name) for name in document[PICKLED])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, CorruptCheckpointError) as error:
        failure = FileFailure(path=path, problem=f"not a file of items: {error}")
        raise CorruptCheckpointError(str(failure), failures=(failure,)) from error
    return DecodedItems(values=values, pickled=names)


def pickled_key(scope: str, item: str) -> str:
    """Return the key of an item under `PICKLED`.

    `scope`, `shared` or the name of a rank file, keeps ranks apart.
    """
    return f"{scope}:{item}"
