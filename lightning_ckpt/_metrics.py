"""The metrics of a Trainer, as plain numbers, each with the step at which it was measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch


@final
class Measured:
    """Tells which of Lightning's callback metrics were measured at a step.

    Lightning keeps the last value of every metric for the whole fit. A checkpoint that took them as they
    are would claim the validation loss of other weights, and be ranked by it.

    Concurrency: the thread that trains.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}
        self._steps: dict[str, int] = {}

    def note(self, metrics: Mapping[str, Any], step: int) -> None:
        """Note what was measured since the last note: at `step`."""
        for name, value in metrics.items():
            if not _same(self._values.get(name), value):
                self._values[name] = value
                self._steps[name] = step

    def at(self, step: int) -> dict[str, float]:
        """The scalar metrics that were measured at `step`."""
        names = sorted(name for name, measured in self._steps.items() if measured == step)
        values = ((name, self._values[name]) for name in names)
        return {name: float(value) for name, value in values if torch.as_tensor(value).numel() == 1}


def _same(known: Any, value: Any) -> bool:
    """Whether both are the result of one measurement; equal values may come from two.

    Every access to Lightning's metrics gives a new view of the result. The memory behind a known one is
    not freed, so that no other result can lie there.
    """
    if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor):
        return known.data_ptr() == value.data_ptr()
    return known is value
