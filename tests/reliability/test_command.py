"""`python -m tests.reliability` says what was broken, and that something was by its exit code."""

from __future__ import annotations

import json
import logging

import pytest

from tests.reliability import command as rig

pytestmark = pytest.mark.reliability


@pytest.fixture
def command(monkeypatch, tmp_path):
    monkeypatch.setitem(rig.PARTS, "fake", "tests.reliability.broken_parts")

    def run(seed):
        out = tmp_path / "out.json"
        code = rig.main(
            [
                "--only",
                "fake",
                "--seed",
                str(seed),
                "--count",
                "3",
                "--root",
                str(tmp_path),
                "--json",
                str(out),
            ]
        )
        return code, json.loads(out.read_text())

    yield run
    logging.disable(logging.NOTSET)


def test_a_run_that_breaks_nothing_ends_with_0_and_a_table(command, capsys, tmp_path):
    code, found = command(1)
    assert code == 0
    assert found["table"] == [{"sweep": "a sweep", "points": 3, "kills": 3, "lost": 0, "problems": 0}]
    assert len(found["outcomes"]) == 3
    assert "kills per second" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [tmp_path / "out.json"]


def test_what_is_lost_is_told_and_the_exit_code_is_1(command, capsys):
    code, found = command(2)
    assert code == 1
    assert found["table"][0]["lost"] == 1
    assert "step 2 was acknowledged, 1 was resumed from" in capsys.readouterr().out


def test_a_part_that_falls_over_is_told_and_the_exit_code_is_1(command, capsys):
    code, found = command(3)
    assert code == 1
    assert "the emulator is gone" in found["parts"][0]["failure"]
    assert "did not come to its end" in capsys.readouterr().out


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        rig.main(["--only", "nothing"])
    assert "not one of local" in capsys.readouterr().err
