"""What saves cost, in OpenTelemetry and in a file for Prometheus."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest

from ckpt_core import CheckpointManager, ConfigError
from ckpt_core.telemetry import NumbersSink, OpenTelemetrySink, PrometheusSink, Telemetry, save_numbers

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
    assert save_numbers(COST) == {
        "checkpoint/stall_ms": 250,
        "checkpoint/durable_s": 2.0,
        "checkpoint/bytes": 1024,
        "checkpoint/overhead": 0.01,
    }
    assert save_numbers({"stall_seconds": 0.0, "durable_seconds": None}) == {"checkpoint/stall_ms": 0}


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


SAMPLE = re.compile(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\[\\"n])*",?)+\})? -?[0-9.e+-]+')


def samples(text: str) -> dict[str, float]:
    """Read the format as the node exporter does: comments, or one sample a line, no time stamps."""
    assert text.endswith("\n")
    found: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert name not in kinds
            kinds[name] = kind
        elif not line.startswith("# HELP"):
            assert SAMPLE.fullmatch(line), line
            name, _, value = line.rpartition(" ")
            assert name.partition("{")[0] in kinds
            assert name not in found
            found[name] = float(value)
    return found


def test_the_file_for_prometheus_has_the_last_save_and_counts(tmp_path):
    path = tmp_path / "ckpt.prom"
    telemetry = Telemetry(PrometheusSink(path, labels={"job": 'a "b"\\c\nd'}))
    telemetry.point("save.cost", **{**COST, "step": 6, "outcome": "failed", "durable_seconds": None})
    telemetry.point("save.cost", **COST)
    with telemetry.span("save.commit", step=7):
        pass
    with pytest.raises(OSError, match="gone"), telemetry.span("upload", step=7):
        raise OSError("gone")
    job = r'job="a \"b\"\\c\nd"'
    found = samples(path.read_text())
    committed = found.pop(f"ckpt_last_commit_timestamp_seconds{{{job}}}")
    assert committed > 1e9
    assert found == {
        f"ckpt_save_step{{{job}}}": 7,
        f"ckpt_save_stall_seconds{{{job}}}": 0.25,
        f"ckpt_save_slowdown_seconds{{{job}}}": 0.5,
        f"ckpt_save_durable_seconds{{{job}}}": 2,
        f"ckpt_save_size_bytes{{{job}}}": 1024,
        f"ckpt_overhead_ratio{{{job}}}": 0.01,
        f'ckpt_saves_total{{{job},outcome="failed"}}': 1,
        f'ckpt_saves_total{{{job},outcome="committed"}}': 1,
        f'ckpt_failures_total{{{job},span="upload"}}': 1,
    }
    assert [each.name for each in tmp_path.iterdir()] == ["ckpt.prom"]


def test_a_reader_of_the_file_never_sees_a_part_of_it(tmp_path):
    path = tmp_path / "ckpt.prom"
    telemetry = Telemetry(PrometheusSink(path))
    telemetry.point("save.cost", **COST)
    writers = [
        threading.Thread(target=lambda: [telemetry.point("save.cost", **COST) for _ in range(50)])
        for _ in range(2)
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert "ckpt_save_step" in samples(path.read_text())
    for writer in writers:
        writer.join()
    assert samples(path.read_text())['ckpt_saves_total{outcome="committed"}'] == 101


def test_what_the_node_exporter_would_not_take_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"label 'a-b'.*label 'outcome' is used.*\.prom"):
        PrometheusSink(tmp_path / "metrics.txt", labels={"a-b": "1", "outcome": "2"})


def test_a_directory_that_is_gone_ends_no_training_and_is_told_once(tmp_path, caplog):
    telemetry = Telemetry(PrometheusSink(tmp_path / "gone" / "ckpt.prom"))
    telemetry.point("save.cost", **COST)
    telemetry.point("save.cost", **COST)
    assert len(caplog.records) == 1


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
