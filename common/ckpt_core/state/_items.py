"""Items of a training state: objects with state, as exact JSON without pickle.

Values without a JSON type are tagged: `{"$type": "tuple", "value": […]}`. Subclasses of dict are decoded as
dict, tensors on the CPU; all other values are decoded equal and of the same type.

Rank-local buffers, module buffers that differ between ranks as in batch norm, are items, too: the checkpoint
holds the values of the lowest rank, and a rank with different values stores its own in a small file beside
it, so that a resume on the same number of ranks is exact; otherwise every rank starts from the lowest's.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePath
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, Final, TypeAlias, final

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from ckpt_core.devices import accelerator_type, to_host
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from ckpt_core.formats.checksums import crc32
from ckpt_core.formats.codec import corrupt, damage
from ckpt_core.names import FORMAT_VERSION, local_name
from ckpt_core.state._nested import (
    dtype_name,
    dtype_named,
    get,
    is_sharded,
    leaves,
    matches,
    rekeyed,
    template,
    under,
    with_empties,
)
from ckpt_core.state._optimizer import (
    CLASS,
    PACKED,
    Fit,
    check_class,
    check_entries,
    class_names,
    unwrap_optimizer,
)
from ckpt_core.state._tensor_sums import own_checksum
from ckpt_core.types import SavedEntries, SavedTensor

MAX_ARRAY_BYTES = 16 << 20
"""Larger arrays are not encoded as JSON."""

_TAG = "$type"
_MAX_DEPTH = 100


class NotEncodableError(CheckpointError, TypeError):
    """JSON cannot hold this value exactly; the message names it by its path."""


def encode(value: Any) -> Any:
    """Convert `value` for `json.dumps`.

    Raises:
        NotEncodableError: `decode` could not restore some of it.
    """
    return _encode(value, "", 0)


_AS_THEY_ARE = frozenset({bool, int, str, type(None)})


def _encode(value: Any, path: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise NotEncodableError(
            f"{path[:200]}… is nested deeper than {_MAX_DEPTH} levels, or contains itself"
        )
    kind = type(value)
    if kind in _AS_THEY_ARE or (kind is float and math.isfinite(value)):
        return value
    if isinstance(value, dict):
        return _encode_dict(value, path, depth + 1)
    if kind in {list, tuple, set, frozenset}:
        # The state of a random number generator is six hundred integers, encoded in every save.
        items = list(value)
        if not _AS_THEY_ARE.issuperset(map(type, items)):
            items = [_encode(each, f"{path}[{i}]", depth + 1) for i, each in enumerate(items)]
        # Ranks must agree on shared items byte by byte, and sets have no order of their own.
        items = items if kind in {list, tuple} else sorted(items, key=json.dumps)
        return items if kind is list else {_TAG: kind.__name__, "value": items}
    return _encode_leaf(value, path)


def _encode_leaf(value: Any, path: str) -> Any:
    kind = type(value)
    for base, name, encoder in _ENCODERS:
        if kind is base or (base in _WITH_SUBCLASSES and isinstance(value, base)):
            try:
                return {_TAG: name, "value": encoder(value)}
            except NotEncodableError as error:
                raise NotEncodableError(f"{path or 'the value'} {error}") from error
    raise NotEncodableError(
        f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which JSON cannot hold"
    )


def _encode_dict(value: dict[Any, Any], path: str, depth: int) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: _encode(each, f"{path}.{key}", depth) for key, each in value.items()}
    pairs = [
        [_encode(key, f"{path} key {key!r}", depth), _encode(each, f"{path}[{key!r}]", depth)]
        for key, each in value.items()
    ]
    return {_TAG: "dict", "value": pairs}


def _encode_tensor(value: torch.Tensor) -> Any:
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise NotEncodableError(f"is a tensor without plain memory ({value.layout}, {value.device})")
    _check_size(value.numel() * value.element_size())
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1).view(torch.uint8)
    data = _to_text(flat.numpy().tobytes())
    return {"dtype": dtype_name(value.dtype), "shape": list(value.shape), "data": data}


def _encode_array(value: Any) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None or value.dtype.subdtype is not None:
        raise NotEncodableError(f"is a numpy array of {value.dtype}, which JSON cannot hold")
    _check_size(value.nbytes)
    return {"dtype": value.dtype.str, "shape": list(value.shape), "data": _to_text(value.tobytes())}


def _check_size(size_bytes: int) -> None:
    if size_bytes > MAX_ARRAY_BYTES:
        raise NotEncodableError(f"has {size_bytes} bytes, too many for JSON ({MAX_ARRAY_BYTES})")


def _to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


_WITH_SUBCLASSES = frozenset({np.generic, PurePath})
_ENCODERS: Sequence[tuple[type, str, Callable[[Any], Any]]] = (
    (float, "float", repr),
    (torch.Tensor, "tensor", _encode_tensor),
    (torch.nn.Parameter, "tensor", _encode_tensor),
    (np.ndarray, "ndarray", _encode_array),
    (np.generic, "numpy_scalar", _encode_array),
    (bytes, "bytes", _to_text),
    (PurePath, "path", str),
    (torch.Size, "size", list),
    (torch.dtype, "dtype", dtype_name),
    (torch.device, "device", str),
    (timedelta, "timedelta", lambda value: [value.days, value.seconds, value.microseconds]),
)


def decode(encoded: Any) -> Any:
    """Convert back to the value that `encode` was given.

    Raises:
        CorruptCheckpointError: it is no output of `encode`.
    """
    try:
        return _decode(encoded, 0)
    except (ValueError, TypeError, LookupError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"an item of the checkpoint is not what was encoded: {error}") from error


def _decode(encoded: Any, depth: int) -> Any:
    if depth > 2 * _MAX_DEPTH + 2:
        raise ValueError("nested too deeply")
    if isinstance(encoded, list):
        return [_decode(each, depth + 1) for each in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if _TAG not in encoded:
        return {key: _decode(each, depth + 1) for key, each in encoded.items()}
    name, value = encoded[_TAG], encoded["value"]
    return _DECODERS[name](_decode(value, depth + 1) if name in _CONTAINERS else value)


def _decode_tensor(value: Mapping[str, Any]) -> torch.Tensor:
    dtype, shape = dtype_named(value["dtype"]), _shape(value["shape"])
    data = bytearray(base64.b64decode(value["data"], validate=True))
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a tensor of shape {shape} and dtype {dtype}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _decode_array(value: Mapping[str, Any]) -> Any:
    dtype, shape = np.dtype(str(value["dtype"])), _shape(value["shape"])
    data = base64.b64decode(value["data"], validate=True)
    if dtype.hasobject or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for an array of shape {shape} and dtype {dtype}")
    return np.frombuffer(data, dtype=dtype).reshape(shape).copy()


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(size) is not int or size < 0 for size in value):
        raise ValueError(f"not a shape: {value!r}")
    return tuple(value)


_CONTAINERS = frozenset({"tuple", "set", "frozenset", "dict"})
_DECODERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "float": float,
    "bytes": lambda value: base64.b64decode(value, validate=True),
    "tensor": _decode_tensor,
    "ndarray": _decode_array,
    "numpy_scalar": lambda value: _decode_array(value)[()],
    "size": lambda value: torch.Size(_shape(value)),
    "dtype": dtype_named,
    "device": torch.device,
    "timedelta": lambda value: timedelta(*value),
    "path": Path,
}


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


def item_target(item: Any, saved: SavedEntries) -> dict[str, Any]:
    """Return the target of an object in the sharded data; refuse another optimizer's."""
    if isinstance(item, torch.optim.Optimizer):
        check_entries(item, saved)
    return template(item.state_dict(), saved)


