"""Spans and sinks: events with time and duration, and where they go."""

from ckpt_core.telemetry._open_telemetry import OpenTelemetrySink
from ckpt_core.telemetry._save_numbers import SAVE_COST, Log, NumbersSink, save_numbers
from ckpt_core.telemetry._spans import (
    Event,
    InMemorySink,
    JsonLinesSink,
    LoggingSink,
    Phase,
    Sink,
    Telemetry,
)

__all__ = [
    "SAVE_COST",
    "Event",
    "InMemorySink",
    "JsonLinesSink",
    "Log",
    "LoggingSink",
    "NumbersSink",
    "OpenTelemetrySink",
    "Phase",
    "Sink",
    "Telemetry",
    "save_numbers",
]
