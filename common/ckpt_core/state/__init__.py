"""What a training run is, as items: out as live tensors and plain values, back in bit for bit."""

from ckpt_core.state._as_source import State, as_captured, as_source, takes_all
from ckpt_core.state._codec import NotEncodableError, decode, encode
from ckpt_core.state._data import check_dataloader, dataloader_state, load_dataloader_state
from ckpt_core.state._dict_state import DictState
from ckpt_core.state._items import Counters, function_free
from ckpt_core.state._model import as_module, load_model_state, local_buffers, model_state, model_target
from ckpt_core.state._nested import get, leaves, under
from ckpt_core.state._optimizer import (
    check_groups,
    load_optimizer_state,
    optimizer_state,
    stable_tensors,
    unwrap_optimizer,
)
from ckpt_core.state._rng import derive_rng, load_rng_state, rng_seed, rng_state
from ckpt_core.state._source import CarefulSource, StateSource
from ckpt_core.state._template import optimizer_target
from ckpt_core.state._tensors import empty_like, template
from ckpt_core.state._train_state import TrainState

__all__ = [
    "CarefulSource",
    "Counters",
    "DictState",
    "NotEncodableError",
    "State",
    "StateSource",
    "TrainState",
    "as_captured",
    "as_module",
    "as_source",
    "check_dataloader",
    "check_groups",
    "dataloader_state",
    "decode",
    "derive_rng",
    "empty_like",
    "encode",
    "function_free",
    "get",
    "leaves",
    "load_dataloader_state",
    "load_model_state",
    "load_optimizer_state",
    "load_rng_state",
    "local_buffers",
    "model_state",
    "model_target",
    "optimizer_state",
    "optimizer_target",
    "rng_seed",
    "rng_state",
    "stable_tensors",
    "takes_all",
    "template",
    "under",
    "unwrap_optimizer",
]
