"""Events as spans and metrics of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final, final

from ckpt_core.errors import ConfigError
from ckpt_core.telemetry._spans import SAVE_COST, Event

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
        span = self._tracer.start_span(
            f"checkpoint.{event.name}", start_time=start, attributes=_plain(event.attributes)
        )
        if event.phase == "failed":
            span.set_status(self._failed(str(event.attributes.get("error", ""))))
            self._failures.add(1, {"span": event.name})
        span.end(end_time=stop)
        if event.name == SAVE_COST:
            self._record(event.attributes)

    def _record(self, cost: Mapping[str, Any]) -> None:
        self._saves.add(1, {"outcome": str(cost.get("outcome"))})
        for attribute, histogram in self._histograms.items():
            if (value := cost.get(attribute)) is not None:
                histogram.record(value)


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as OpenTelemetry takes them."""
    return {
        f"checkpoint.{name}": value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in attributes.items()
        if value is not None
    }
