"""Fast-forwarding of data that can only be drawn: what is shown meanwhile."""

from __future__ import annotations

import io
import sys

import pytest

from ckpt_core.data import _tracking
from ckpt_core.data._tracking import draw_and_drop


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_bar_with_batches_and_rate(monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    draw_and_drop(left := iter(range(5)), 3)

    assert list(left) == [3, 4]
    assert "skipping what was seen" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert "batch/s" in terminal.getvalue()


def test_elsewhere_and_without_tqdm_lines_are_logged(monkeypatch, caplog):
    for stderr, installed in ((io.StringIO(), True), (Terminal(), False)):
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stderr)
            patch.setattr(_tracking, "_SECONDS_BETWEEN_LINES", -1.0)
            if not installed:
                patch.setitem(sys.modules, "tqdm", None)
            draw_and_drop(left := iter(range(4)), 2)
        assert list(left) == [2, 3]
        assert [record.getMessage().split(",")[0] for record in caplog.records] == [
            "skipped 1 of 2 batches", "skipped 2 of 2 batches",
        ]  # fmt: skip
        assert stderr.getvalue() == ""


@pytest.mark.parametrize("terminal", [False, True])
def test_data_that_ends_too_early_is_told(monkeypatch, caplog, terminal):
    monkeypatch.setattr(sys, "stderr", Terminal() if terminal else io.StringIO())
    draw_and_drop(iter(range(2)), 9)
    assert "ended after 2 batches, but 9 were to be skipped" in caplog.text
