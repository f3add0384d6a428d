"""Spans and sinks: events with time and duration, at one line per call site.

Events are formatted and timed only if a sink is attached.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Literal, Protocol, TypeAlias, final

from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError

__all__ = [
    "SAVE_COST",
    "Event",
    "InMemorySink",
    "Log",
    "LoggingSink",
    "NumbersSink",
    "OpenTelemetrySink",
    "Phase",
    "Sink",
    "Telemetry",
]


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


_SCOPE: Final = "ckpt_suite"
_HISTOGRAMS: Final = {
    "checkpoint.stall": ("stall_seconds", "s", "Time for which a save has blocked training."),
    "checkpoint.slowdown": ("slowdown_seconds", "s", "Further training time lost during a save."),
    "checkpoint.durable": ("durable_seconds", "s", "Time from the decision to save to the commit."),
    "checkpoint.uploaded": ("uploaded_seconds", "s", "Time from the decision to the first further tier."),
    "checkpoint.size": ("size_bytes", "By", "Bytes of a checkpoint."),
    "checkpoint.overhead": ("overhead", "1", "Training time lost to saves so far, of all training time."),
}


@final
class OpenTelemetrySink:
    """Sink for OpenTelemetry; needs `pip install "ckpt-suite[otel]"`.

    Each of our spans becomes one of OpenTelemetry, when it has ended, under the span that is current on its
    thread; a failed one has the status ERROR. Points become spans without a length. What saves cost becomes
    metrics, and the counters `checkpoint.saves` (by outcome) and `checkpoint.failures` (by span) count.

    Args:
        tracer_provider: of spans; the global one if None.
        meter_provider: of metrics; the global one if None.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, *, tracer_provider: Any = None, meter_provider: Any = None) -> None:
        try:
            trace: Any = import_module("opentelemetry.trace")
            metrics: Any = import_module("opentelemetry.metrics")
        except ImportError:
            raise ConfigError(
                'OpenTelemetrySink: OpenTelemetry is not installed; pip install "ckpt-suite[otel]"'
            ) from None
        self._failed: Any = lambda text: trace.Status(trace.StatusCode.ERROR, text)
        self._tracer: Any = trace.get_tracer(_SCOPE, tracer_provider=tracer_provider)
        meter: Any = metrics.get_meter(_SCOPE, meter_provider=meter_provider)
        self._histograms = {
            attribute: meter.create_histogram(name, unit=unit, description=description)
            for name, (attribute, unit, description) in _HISTOGRAMS.items()
        }
        self._saves: Any = meter.create_counter("checkpoint.saves", description="Saves, by outcome.")
        self._failures: Any = meter.create_counter("checkpoint.failures", description="Failed spans.")

    def emit(self, event: Event) -> None:
        """Make a span of what has ended, and metrics of what a save has cost."""
        if event.phase == "started":
            return
        stop = int(event.time * 1e9)
        start = stop - int((event.duration_seconds or 0.0) * 1e9)
        attributes = {
            f"checkpoint.{name}": value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in event.attributes.items()
            if value is not None
        }
        span = self._tracer.start_span(f"checkpoint.{event.name}", start_time=start, attributes=attributes)
        if event.phase == "failed":
            span.set_status(self._failed(str(event.attributes.get("error", ""))))
            self._failures.add(1, {"span": event.name})
        span.end(end_time=stop)
        if event.name == SAVE_COST:
            self._saves.add(1, {"outcome": str(event.attributes.get("outcome"))})
            for attribute, histogram in self._histograms.items():
                if (value := event.attributes.get(attribute)) is not None:
                    histogram.record(value)
