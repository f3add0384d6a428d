"""All executions of a scenario, or many random ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch

from ckpt_core.dcp import _image, _tensor_reads
from ckpt_core.devices import _fetching, _streams
from ckpt_core.reading import _requests
from ckpt_core.staging import _copies, _overlap
from tests.streams.world import Choose, Pruned, World, factory

Scenario = Callable[[World], None]
MOST_EXECUTIONS = 20_000


@contextmanager
def simulated(choose: Choose) -> Generator[World]:
    """Let our code run on a simulated accelerator."""
    world = World(choose)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "zeros", "arange"):
            patch.setattr(torch, name, factory(world, getattr(torch, name)))
        patch.setattr(_streams, "_accelerator", world)
        patch.setattr(_overlap, "start_thread", world.spawn)
        patch.setattr(_copies, "start_thread", lambda work: False)
        # So small that two tensors take two of each.
        patch.setattr(_overlap, "GROUP_BYTES", 8)
        # Every tensor in a piece of its own, as large ones are.
        patch.setattr(_image, "PIECE_BYTES", 4096)
        patch.setattr(_image, "_SMALL_BYTES", 0)
        patch.setattr(_fetching, "MOST_BUFFERS", 2)
        for module in (_fetching, _tensor_reads, _requests):
            patch.setattr(module, "REQUEST_BYTES", 16)
        try:
            yield world
        finally:
            world.ended = True


def execute(scenario: Scenario, choose: Choose = lambda world, options: 0) -> None:
    """Execute a scenario once; by default with the device as late as it can be."""
    with simulated(choose) as world:
        scenario(world)


def explore(scenario: Scenario) -> int:
    """Execute a scenario in every order; return the number of executions.

    A state that was reached before is not continued a second time.
    """
    search = _Search()
    executions = 0
    while search.begins():
        with suppress(Pruned):
            execute(scenario, search.choose)
        executions += 1
        if executions > MOST_EXECUTIONS:
            raise AssertionError(f"more than {MOST_EXECUTIONS} executions: make the scenario smaller")
    return executions


class _Search:
    """The orders still to be tried, each by the choices that it begins with."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()
        self._left: list[list[int]] = [[]]

    def begins(self) -> bool:
        """Take the next order; return False if none is left."""
        self._place = 0
        self._choices = self._left.pop() if self._left else None
        return self._choices is not None

    def choose(self, world: World, options: int) -> int:
        assert self._choices is not None
        if world.ended:
            raise Pruned
        self._place += 1
        if self._place > len(self._choices):
            if (state := world.state) in self._seen:
                world.ended = True
                raise Pruned
            self._seen.add(state)
            self._left.extend([*self._choices, other] for other in range(options - 1, 0, -1))
            self._choices.append(0)
        return self._choices[self._place - 1]


def try_at_random(scenario: Scenario, times: int) -> None:
    """Execute a scenario in random orders."""
    for seed in range(times):
        numbers = random.Random(seed)
        execute(scenario, lambda world, options, numbers=numbers: numbers.randrange(options))
