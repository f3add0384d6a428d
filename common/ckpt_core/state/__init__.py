"""Training state as items: captured as live tensors and values, restored exactly."""

from ckpt_core.state._contents import (
    Contents,
    base_names,
    begin,
    contents_problem,
    is_of_base,
    saved_part,
    saves_base,
    supplied,
)
from ckpt_core.state._gradients import Gradients
from ckpt_core.state._items import (
    PICKLED,
    Counters,
    EncodedItems,
    decode_items,
    encode_items,
    function_free,
    has_shards,
    is_large,
    load_item,
    pickled_key,
)
from ckpt_core.state._model import (
    load_model_state,
    local_buffers,
    model_state,
    model_target,
    owner,
)
from ckpt_core.state._nested import get, leaves, put, under
from ckpt_core.state._optimizer import (
    check_groups,
    fit_of,
    load_optimizer_state,
    optimizer_state,
    optimizer_target,
    stable_tensors,
    unwrap_optimizer,
)
from ckpt_core.state._override import Override
from ckpt_core.state._rank_buffers import BufferKey, RankBuffers, decode_buffers, put_buffers
from ckpt_core.state._rng import derive_rng, load_rng_state, rng_seed, rng_state
from ckpt_core.state._source import DictState, StateSource
from ckpt_core.state._tensors import empty_like, shard_like, template
from ckpt_core.state._train_state import (
    POSITIONS,
    State,
    TrainState,
    as_captured,
    as_source,
    checked_override,
)
from ckpt_core.state._value_codec import NotEncodableError, decode, encode

__all__ = [
    "PICKLED",
    "POSITIONS",
    "BufferKey",
    "Contents",
    "Counters",
    "DictState",
    "EncodedItems",
    "Gradients",
    "NotEncodableError",
    "Override",
    "RankBuffers",
    "State",
    "StateSource",
    "TrainState",
    "as_captured",
    "as_source",
    "base_names",
    "begin",
    "check_groups",
    "checked_override",
    "contents_problem",
    "decode",
    "decode_buffers",
    "decode_items",
    "derive_rng",
    "empty_like",
    "encode",
    "encode_items",
    "fit_of",
    "function_free",
    "get",
    "has_shards",
    "is_large",
    "is_of_base",
    "leaves",
    "load_item",
    "load_model_state",
    "load_optimizer_state",
    "load_rng_state",
    "local_buffers",
    "model_state",
    "model_target",
    "optimizer_state",
    "optimizer_target",
    "owner",
    "pickled_key",
    "put",
    "put_buffers",
    "rng_seed",
    "rng_state",
    "saved_part",
    "saves_base",
    "shard_like",
    "stable_tensors",
    "supplied",
    "template",
    "under",
    "unwrap_optimizer",
]
