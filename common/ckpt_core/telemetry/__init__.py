"""Spans and sinks: events with time and duration, and where they go."""

from ckpt_core.telemetry._open_telemetry import OpenTelemetrySink
from ckpt_core.telemetry._spans import (
    SAVE_COST,
    Event,
    InMemorySink,
    Log,
    LoggingSink,
    NumbersSink,
    Phase,
    Sink,
    Telemetry,
)

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
