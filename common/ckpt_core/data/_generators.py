"""States of random number generators that decide the order of samples."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def global_state() -> dict[str, Any]:
    """Return the states of the global generators of samplers; draw nothing."""
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def load_global_state(state: Mapping[str, Any]) -> None:
    """Put back what `global_state` returned, or a part of it."""
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        np.random.set_state(state["numpy"])
    if "python" in state:
        random.setstate(state["python"])


def same_values(one: Any, other: Any) -> bool:
    """Return whether two states of generators are the same."""
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same_values(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, tuple) and any(isinstance(each, np.ndarray) for each in one):
        return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def generator_state(generator: Any) -> Any:
    """Return the state of one generator, as a plain value."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return dict(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return generator.get_state()
    return generator.getstate()


def load_generator_state(generator: Any, state: Any) -> None:
    """Put back what `generator_state` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.setstate(state)
