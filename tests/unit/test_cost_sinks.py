"""What saves cost, as numbers and in OpenTelemetry."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_core import CheckpointManager, ConfigError
from ckpt_core.telemetry import NumbersSink, OpenTelemetrySink, Telemetry

COST = {
    "step": 7,
    "name": "step-000000007",
    "reason": "every 7 steps",
    "stall_seconds": 0.25,
    "slowdown_seconds": 0.5,
    "durable_seconds": 2.0,
    "uploaded_seconds": None,
    "size_bytes": 1024,
    "overhead": 0.01,
    "outcome": "committed",
}


def test_the_numbers_are_those_of_the_save_without_what_is_not_known():
    logged: list[Any] = []
    telemetry = Telemetry(NumbersSink(lambda numbers, step: logged.append((step, numbers))))
    telemetry.point("save.cost", **COST)
    telemetry.point("save.cost", step=8, stall_seconds=0.0, durable_seconds=None)
    telemetry.point("save.cost", step=9, durable_seconds=None)
    known = {"stall_ms": 250, "durable_s": 2.0, "bytes": 1024, "overhead": 0.01}
    assert logged == [
        (7, {f"checkpoint/{name}": value for name, value in known.items()}),
        (8, {"checkpoint/stall_ms": 0}),
    ]


def test_a_logger_that_fails_ends_no_training_and_is_told_once(caplog):
    def log(numbers: Any, step: int) -> None:
        raise ValueError("the run is finished")

    telemetry = Telemetry(NumbersSink(log))
    telemetry.point("save.skipped", step=6)
    telemetry.point("save.cost", **COST)
    telemetry.point("save.cost", **COST)
    assert [record.getMessage() for record in caplog.records] == [
        "what saves cost could not be logged: ValueError: the run is finished"
    ]


def test_events_are_spans_and_metrics_of_opentelemetry(tmp_path):
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    metrics = pytest.importorskip("opentelemetry.sdk.metrics")
    reading = pytest.importorskip("opentelemetry.sdk.metrics.export")
    spans, reader = memory.InMemorySpanExporter(), reading.InMemoryMetricReader()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(spans))
    sink = OpenTelemetrySink(
        tracer_provider=provider, meter_provider=metrics.MeterProvider(metric_readers=[reader])
    )
    telemetry = Telemetry(sink)
    tracer = provider.get_tracer("user")
    with tracer.start_as_current_span("training step") as outer:
        telemetry.point("save.cost", **COST)
    with pytest.raises(OSError, match="gone"), telemetry.span("upload", step=7):
        raise OSError("gone")
    with CheckpointManager(tmp_path / "run", sinks=[sink]) as checkpoints:
        checkpoints.save(1, {"a": 1})
    found = {span.name: span for span in spans.get_finished_spans()}
    assert {"checkpoint.save.write", "checkpoint.save.commit", "checkpoint.upload"} <= set(found)
    assert found["checkpoint.upload"].status.status_code.name == "ERROR"
    assert "gone" in found["checkpoint.upload"].status.description
    commit = found["checkpoint.save.commit"]
    assert 0 < commit.end_time - commit.start_time < 60e9
    assert found["checkpoint.save.cost"].attributes["checkpoint.step"] is not None
    first = next(span for span in spans.get_finished_spans() if span.name == "checkpoint.save.cost")
    assert first.parent.span_id == outer.get_span_context().span_id
    points = {
        metric.name: metric.data.data_points
        for of_resource in reader.get_metrics_data().resource_metrics
        for scope in of_resource.scope_metrics
        for metric in scope.metrics
    }
    assert points["checkpoint.stall"][0].sum >= 0.25
    assert points["checkpoint.size"][0].max >= 1024
    assert sum(point.value for point in points["checkpoint.saves"]) == 2
    assert [point.attributes["span"] for point in points["checkpoint.failures"]] == ["upload"]


def test_opentelemetry_is_an_extra(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ConfigError, match=r'pip install "ckpt-suite\[otel\]"'):
        OpenTelemetrySink()
