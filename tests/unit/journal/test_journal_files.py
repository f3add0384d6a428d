"""The files of the journal: torn, foreign, rotated, on disks and in buckets."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ckpt_core.journal import _files, read_events, read_history
from ckpt_core.journal._files import EventFile, ForeignJournalError, HistoryFile
from ckpt_core.journal._records import _KINDS, decode, encode, record
from ckpt_core.names import EARLIER_EVENTS, EVENTS, HISTORY
from ckpt_core.storage import LocalStorage, object_storage


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


def write(root, *records):
    EventFile(root).write(encode(records))


def test_lines_follow_one_another_over_writers(root):
    first = EventFile(root)
    first.write(encode([progress(1)]))
    first.write(encode([progress(2), progress(3)]))
    write(root, progress(4))
    assert steps(read_events(root)) == [1, 2, 3, 4]
    assert len(root.read_bytes(EVENTS).splitlines()) == 4


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_last_line_is_skipped_and_mended_by_the_next_writer(root, cut):
    whole = encode([progress(1), progress(2)])
    root.replace(EVENTS, whole[:-cut])
    assert steps(read_events(root)) == ([1, 2] if cut == 1 else [1])
    write(root, progress(3))
    assert steps(read_events(root))[-1] == 3
    assert 1 in steps(read_events(root))


@pytest.mark.parametrize("zeros", [b"\0", b"\0" * 5000])
def test_zeros_after_a_power_cut_are_no_obstacle(root, zeros):
    root.replace(EVENTS, zeros)
    write(root, progress(3))
    assert steps(read_events(root)) == [3]


def test_files_are_bounded_and_the_older_part_is_kept_once(root, monkeypatch):
    monkeypatch.setattr(_files, "MOST_APPENDED", 1000)
    monkeypatch.setattr(_files, "MOST_REPLACED", 1000)
    events = EventFile(root)
    for step in range(1, 101):
        events.write(encode([progress(step)]))
        assert root.size(EVENTS) <= 1000
    assert {entry.name for entry in root.list("")} == {EVENTS, EARLIER_EVENTS}
    found = steps(read_events(root))
    assert found == list(range(found[0], 101))
    assert len(found) > 10
    write(root, progress(101))
    assert steps(read_events(root))[-1] == 101


def write_much(root, key):
    if key == HISTORY:
        HistoryFile(root).write([progress(1)])
    events = EventFile(root)
    for step in range(10):
        events.write(encode([progress(step)]))


@pytest.mark.parametrize("key", [EVENTS, EARLIER_EVENTS, HISTORY])
def test_a_users_file_of_that_name_is_never_touched(root, key, monkeypatch):
    theirs = b'{"loss": 0.5}\n' * 100
    root.replace(key, theirs)
    monkeypatch.setattr(_files, "MOST_APPENDED", 100)
    monkeypatch.setattr(_files, "MOST_REPLACED", 100)
    with pytest.raises(ForeignJournalError, match=rf"{key}|not written by"):
        write_much(root, key)
    assert root.read_bytes(key) == theirs
    assert read_history(root) == []


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
    for key in (EVENTS, HISTORY):
        root.replace(key, good + line + b"\n" + good)
    assert [each["run"] for each in read_events(root)] == ["b", "b"]
    assert [each["run"] for each in read_history(root)] == ["b"]


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


def test_reading_is_bounded(root, monkeypatch):
    monkeypatch.setattr(_files, "_MOST_READ", 1000)
    root.replace(EVENTS, encode([progress(step) for step in range(1000)]))
    found = steps(read_events(root))
    assert found[-1] == 999
    assert 5 < len(found) < 20


def test_a_pipe_or_a_directory_of_that_name_is_no_journal(tmp_path):
    os.mkfifo(tmp_path / EVENTS)
    (tmp_path / HISTORY).mkdir()
    root = LocalStorage(tmp_path)
    assert read_events(root) == []
    assert read_history(root) == []
    with pytest.raises(OSError, match="is no regular file"):
        HistoryFile(root).write([progress(1)])
    with pytest.raises(OSError, match="is no regular file"):
        write(root, progress(1))


def test_nothing_is_written_through_a_link(tmp_path):
    outside, inside = tmp_path / "outside", tmp_path / "run"
    inside.mkdir()
    outside.write_bytes(encode([progress(1)]))
    (inside / EVENTS).symlink_to(outside)
    with pytest.raises(OSError, match=EVENTS):
        write(LocalStorage(inside), progress(2))
    assert outside.read_bytes() == encode([progress(1)])


def test_secrets_in_urls_stay_out():
    made = record("save", 1.0, "r", {"error": "S3Error: https://u:secret@host/x?X-Amz-Signature=abc failed"})
    assert b"secret" not in encode([made])
    assert b"abc" not in encode([made])
    assert made["error"].endswith("failed")


def test_the_examples_of_the_documentation_are_records_of_every_kind():
    page = Path(__file__).parents[3].joinpath("docs", "journal.md").read_text(encoding="utf-8")
    lines = page.partition("```json\n")[2].partition("```")[0].encode()
    found = decode(lines)
    assert encode(found) == lines
    assert {each["kind"] for each in found} == set(_KINDS)
