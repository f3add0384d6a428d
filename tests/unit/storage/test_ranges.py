"""Ranged reads: short reads, failing devices, and links that lead out of the root."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from ckpt_core.storage import LocalStorage, object_storage
from ckpt_core.storage._base import StreamRanges
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage


def read(storage, key: str, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    with storage.open_ranges(key) as reader:
        reader.read_into(start, memoryview(buffer))
    return bytes(buffer)


def test_short_reads_are_continued(tmp_path, monkeypatch):
    real, calls = os.preadv, []

    def preadv(descriptor, buffers, offset):
        calls.append(offset)
        return real(descriptor, [buffers[0][:7]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    (tmp_path / "a").write_bytes(bytes(range(100)))
    assert read(LocalStorage(tmp_path), "a", 10, 40) == bytes(range(10, 40))
    assert calls == [10, 17, 24, 31, 38]


def test_an_error_of_the_device_names_the_file(tmp_path, monkeypatch):
    def preadv(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    (tmp_path / "a").write_bytes(b"x")
    with pytest.raises(OSError, match=r"Input/output error.*/a'") as caught:
        read(LocalStorage(tmp_path), "a", 0, 1)
    assert caught.value.errno == errno.EIO


def test_bytes_are_lent_where_they_lie(tmp_path):
    content = bytes(range(256)) * 100
    (tmp_path / "a").write_bytes(content)
    with LocalStorage(tmp_path).open_ranges("a") as reader:
        with reader.mapped(4_099, 9_000) as lent, reader.mapped(0, 7) as other:
            assert lent == content[4_099:13_099]
            assert other == content[:7]
            assert lent.readonly
        with pytest.raises(ValueError, match="released"):
            lent[0]


def test_a_file_cannot_be_cut_off_while_its_bytes_are_lent(tmp_path):
    """Whoever tries waits; a page that went away would end the process that looks at it."""
    (tmp_path / "a").write_bytes(bytes(10_000))
    with LocalStorage(tmp_path).open_ranges("a") as reader:
        with reader.mapped(0, 9_000) as lent:
            with pytest.raises(BlockingIOError):  # an open that may wait does, and `truncate`
                os.open(tmp_path / "a", os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK)
            assert lent == bytes(9_000)
            with reader.mapped(0, 9_000) as second:
                assert second is None  # so that the other one does not wait for ever
        with (tmp_path / "a").open("r+b") as stream, reader.mapped(0, 9_000) as lent:
            assert lent is None
            stream.truncate(5_000)
        with reader.mapped(0, 9_000) as lent:
            assert lent is None
        with reader.mapped(0, 5_000) as lent:
            assert lent == bytes(5_000)


def test_a_stream_serves_any_storage_in_turns(tmp_path):
    """The default for storages that have nothing better."""
    (tmp_path / "a").write_bytes(bytes(range(256)) * 100)
    found: dict[int, bytes] = {}
    with (tmp_path / "a").open("rb") as stream:
        reader = StreamRanges(stream, "a")

        def work(start: int) -> None:
            buffer = bytearray(256)
            for _ in range(50):
                reader.read_into(start, memoryview(buffer))
            found[start] = bytes(buffer)

        threads = [threading.Thread(target=work, args=(start,)) for start in (0, 7, 300, 5000)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(EOFError, match="a: ends at byte 25600"):
            reader.read_into(25_599, memoryview(bytearray(2)))
    content = bytes(range(256)) * 100
    assert found == {start: content[start : start + 256] for start in (0, 7, 300, 5000)}


def test_every_range_of_an_object_is_one_request():
    storage = object_storage("memory://one-request")
    storage.replace("a", bytes(range(100)))
    asked = []
    real = storage.filesystem.cat_file

    def cat_file(path, start, end):
        asked.append((start, end))
        return real(path, start=start, end=end)

    storage.filesystem.cat_file = cat_file
    assert read(storage, "a", 3, 9) == bytes(range(3, 9))
    assert asked == [(0, 1), (3, 9)]  # the first byte when it is opened


def test_an_object_that_became_shorter_is_noticed():
    storage = object_storage("memory://shorter")
    storage.replace("a", bytes(100))
    with storage.open_ranges("a") as reader:
        storage.replace("a", bytes(50))
        with pytest.raises(EOFError, match="ends at byte 50"):
            reader.read_into(40, memoryview(bytearray(20)))


def test_faults_hit_ranges():
    error = OSError(errno.EIO, "lost")
    storage = FaultyStorage(MemoryStorage(), [Fault(method="read_into", key="step/a", nth=1, error=error)])
    storage.write_bytes("step/a", b"0123")
    assert read(storage, "step/a", 1, 3) == b"12"
    with pytest.raises(OSError, match="lost"):
        read(storage, "step/a", 1, 3)
    assert [op.method for op in storage.operations][-4:] == ["open_ranges", "read_into"] * 2


def test_who_rereads_from_memory(tmp_path):
    assert LocalStorage(tmp_path).rereads_from_memory
    assert MemoryStorage().rereads_from_memory
    assert not object_storage("memory://x").rereads_from_memory
    assert FaultyStorage(MemoryStorage()).rereads_from_memory
    assert not FaultyStorage(object_storage("memory://x")).rereads_from_memory


# --- links


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_bytes(b"secret")
    (tmp_path / "root" / "step").mkdir(parents=True)
    return tmp_path / "outside"


@pytest.mark.parametrize("link", ["step/file", "step"])
@pytest.mark.parametrize("method", ["open", "open_ranges"])
def test_a_link_out_of_the_root_is_never_read_through(tmp_path, outside, link, method):
    storage = LocalStorage(tmp_path / "root")
    if link == "step":
        (tmp_path / "root" / "step").rmdir()
        (tmp_path / "root" / "step").symlink_to(outside)
        (outside / "file").write_bytes(b"secret")
    else:
        (tmp_path / "root" / "step" / "file").symlink_to("../../outside/secret")
    with pytest.raises(PermissionError) as caught, getattr(storage, method)("step/file"):
        pass
    message = str(caught.value)
    assert str(tmp_path / "root" / link) in message
    assert str(outside) in message
    assert "use their directory as the root" in message


def test_a_root_with_a_name_that_the_other_starts_with_is_still_another(tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "root-other").mkdir()
    (tmp_path / "root-other" / "a").write_bytes(b"secret")
    (tmp_path / "root" / "a").symlink_to(tmp_path / "root-other" / "a")
    with pytest.raises(PermissionError, match="leads out"):
        LocalStorage(tmp_path / "root").read_bytes("a")


def test_links_inside_the_root_are_followed(tmp_path, outside):
    storage = LocalStorage(tmp_path / "root")
    storage.write_bytes("blobs/a", b"content")
    (tmp_path / "root" / "step" / "relative").symlink_to("../blobs/a")
    (tmp_path / "root" / "step" / "absolute").symlink_to(tmp_path / "root" / "blobs" / "a")
    assert storage.read_bytes("step/relative") == b"content"
    assert read(storage, "step/absolute", 0, 7) == b"content"


def test_the_root_itself_may_be_a_link(tmp_path, outside):
    (tmp_path / "root" / "step" / "a").write_bytes(b"content")
    (tmp_path / "latest").symlink_to("root")
    assert LocalStorage(tmp_path / "latest").read_bytes("step/a") == b"content"


def test_a_link_to_nothing_is_not_found_inside_and_refused_outside(tmp_path, outside):
    storage = LocalStorage(tmp_path / "root")
    (tmp_path / "root" / "inside").symlink_to("nowhere")
    (tmp_path / "root" / "outside").symlink_to("../nowhere")
    with pytest.raises(FileNotFoundError):
        storage.read_bytes("inside")
    with pytest.raises(PermissionError):
        storage.read_bytes("outside")


def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a")
    for method in ("open", "open_ranges"):
        with (
            pytest.raises(PermissionError, match="not a regular file"),
            getattr(LocalStorage(tmp_path), method)("a"),
        ):
            pass