def load_item(name: str, item: Any, state: Any, *, of_tree: bool = False) -> None:
    """Load what an object's `state_dict` returned at the save; `name` is for errors.

    `of_tree` tells that it was in the sharded data, which does not record empty mappings.
    """
    if isinstance(item, torch.optim.Optimizer):
        check_entries(item, {path: None for path, _ in leaves(state)})
        state = {key: value for key, value in state.items() if key != CLASS}
    try:
        live = item.state_dict()
        if isinstance(item, torch.optim.Optimizer) and live.keys() >= PACKED:
            # Before its first step it has no state to take the keys from.
            numbers = [number for group in live["param_groups"] for number in group["params"]]
            live = {**live, "state": {number: live["state"].get(number) for number in numbers}}
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
        return self.content_of({*self.plain, *self.pickled})

    def content_of(self, names: Collection[str]) -> bytes:
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
        raise damage(path, f"not a file of items: {error}") from error
    return DecodedItems(values=values, pickled=names)


def pickled_key(scope: str, item: str) -> str:
    """Return the key of an item under `PICKLED`.

    `scope`, `shared` or the name of a rank file, keeps ranks apart.
    """
    return f"{scope}:{item}"


BufferKey: TypeAlias = tuple[str, str]
_PIECE_BYTES = 8 << 20
_DIGEST_BYTES = 8
_MAX_DIGESTS = 64  # keys with a digest each; with more, the message would grow with the model


