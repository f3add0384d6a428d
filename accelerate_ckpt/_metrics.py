"""Logged numbers for `KeepBest`, each with the step at which it was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, final

import numpy as np
import torch

from ckpt_core.disclosure import logger_of
from ckpt_core.hosting import ranking
from ckpt_core.retention import RetentionPolicy

_logger = logger_of(__name__)


@final
class Metrics:
    """Remembers what was logged at the present step; main thread only.

    Args:
        keep: the policy whose `KeepBest` rank checkpoints. A best value at a step that is never saved is lost
            to them, of which a warning is logged once; None logs none.
    """

    def __init__(self, keep: RetentionPolicy | None) -> None:
        self._wanted = {each.metric: each for each in ranking(keep)}
        self._measured: dict[str, tuple[int, float]] = {}
        self._unsaved: set[str] = set()
        self._best: dict[str, float] = {}
        self._said = keep is None

    def note(self, step: int, values: Mapping[str, Any]) -> None:
        """Note the numbers among `values` as measured at `step`."""
        for name, value in values.items():
            scalar = isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1)
            number = value.item() if scalar else value
            if type(number) in {int, float}:
                self._miss(name)
                self._measured[name] = step, float(number)
                self._unsaved.add(name)

    def at(self, step: int) -> dict[str, float]:
        """Return what was measured at `step`."""
        return {name: value for name, (measured, value) in self._measured.items() if measured == step}

    def saved(self, values: Mapping[str, float]) -> None:
        """Note that a save with these metrics has begun."""
        self._unsaved -= set(values)
        for name in self._wanted.keys() & values.keys():
            if self._improves(name, values[name]):
                self._best[name] = values[name]

    def forget(self) -> None:
        """Forget all measurements: training continues from another state."""
        for name in self._wanted:
            self._miss(name)
        self._measured.clear()
        self._unsaved.clear()
        self._best.clear()

    def _miss(self, name: str) -> None:
        """Warn, once, of a best measurement about to be forgotten that was not saved."""
        if self._said or name not in self._wanted or name not in self._unsaved:
            return
        step, value = self._measured[name]
        if step == 0 or not self._improves(name, value):
            return
        self._said = True
        _logger.warning(
            "%s=%g, logged at step %d, is the best so far, but step %d was not saved after that, so that "
            "%r cannot keep it (this is logged once). Where you evaluate, call accelerator.log() and then "
            "save_state(), or accelerate_ckpt.checkpoints(accelerator).save(), which saves whatever the save "
            "policy says",
            name, value, step, step, self._wanted[name],
        )  # fmt: skip

    def _improves(self, name: str, value: float) -> bool:
        if name not in self._best or not math.isfinite(value):
            return math.isfinite(value)
        return value < self._best[name] if self._wanted[name].mode == "min" else value > self._best[name]
