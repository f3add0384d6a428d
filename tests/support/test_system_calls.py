"""Tests of storage trust that every system call is seen, and that faults happen at the one they name."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault
from tests.kit.faults import kill_process
from tests.support.system_calls import CHANGING, ShortWrite, SystemCalls

pytestmark = pytest.mark.reliability


@pytest.fixture
def root(tmp_path):
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def did(calls):
    return [f"{operation.method} {operation.key}".rstrip() for operation in calls.operations]


def test_what_a_storage_does_is_seen_call_by_call(root):
    storage = LocalStorage(root)
    with SystemCalls(root) as calls:
        storage.make_directory(".incomplete-1-step")
        storage.write_bytes(".incomplete-1-step/a", b"content")
        storage.sync_directory(".incomplete-1-step")
        storage.rename(".incomplete-1-step", "step")
        storage.sync_directory("")
        storage.delete("step")
    assert [line for line in did(calls) if line.split()[0] in CHANGING] == [
        "mkdir .incomplete-1-step",
        "fsync",
        "create .incomplete-1-step/a",
        "write .incomplete-1-step/a",
        "fsync .incomplete-1-step/a",
        "fsync .incomplete-1-step",
        "rename .incomplete-1-step -> step",
        "fsync",
        "unlink step/a",
        "rmdir step",
    ]
    assert [operation.number for operation in calls.operations] == list(range(len(calls.operations)))


def test_a_small_file_that_is_replaced_is_drafted_synced_and_renamed(root):
    with SystemCalls(root) as calls:
        LocalStorage(root).replace("pins.json", b"{}")
    methods = [operation.method for operation in calls.operations if operation.method in CHANGING]
    assert methods == ["create", "write", "fsync", "rename", "fsync"]


def test_direct_writes_exchanges_locks_and_files_without_a_name_are_seen(root):
    storage = LocalStorage(root)
    with SystemCalls(root) as calls:
        storage.check_root()
        lock = storage.try_lock("writer.json")
        assert lock is not None
        lock.release()
        storage.write_pieces("a/data", [memoryview(bytes(5000))])
        (root / "b").mkdir()
        storage.exchange("a", "b")
    seen = did(calls)
    assert {"lock writer.json.lock", "create a/data", "write a/data", "exchange a <-> b"} <= set(seen)
    assert any(line.startswith("write #") for line in seen), "the probe has no name"


# Everything in Python that changes a file, and how it should be told.
WAYS = {
    "create f, write f": lambda root: (root / "f").write_bytes(b"x"),
    "create t, write t": lambda root: (root / "t").write_text("x"),
    "open there, write there": lambda root: overwrite(root / "there"),
    "open there, truncate there": lambda root: truncated(root / "there"),
    "truncate there": lambda root: os.truncate(root / "there", 0),
    "unlink there": lambda root: (root / "there").unlink(),
    "rename there -> g": lambda root: (root / "there").rename(root / "g"),
    "rename there -> h": lambda root: (root / "there").replace(root / "h"),
    "link there -> i": lambda root: os.link(root / "there", root / "i"),
    "symlink s": lambda root: (root / "s").symlink_to("there"),
    "mkdir d": lambda root: (root / "d").mkdir(),
    "list full, unlink full/x, rmdir full": lambda root: shutil.rmtree(root / "full"),
    "open there, lock there": lambda root: locked(root / "there"),
}


def overwrite(path):
    descriptor = os.open(path, os.O_WRONLY)
    os.pwrite(descriptor, b"y", 3)
    os.close(descriptor)


def truncated(path):
    with path.open("r+b") as file:
        file.truncate(1)


def locked(path):
    with path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("expected", list(WAYS))
def test_every_way_to_change_a_file_is_seen(root, expected):
    (root / "there").write_bytes(b"here")
    (root / "full").mkdir()
    (root / "full" / "x").touch()
    with SystemCalls(root) as calls:
        WAYS[expected](root)
    told = [line for line in did(calls) if line != "open full"]
    assert ", ".join(told) == expected


def test_relative_paths_and_paths_through_links_are_recognised(root, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(root)
    monkeypatch.chdir(root)
    with SystemCalls(tmp_path / "link") as calls:
        Path("a").mkdir()
        (tmp_path / "link" / "b").mkdir()
        (root / "a" / ".." / "c").mkdir()
    assert did(calls) == ["mkdir a", "mkdir b", "mkdir c"]


def test_nothing_elsewhere_is_seen_and_nothing_afterwards(root, tmp_path):
    faults = [Fault(error=OSError(errno.EIO, "Input/output error"))]
    before = os.open, io.open, os.fsync, fcntl.lockf
    with SystemCalls(root, faults) as calls:
        (tmp_path / "elsewhere").write_bytes(b"x")
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        (tmp_path / "roots").mkdir()
    (root / "later").write_bytes(b"x")
    assert calls.operations == ()
    assert (os.open, io.open, os.fsync, fcntl.lockf) == before


def test_files_behave_as_they_do_unwatched(root):
    with SystemCalls(root):
        with (root / "text").open("w", encoding="utf-8") as file:
            file.write("één\n" * 5000)
            assert file.mode == "w"
        with (root / "text").open("r+b") as file:
            file.seek(4)
            file.write(b"!")
        assert (root / "text").read_text(encoding="utf-8").startswith("éé!\né")
        with (root / "text").open("rb") as file:
            assert isinstance(file, io.BufferedReader)
            assert file.read(2) == "é".encode()
            assert len(file.read()) == 29998
        with pytest.raises(FileExistsError):
            (root / "text").open("xb")
        with pytest.raises(FileNotFoundError):
            (root / "missing").open()


@pytest.mark.parametrize(
    ("method", "act"),
    [
        ("create", lambda root: (root / "new").open("xb")),
        ("mkdir", lambda root: (root / "new").mkdir()),
        ("rename", lambda root: (root / "there").rename(root / "new")),
        ("unlink", lambda root: (root / "there").unlink()),
        ("list", lambda root: list(root.iterdir())),
    ],
)
def test_an_error_is_raised_instead_of_the_call_and_names_what_the_kernel_would(root, method, act):
    (root / "there").write_bytes(b"here")
    fault = Fault(method=method, error=OSError(errno.ENOSPC, "No space left on device"))
    with SystemCalls(root, [fault]) as calls, pytest.raises(OSError, match="No space") as caught:
        act(root)
    assert caught.value.errno == errno.ENOSPC
    assert str(caught.value.filename).startswith(str(root))
    assert [path.name for path in root.iterdir()] == ["there"]
    assert len(calls.operations) == 1


def test_an_error_becomes_the_class_that_python_has_for_it(root):
    with (
        SystemCalls(root, [Fault(method="mkdir", error=OSError(errno.EACCES, "Permission denied"))]),
        pytest.raises(PermissionError),
    ):
        (root / "new").mkdir()


@pytest.mark.parametrize("method", ["write", "fsync"])
def test_errors_of_descriptors_name_no_file(root, method):
    with (
        SystemCalls(root, [Fault(method=method, key="f", error=OSError(errno.EIO, "Input/output error"))]),
        pytest.raises(OSError, match="Input/output") as caught,
    ):
        LocalStorage(root).write_bytes("f", b"x")
    assert caught.value.filename is None


def test_reads_fail_too(root):
    storage = LocalStorage(root)
    storage.write_bytes("f", b"x")
    with SystemCalls(root, [Fault(method="read", error=OSError(errno.EIO, "Input/output error"))]):
        with pytest.raises(OSError, match="Input/output"):
            storage.read_bytes("f")
        with storage.open_ranges("f") as ranges, pytest.raises(OSError, match="Input/output"):
            ranges.read_into(0, memoryview(bytearray(1)))


@pytest.mark.parametrize("method", ["rename", "exchange"])
def test_renames_by_the_kernels_own_call_fail_as_others_do(root, method):
    storage = LocalStorage(root)
    for name in ("a", "b"):
        storage.write_bytes(f"{name}/{name}", b"x")
    with SystemCalls(root, [Fault(method=method, error=OSError(errno.EIO, "Input/output error"))]) as calls:
        with pytest.raises(OSError, match="Input/output"):
            storage.exchange("a", "b") if method == "exchange" else storage.rename("a", "c")
        assert (root / "a" / "a").exists()
        calls.inject(())
        storage.exchange("a", "b") if method == "exchange" else storage.rename("a", "c")
    assert not (root / "a" / "a").exists()


@pytest.mark.parametrize("short", [1, 4095, 4096, 5000])
def test_a_short_write_takes_what_it_says_and_the_storage_goes_on_behind_it(root, short):
    content = os.urandom(3 * 4096 + 17)
    storage = LocalStorage(root)
    with SystemCalls(root, [ShortWrite(method="write", nth=0, short_bytes=short)]) as calls:
        storage.write_bytes("small", content)
    with SystemCalls(root, [ShortWrite(method="write", nth=0, short_bytes=short)]) as direct:
        storage.write_pieces("large", [memoryview(content)])
    assert (root / "small").read_bytes() == (root / "large").read_bytes() == content
    assert did(calls).count("write small") == 2
    assert did(direct).count("write large") >= 2


def test_a_call_can_be_held_up_and_let_go(root):
    held, go_on = threading.Event(), threading.Event()

    def hold(_operation):
        held.set()
        assert go_on.wait(60)

    with SystemCalls(root, [Fault(method="fsync", before=hold)]):
        writer = threading.Thread(target=LocalStorage(root).write_bytes, args=("f", b"x"))
        writer.start()
        assert held.wait(60)
        assert (root / "f").read_bytes() == b"x", "written, not synced"
        go_on.set()
        writer.join(60)
    assert not writer.is_alive()


def test_what_a_fault_does_itself_is_not_seen(root):
    def look(_operation):
        (root / "seen").write_bytes(b"x")

    with SystemCalls(root, [Fault(method="mkdir", before=look, after=look)]) as calls:
        (root / "d").mkdir()
    assert did(calls) == ["mkdir d"]
    assert (root / "seen").exists()


def test_a_call_that_failed_has_no_after(root):
    called = []
    (root / "d").mkdir()
    with SystemCalls(root, [Fault(after=called.append)]):
        with pytest.raises(FileExistsError):
            (root / "d").mkdir()
        with pytest.raises(FileExistsError):
            LocalStorage(root).rename("d", "d")
    assert [operation.method for operation in called] == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_can_be_killed_before_and_after_a_call(root, when):
    script = (
        "import sys, pathlib\n"
        "from ckpt_core.testing import Fault\n"
        "from tests.kit.faults import kill_process\n"
        "from tests.support.system_calls import SystemCalls\n"
        f"root = pathlib.Path({str(root)!r})\n"
        f"with SystemCalls(root, [Fault(method='mkdir', {when}=kill_process)]):\n"
        "    (root / 'd').mkdir()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=120)
    assert done.returncode == -9
    assert (root / "d").exists() == (when == "after")
    assert callable(kill_process)