@final
class RankBuffers:
    """Copies of rank-local buffers, made on the main thread, read on the save thread.

    On a device the copies are enqueued on the current stream, so that the host does not wait for it.
    """

    def __init__(self, live: Mapping[BufferKey, torch.Tensor]) -> None:
        copies, self._events = to_host(list(live.values()))
        self._copies = dict(zip(live, copies, strict=True))

    def digests(self) -> bytes:
        """Return digests by which ranks with the same keys compare their values.

        Beyond `_MAX_DIGESTS` keys it is one digest of all.
        """
        values = self._whole()
        sums = [own_checksum(values[key]) for key in sorted(values)]
        each = [number.to_bytes(_DIGEST_BYTES, "little", signed=True) for number in sums]
        if len(each) <= _MAX_DIGESTS:
            return b"".join(each)
        return hashlib.blake2b(b"".join(each), digest_size=_DIGEST_BYTES).digest()

    def differing(self, reference: bytes) -> frozenset[BufferKey]:
        """Return the keys whose values differ from another rank's `digests()`."""
        keys, own = sorted(self._copies), self.digests()
        if len(own) != _DIGEST_BYTES * len(keys) or len(own) != len(reference):
            return frozenset() if own == reference else frozenset(keys)
        ends = range(_DIGEST_BYTES, len(own) + 1, _DIGEST_BYTES)
        parts = [slice(end - _DIGEST_BYTES, end) for end in ends]
        return frozenset(key for key, at in zip(keys, parts, strict=True) if own[at] != reference[at])

    def encode(self, rank: int, keys: Collection[BufferKey] | None = None) -> dict[str, bytes]:
        """Encode the file of a rank's own values, all or some; none without values."""
        values = self._whole()
        return encode_buffers(rank, values, values.keys() if keys is None else keys)

    def _whole(self) -> Mapping[BufferKey, torch.Tensor]:
        for event in self._events:
            event.synchronize()
        return self._copies


