"""Telemetry: every span ends in the sinks, and costs nothing without one."""

from __future__ import annotations

import logging

import pytest

from ckpt_core.telemetry import InMemorySink, LoggingSink, Telemetry


def test_a_span_reports_its_start_and_its_end_with_details_added_on_the_way():
    sink = InMemorySink()
    with Telemetry(sink).span("save.write", step=5) as details:
        details["size_bytes"] = 7
    started, finished = sink.events
    assert (started.phase, started.attributes, started.duration_seconds) == ("started", {"step": 5}, None)
    assert (finished.phase, finished.attributes) == ("finished", {"step": 5, "size_bytes": 7})
    assert finished.duration_seconds is not None
    assert sink.finished("save.write") == [finished]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_span_that_fails_says_so_and_lets_the_error_through(error):
    sink = InMemorySink()
    with pytest.raises(type(error)), Telemetry(sink).span("save.write"):
        raise error
    assert sink.events[-1].phase == "failed"
    assert sink.events[-1].attributes["error"] == f"{type(error).__name__}: {error}"
    assert sink.finished("save.write") == []


def test_without_a_sink_a_span_still_yields_its_details():
    with Telemetry().span("save.write", step=5) as details:
        assert details == {"step": 5}
    Telemetry().point("save.skipped")


def test_an_event_is_not_changed_by_what_happens_after_it():
    sink = InMemorySink()
    with Telemetry(sink).span("save", step=5) as details:
        details["late"] = True
    assert "late" not in sink.events[0].attributes


def test_every_sink_gets_every_event():
    one, two = InMemorySink(), InMemorySink()
    Telemetry(one, two).point("save.skipped", step=5)
    assert one.events == two.events
    assert one.finished("save.skipped")[0].attributes == {"step": 5}


def test_failures_are_logged_as_errors_and_the_rest_at_the_level_asked_for(caplog):
    telemetry = Telemetry(LoggingSink(level=logging.DEBUG))
    with caplog.at_level(logging.DEBUG, logger="ckpt_core"):
        telemetry.point("save.skipped", step=5)
        with pytest.raises(OSError, match="full"), telemetry.span("save.write"):
            raise OSError("full")
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.DEBUG, logging.DEBUG, logging.ERROR]
    assert caplog.records[0].getMessage() == "save.skipped point step=5"
    assert "error=OSError: full" in caplog.records[-1].getMessage()
