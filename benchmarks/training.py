"""A small training loop of steps of a given length, as the neighbour that a save disturbs."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch

from benchmarks.timing import wait_for_device

_WIDTH, _LAYERS, _BATCH = 512, 8, 256
_WARM_UP = 5


@final
class Training:
    """A multi-layer perceptron under AdamW; gradient accumulation makes the steps as long as wanted.

    Attributes:
        optimizer: a real one, so that a pre-step hook of a checkpoint manager acts in its steps.
        repeats: forward and backward passes in a step.
    """

    def __init__(self, device: torch.device, *, step_seconds: float) -> None:
        layers = [torch.nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(_LAYERS)]
        self._model = torch.nn.Sequential(*layers)
        self._device = device
        self._batch = torch.randn(_BATCH, _WIDTH, device=device)
        self.optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=False)
        self.repeats = 1
        self.repeats = self._calibrated(step_seconds)

    def step(self, guard: AbstractContextManager[Any]) -> float:
        """Train one step, `guard` around the optimizer's; seconds."""
        start = time.perf_counter()
        for _ in range(self.repeats):
            self._model(self._batch).square().mean().backward()
        with guard:
            self.optimizer.step()
        self.optimizer.zero_grad()
        wait_for_device(self._device)
        return time.perf_counter() - start

    def _calibrated(self, step_seconds: float) -> int:
        """As many passes as fit; the time of the optimizer itself counts as well."""
        for _ in range(_WARM_UP):
            self.step(nullcontext())
        one = min(self.step(nullcontext()) for _ in range(_WARM_UP))
        self.repeats = 3
        three = min(self.step(nullcontext()) for _ in range(_WARM_UP))
        per_pass = max((three - one) / 2, 1e-6)
        return max(1, round((step_seconds - one) / per_pass) + 1)


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """Compute with one thread, as a training that leaves the other cores to its data loader."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