def encode_buffers(
    rank: int, local: Mapping[BufferKey, torch.Tensor], keys: Collection[BufferKey]
) -> dict[str, bytes]:
    """Encode the file of a rank's own values, by file name; none without values."""
    if not keys:
        return {}
    values: dict[str, Any] = {}
    for key in sorted(keys):
        value = local[key].detach().cpu()
        # JSON takes no large tensors.
        pieces = torch.split(value.reshape(-1), _PIECE_BYTES // value.dtype.itemsize)
        is_small = value.nbytes <= _PIECE_BYTES
        values[json.dumps(key)] = value if is_small else {"shape": value.shape, "pieces": list(pieces)}
    return {local_name(rank): encode_items(values).content}


def decode_buffers(content: bytes, path: str) -> dict[BufferKey, torch.Tensor]:
    """Decode a rank's own values from the content of its file at `path`.

    Raises:
        CorruptCheckpointError: it is no output of `encode_buffers`.
    """
    found: dict[BufferKey, torch.Tensor] = {}
    try:
        for name, value in decode_items(content, path).values.items():
            part, key = json.loads(name)
            is_whole = isinstance(value, torch.Tensor)
            found[part, key] = value if is_whole else torch.cat(value["pieces"]).reshape(value["shape"])
    except (ValueError, LookupError, TypeError, RuntimeError) as error:
        raise corrupt(path, f"is malformed: {error}") from error
    return found


def put_buffers(local: Mapping[BufferKey, torch.Tensor], part: str, loaded: Mapping[str, Any]) -> None:
    """Replace the checkpoint's values by this rank's own, where both exist."""
    for (of_part, key), value in local.items():
        target = loaded.get(key)
        if of_part == part and isinstance(target, torch.Tensor) and target.shape == value.shape:
            target.detach().copy_(value)


_OF_THE_HOST: Final = {"python", "numpy", "torch"}


def rng_state() -> dict[str, Any]:
    """Return the state of every generator, as values for `encode`; draws nothing."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    kind = accelerator_type()
    module: Any = None if kind is None else torch.get_device_module(kind)
    # To ask devices that were not used yet for their state would initialise them. MPS has no such question.
    if kind is not None and getattr(module, "is_initialized", module.is_available)():
        state[kind] = [module.get_rng_state(device) for device in range(module.device_count())]
    return state


def rng_item(rank: int) -> str:
    return f"rng.{rank}"


def rng_target(entries: SavedEntries, rank: int) -> dict[str, Any]:
    """Return a load target for what others wrote of a rank, as `rng_state` has it.

    Raises:
        IncompatibleCheckpointError: a state is missing, or none of this release of torch.
    """
    item = rng_item(rank)
    saved = under(entries, item)
    if not saved:
        return {}
    if not {(name,) for name in _OF_THE_HOST} <= saved.keys() or not matches(
        torch.get_rng_state(), saved["torch",] or SavedTensor(shape=(), dtype="")
    ):
        raise IncompatibleCheckpointError(f"{item} is not what the random number generators here take")
    return {item: template({}, saved)}


def rng_seed(state: Mapping[str, Any]) -> int:
    """Derive a number from `state`, for ranks that it was not saved for."""
    digest = hashlib.sha256(json.dumps(encode(dict(state)), sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "big")


def load_rng_state(state: Mapping[str, Any]) -> Sequence[str]:
    """Restore every generator exactly; return notes for the user.

    Raises:
        IncompatibleCheckpointError: a generator refuses its state.
    """
    try:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        torch.set_rng_state(state["torch"])
        return [
            note for kind in sorted(state.keys() - _OF_THE_HOST) for note in _load_devices(kind, state[kind])
        ]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise IncompatibleCheckpointError(
            f"a random number generator refused its saved state: {error!r}"
        ) from error


def _load_devices(kind: str, states: Sequence[torch.Tensor]) -> Sequence[str]:
    here = kind == accelerator_type()
    module: Any = torch.get_device_module(kind) if here else torch.cpu
    devices = module.device_count() if here and module.is_available() else 0
    for device, state in zip(range(devices), states, strict=False):
        module.set_rng_state(state, device)
    if states and len(states) != devices:
        saved = f"{len(states)} {kind.upper()} devices"
        return [f"the checkpoint has RNG states of {saved} per rank; there are {devices} here"]
    return []


def derive_rng(seed: int, rank: int) -> None:
    """Seed the generators of a rank without saved state with its own stream.

    It is deterministic, and different from any saved one.
    """
    digest = hashlib.sha256(f"{seed}:{rank}".encode()).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    # Seeds every device as well.
    torch.manual_seed(int.from_bytes(digest[12:20], "big") >> 1)
