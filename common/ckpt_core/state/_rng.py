"""Random number generators of this process: Python, NumPy, torch on every device.

When a run continues on more ranks than it was saved with, the additional ranks get streams of their own,
seeded with SHA-256 of rank 0's saved state and their rank: deterministic, and different from any saved one.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from ckpt_core.devices import accelerator_type
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state._items import encode
from ckpt_core.state._nested import matches, template, under
from ckpt_core.types import SavedEntries, SavedTensor

_OF_THE_HOST: Final = {"python", "numpy", "torch"}


def rng_state() -> dict[str, Any]:
    """Return the state of every generator, as values for `encode`; draws nothing."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        **_of_devices(),
    }


def _of_devices() -> dict[str, Any]:
    """Return the state of every device's generator, by the type of the accelerator."""
    kind = accelerator_type()
    module: Any = None if kind is None else torch.get_device_module(kind)
    # To ask devices that were not used yet for their state would initialise them. MPS has no such question.
    if kind is None or not getattr(module, "is_initialized", module.is_available)():
        return {}
    return {kind: [module.get_rng_state(device) for device in range(module.device_count())]}


def rng_item(rank: int) -> str:
    """Return the item with the generators of a rank in what others wrote."""
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
    """Seed the generators of a rank without saved state with its own stream."""
    digest = hashlib.sha256(f"{seed}:{rank}".encode()).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    # Seeds every device as well.
    torch.manual_seed(int.from_bytes(digest[12:20], "big") >> 1)
