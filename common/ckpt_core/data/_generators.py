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
    """Put back what `global_state` returned."""
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])


def same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether nothing was drawn between two calls of `global_state`."""
    return (
        torch.equal(one["torch"], other["torch"])
        and one["python"] == other["python"]
        and all(np.array_equal(a, b) for a, b in zip(one["numpy"], other["numpy"], strict=True))
    )


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
