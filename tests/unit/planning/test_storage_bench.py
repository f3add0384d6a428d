"""Measurements of a storage: what they report, and that nothing of them or of others is ever lost or left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.cli import main
from ckpt_core.errors import ConfigError
from ckpt_core.names import bench_name
from ckpt_core.planning import BenchLimits, find_storage, measure_storage
from ckpt_core.storage import LocalStorage, open_storage
from tests.unit.training import Net

SMALL = BenchLimits(total_bytes=64 * 2**20, seconds=20.0, writers=(1,))
QUICK = ("--gib", "0.125", "--seconds", "20", "--writers", "1,2")
HANGS = """
import sys, threading
from ckpt_core.planning import BenchLimits, measure_storage
from ckpt_core.storage import LocalStorage
def stop():
    print("writing", flush=True)
    threading.Event().wait()
limits = BenchLimits(total_bytes=64 * 2**20, seconds=60.0, writers=(1,))
measure_storage(LocalStorage(sys.argv[1]), limits, stop=stop)
"""


def names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


def test_a_measurement_leaves_a_root_as_it_was_and_feeds_a_plan(tmp_path, capsys):
    root = tmp_path / "root"
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, TrainState(model=Net())).result()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}

    assert main(["bench", str(root), *QUICK, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)

    assert {path: path.read_bytes() for path in root.rglob("*") if path.is_file()} == before
    assert sum(run["size_bytes"] for run in record["runs"]) <= 2**27
    assert [run["writers"] for run in record["runs"]] == [1, 2, 2]
    assert all(value > 0 for run in record["runs"] for value in run.values())
    assert 0 < record["small_write_seconds"] < 5
    assert 0 < record["commit_seconds"] < 20
    measured = tmp_path / "measured.json"
    measured.write_text(json.dumps(record))
    profile = find_storage(str(measured))
    assert (profile.write, profile.rate_of) == (record["write_bytes_per_second"], "node")
    assert main(["plan", "1B", "--storage", str(measured), "--keep", "{latest: 1}"]) == 0
    assert "measured by `ckpt bench`" in capsys.readouterr().out


def test_what_a_killed_measurement_has_left_the_next_one_removes_but_never_a_live_one(tmp_path):
    command = [sys.executable, "-c", HANGS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "writing\n"
            (left,) = (each for each in names(tmp_path) if each.startswith(".bench-"))

            assert measure_storage(LocalStorage(tmp_path), SMALL).collected == []
            assert names(tmp_path) == [left]
        finally:
            child.send_signal(signal.SIGKILL)

    assert measure_storage(LocalStorage(tmp_path), SMALL).collected == [left]
    assert names(tmp_path) == []


@pytest.mark.parametrize("moment", [1, 5, 12])
def test_an_interruption_at_any_moment_leaves_nothing(tmp_path, moment):
    calls = []

    def stop():
        calls.append(1)
        if len(calls) >= moment:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_storage(LocalStorage(tmp_path), SMALL, stop=stop)

    assert names(tmp_path) == []


def test_an_object_store_without_locks_keeps_what_may_be_alive_for_an_hour():
    storage = open_storage("memory://bench-of-objects")
    now = 2_000_000_000
    old, young, foreign = bench_name(now - 7200, "00000001"), bench_name(now - 60, "00000002"), ".bench-mine"
    for name in (old, young, foreign):
        storage.write_bytes(f"{name}/0", b"x")

    result = measure_storage(storage, SMALL, now=now)

    assert result.collected == [old]
    assert {entry.name for entry in storage.list("")} == {young, foreign}
    assert result.record["commit_seconds"] > 0


def test_time_ends_a_measurement_that_would_take_longer(tmp_path):
    limits = BenchLimits(total_bytes=2**30, seconds=0.001, writers=(1,))

    result = measure_storage(LocalStorage(tmp_path), limits)

    assert sum(run.size_bytes for run in result.runs) < 2**29


def test_a_measurement_without_room_writes_nothing(tmp_path):
    limits = BenchLimits(total_bytes=2**60, seconds=10.0)

    with pytest.raises(ConfigError, match="make room, or give a smaller --gib"):
        measure_storage(LocalStorage(tmp_path), limits)

    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["missing"], 3, "make it first"),
        ([".", "--gib", "0"], 2, "--gib must be above 0"),
        ([".", "--gib", "0.01"], 2, "too few"),
        ([".", "--seconds", "-1"], 2, "--seconds must be seconds"),
        ([".", "--seconds", "2h"], 2, "at most 1800"),
        ([".", "--writers", "none"], 2, "--writers must be numbers"),
        ([".", "--writers", "0"], 2, "writers must be numbers from 1"),
    ],
)
def test_bad_input_writes_nothing(arguments, code, named, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    assert main(["bench", *arguments]) == code

    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert names(tmp_path) == []


def test_a_checkpoint_is_no_root(tmp_path, capsys):
    with CheckpointManager(tmp_path) as checkpoints:
        name = checkpoints.save(1, TrainState(model=Net())).result().name
    before = names(tmp_path / name)

    assert main(["bench", str(tmp_path / name)]) == 2

    assert names(tmp_path / name) == before


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"root": "x", "write_bytes_per_second": "fast"}'])
def test_a_file_that_no_measurement_wrote_is_refused(content, tmp_path):
    (tmp_path / "measured.json").write_text(content)

    with pytest.raises(ConfigError, match=r"measured\.json"):
        find_storage(str(tmp_path / "measured.json"))
