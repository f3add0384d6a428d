"""What each save has cost, as numbers for the loggers of hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, final

from ckpt_core.disclosure import logger_of
from ckpt_core.telemetry._spans import Event

SAVE_COST: Final = "save.cost"
"""The point that tells what one save has cost, once that is known, from the coordinator."""

Log: TypeAlias = Callable[[Mapping[str, float], int], None]
"""A function that logs numbers at a step."""

_logger = logger_of(__name__)
_NUMBERS: Final = {
    "checkpoint/stall_ms": ("stall_seconds", 1e3),
    "checkpoint/durable_s": ("durable_seconds", 1),
    "checkpoint/bytes": ("size_bytes", 1),
    "checkpoint/overhead": ("overhead", 1),
}


def save_numbers(cost: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a save, without those that are not known."""
    return {
        name: cost[attribute] * factor
        for name, (attribute, factor) in _NUMBERS.items()
        if cost.get(attribute) is not None
    }


@final
class NumbersSink:
    """Sink that passes on what each save has cost.

    The point is emitted on the thread that trains, when steps after the save are measured, or at the end.

    Args:
        log: called on that thread with the numbers and the step of the save; a failure is a warning, once.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._warned = False

    def emit(self, event: Event) -> None:
        """Log the numbers of a save."""
        if event.name != SAVE_COST:
            return
        numbers, step = save_numbers(event.attributes), event.attributes.get("step")
        if not numbers or not isinstance(step, int):
            return
        try:
            self._log(numbers, step)
        except Exception as error:  # noqa: BLE001 - a logger that fails, for which no training ends
            if not self._warned:
                _logger.warning("what saves cost could not be logged: %s: %s", type(error).__name__, error)
            self._warned = True
