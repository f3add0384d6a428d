"""Fast-forwarding of data that can only be drawn: what is told meanwhile."""

from __future__ import annotations

from ckpt_core.data import _tracking
from ckpt_core.data._tracking import draw_and_drop


def test_the_log_tells_how_far_it_is(monkeypatch, caplog):
    monkeypatch.setattr(_tracking, "_SECONDS_BETWEEN_LINES", -1.0)
    draw_and_drop(left := iter(range(4)), 2)
    assert list(left) == [2, 3]
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "skipped 1 of 2 batches", "skipped 2 of 2 batches",
    ]  # fmt: skip


def test_data_that_ends_too_early_is_told(caplog):
    draw_and_drop(iter(range(2)), 9)
    assert "ended after 2 batches, but 9 were to be skipped" in caplog.text
