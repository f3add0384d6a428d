"""Random number generators of this process: Python, NumPy, torch on CPU and CUDA.

When a run continues on more ranks than it was saved with, the additional ranks get streams of their own,
seeded with SHA-256 of rank 0's saved state and their rank: deterministic, and different from any saved one.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state._value_codec import encode


def rng_state() -> dict[str, Any]:
    """Return the state of every generator, as values for `encode`; draws nothing."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


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
        return _load_cuda(state.get("cuda", []))
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise IncompatibleCheckpointError(
            f"a random number generator refused its saved state: {error!r}"
        ) from error


def _load_cuda(states: Sequence[torch.Tensor]) -> Sequence[str]:
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, state in zip(range(devices), states, strict=False):
        torch.cuda.set_rng_state(state, device)
    if states and len(states) != devices:
        return [
            f"the checkpoint has RNG states of {len(states)} CUDA devices per rank; there are {devices} here"
        ]
    return []


def derive_rng(seed: int, rank: int) -> None:
    """Seed the generators of a rank without saved state with its own stream."""
    digest = hashlib.sha256(f"{seed}:{rank}".encode()).digest()
    random.seed(int.from_bytes(digest[:8], "big"))
    np.random.seed(int.from_bytes(digest[8:12], "big"))
    # Seeds every CUDA device as well.
    torch.manual_seed(int.from_bytes(digest[12:20], "big") >> 1)
