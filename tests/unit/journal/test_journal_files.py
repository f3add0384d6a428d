"""The files of the journal: torn, foreign, rotated, on disks and in buckets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckpt_core.journal import _run_files, add_event, read_events, read_history
from ckpt_core.journal._records import _KINDS, decode, encode, record
from ckpt_core.journal._run_files import RunFile, read_runs
from ckpt_core.names import OWN, run_file
from ckpt_core.storage import LocalStorage, object_storage
from ckpt_core.testing import Fault, FaultyStorage


@pytest.fixture(params=["local", "memory"])
def root(request, tmp_path):
    """A root that lines can be appended in, and one where files are replaced as a whole."""
    if request.param == "local":
        return LocalStorage(tmp_path)
    return object_storage(f"memory://journal-{tmp_path.name}")


def progress(step):
    return record("progress", float(step), "r", {"step": step, "training_seconds": float(step)})


def steps(records):
    return [each["step"] for each in records]


RUN = run_file(1.0, "r")


def write(root, *records, run="r", begun=1.0):
    RunFile(root, run, begun).write(records)


def test_lines_follow_one_another_in_the_order_of_the_runs(root):
    write(root, progress(9), run="b", begun=5.0)
    first = RunFile(root, "r", 1.0)
    first.write([progress(1)])
    first.write([progress(2), progress(3)])
    assert steps(read_events(root)) == [1, 2, 3, 9]
    assert len(root.read_bytes(RUN).splitlines()) == 3


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_skipped_and_mended_by_the_next_event(root, cut):
    whole = encode([progress(1), progress(2)])
    root.replace(RUN, whole[:-cut])
    assert steps(read_events(root)) == ([1, 2] if cut == 1 else [1])
    add_event(root, "prune", 3.0, {"names": ["a"]})
    assert [each["kind"] for each in read_events(root)][-1] == "prune"
    assert read_events(root)[0]["step"] == 1


def test_a_write_that_tears_a_line_is_mended_by_the_next(tmp_path):
    torn = Fault(method="append", nth=0, error=OSError(28, "full"))
    storage = FaultyStorage(LocalStorage(tmp_path), [torn])
    file = RunFile(storage, "r", 1.0)
    file.write([progress(1)])
    LocalStorage(tmp_path).append(RUN, b'{"v":1,"ki')
    with pytest.raises(OSError, match="full"):
        file.write([progress(2)])
    file.write([progress(2), progress(3)])
    file.write([progress(4)])
    assert steps(read_events(storage)) == [1, 2, 3, 4]
    assert b"ki" + b"{" not in storage.read_bytes(RUN)


@pytest.mark.parametrize("zeros", [b"\0", b"\0" * 5000])
def test_zeros_after_a_power_cut_are_no_obstacle(root, zeros):
    root.replace(RUN, zeros)
    add_event(root, "progress", 3.0, {"step": 3})
    assert steps(read_events(root)) == [3]


def test_a_file_is_bounded_and_keeps_how_the_run_began_and_its_newest_lines(root, monkeypatch):
    monkeypatch.setattr(_run_files, "MOST_APPENDED", 1000)
    monkeypatch.setattr(_run_files, "MOST_REPLACED", 1000)
    file = RunFile(root, "r", 1.0)
    file.write([record("run", 0.0, "r", {"event": "start", "step": 0})])
    for step in range(1, 101):
        file.write([progress(step)])
        assert root.size(RUN) <= 1000
    assert read_history(root) == read_events(root)[:1]
    found = steps(read_events(root))[1:]
    assert found == list(range(found[0], 101))
    assert len(found) > 5


HOSTILE = [
    b"{" * 100_000,
    b'{"v":1,"kind":"run"' + b"[" * 10_000,
    b'{"v":1,"kind":["run"],"time":1,"run":"a"}',
    b'{"v":1,"kind":"run","time":"now","run":"a"}',
    b'{"v":1,"kind":"run","time":NaN,"run":"a"}',
    b'{"v":1,"kind":"run","time":1e999,"run":"a"}',
    b'{"v":1,"kind":"run","time":1,"run":["a"]}',
    b'{"v":2,"kind":"run","time":1,"run":"a","event":"start"}',
    b'{"v":1,"kind":"unheard-of","time":1,"run":"a"}',
    b'{"v":1,"kind":"run","time":' + b"9" * 5000 + b',"run":"a"}',
    b"\xff\xfe\x00",
    b"null",
    b'{"v":1,"kind":"run","time":1,"run":"a","event":"' + b"x" * 100_000 + b'"}',
]


@pytest.mark.parametrize("line", HOSTILE)
def test_foreign_lines_are_skipped(root, line):
    good = encode([record("run", 2.0, "b", {"event": "start"})])
    root.replace(RUN, good + line + b"\n" + good)
    assert [each["run"] for each in read_events(root)] == ["b", "b"]


def test_fields_of_the_wrong_type_are_unknown_and_texts_are_plain():
    line = {
        "v": 1,
        "kind": "run",
        "time": 5,
        "run": "a\x1b[31m",
        "event": "end\ud800",
        "step": -3,
        "seconds": "long",
        "devices": True,
        "lost_steps": 10**30,
        "mine": "too",
        "world_size": 2,
    }
    (found,) = decode(json.dumps(line).encode())
    assert found["run"] == "a?[31m"
    assert found["event"] == "end?"
    assert found["world_size"] == 2
    assert [found[name] for name in ("step", "seconds", "devices", "lost_steps")] == [None] * 4
    assert "mine" not in found


def test_reading_is_bounded_and_takes_both_ends(root, monkeypatch):
    root.replace(RUN, encode([progress(step) for step in range(1000)]))
    (found,) = read_runs(root, most=1000).values()
    assert (found[0]["step"], found[-1]["step"]) == (0, 999)
    assert 5 < len(found) < 20
    monkeypatch.setattr(_run_files, "MOST_RUNS", 2)
    for number in range(4):
        write(root, progress(number), run=f"r{number}", begun=10.0 + number)
    assert steps(read_events(root)) == [2, 3]


def test_a_pipe_or_a_directory_of_that_name_is_no_journal(tmp_path):
    (tmp_path / OWN).mkdir()
    os.mkfifo(tmp_path / RUN)
    (tmp_path / run_file(2.0, "d")).mkdir()
    assert read_events(LocalStorage(tmp_path)) == []


def test_nothing_is_written_through_a_link(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "run"
    outside.mkdir()
    inside.mkdir()
    (inside / OWN).symlink_to(outside)
    with pytest.raises(OSError, match=OWN):
        write(LocalStorage(inside), progress(2))
    assert not list(outside.iterdir())


def test_secrets_in_urls_stay_out():
    made = record("save", 1.0, "r", {"error": "S3Error: https://u:secret@host/x?X-Amz-Signature=abc failed"})
    assert b"secret" not in encode([made])
    assert b"abc" not in encode([made])
    assert made["error"].endswith("failed")


def test_the_examples_of_the_documentation_are_records_of_every_kind():
    page = Path(__file__).parents[3].joinpath("docs", "cookbook.md").read_text(encoding="utf-8")
    lines = page.partition("```json")[2].partition("\n")[2].partition("```")[0].encode()
    found = decode(lines)
    assert encode(found) == lines
    assert {each["kind"] for each in found} == set(_KINDS)
