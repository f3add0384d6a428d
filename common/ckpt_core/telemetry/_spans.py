"""Spans and sinks: events with time and duration, at one line per call site.

Events are formatted and timed only if a sink is attached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, TypeAlias, final

from ckpt_core.disclosure import logger_of

Phase = Literal["started", "finished", "failed", "point"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """An event, or one end of a span.

    Attributes:
        name: dotted name of the span, e.g. `save.write`.
        phase: `started`, `finished` or `failed` for a span, `point` for a single event.
        time: Unix time in seconds.
        duration_seconds: length of the span, when it has ended.
        attributes: JSON-able details (step, rank, size_bytes, error…).
    """

    name: str
    phase: Phase
    time: float
    duration_seconds: float | None = None
    attributes: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Sink(Protocol):
    """Receiver of events, on any thread; must not raise and must not block for long."""

    def emit(self, event: Event) -> None:
        """Receive one event."""


class Telemetry:
    """The events of one manager, passed to its sinks. Thread-safe."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def point(self, name: str, /, **attributes: Any) -> None:
        """Report a single event."""
        self._emit(name, "point", None, attributes)

    @contextmanager
    def span(self, name: str, /, **attributes: Any) -> Generator[dict[str, Any]]:
        """Report start and end of a block; details may be added to the yielded dict."""
        if not self._sinks:
            yield attributes
            return
        self._emit(name, "started", None, attributes)
        start = time.perf_counter()
        try:
            yield attributes
        except BaseException as error:
            attributes["error"] = f"{type(error).__name__}: {error}"
            self._emit(name, "failed", time.perf_counter() - start, attributes)
            raise
        self._emit(name, "finished", time.perf_counter() - start, attributes)

    def _emit(self, name: str, phase: Phase, duration: float | None, attributes: Mapping[str, Any]) -> None:
        if not self._sinks:
            return
        event = Event(
            name=name, phase=phase, time=time.time(), duration_seconds=duration, attributes=dict(attributes)
        )
        for sink in self._sinks:
            sink.emit(event)


@final
class LoggingSink:
    """Sink that writes events to a logger: failures as errors, the rest at `level`."""

    def __init__(self, logger: logging.Logger | None = None, level: int = logging.INFO) -> None:
        self._logger = logger or logger_of("ckpt_core")
        self._level = level

    def emit(self, event: Event) -> None:
        """Log one line."""
        level = logging.ERROR if event.phase == "failed" else self._level
        seconds = "" if event.duration_seconds is None else f" {event.duration_seconds:.3f} s"
        details = " ".join(f"{key}={value}" for key, value in event.attributes.items())
        self._logger.log(level, "%s %s%s %s", event.name, event.phase, seconds, details)


@final
class InMemorySink:
    """Sink that keeps events in a list, for tests and notebooks."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        """Append the event."""
        self.events.append(event)

    def finished(self, name: str) -> list[Event]:
        """List the finished spans and points of that name, oldest first."""
        return [e for e in self.events if e.name == name and e.phase in {"finished", "point"}]


@final
class NumbersSink:
    """Sink that passes on what each save has cost.

    The point is emitted on the thread that trains, when steps after the save are measured, or at the end.
    `log` is called on that thread with the numbers and the step of the save; a failure is a warning, once.
    """

    def __init__(self, log: Log) -> None:
        self._log = log
        self._warned = False

    def emit(self, event: Event) -> None:
        """Log the numbers of a save."""
        if event.name != SAVE_COST:
            return
        step = event.attributes.get("step")
        numbers = {
            name: event.attributes[attribute] * factor
            for name, (attribute, factor) in _NUMBERS.items()
            if event.attributes.get(attribute) is not None
        }
        if not numbers or not isinstance(step, int):
            return
        try:
            self._log(numbers, step)
        except Exception as error:  # noqa: BLE001 - a logger that fails, for which no training ends
            if not self._warned:
                _logger.warning("what saves cost could not be logged: %s: %s", type(error).__name__, error)
            self._warned = True
