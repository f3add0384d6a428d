"""No call of a local storage goes through a link that is in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_core.storage import LocalStorage

pytestmark = pytest.mark.reliability

SECRET = b"nobody else's"
CALLS = {
    "delete": lambda storage: storage.delete("step"),
    "delete inside": lambda storage: storage.delete("step/part/deep"),
    "create": lambda storage: storage.write_bytes("step/part/new", b"ours"),
    "create deeper": lambda storage: storage.write_bytes("step/part/more/new", b"ours"),
    "write pieces": lambda storage: storage.write_pieces("step/part/new", [memoryview(bytes(8192))]),
    "replace": lambda storage: storage.replace("step/part/data", b"ours"),
    "rename into": lambda storage: storage.rename("mine/data", "step/part/mine"),
    "rename out of": lambda storage: storage.rename("step/part/data", "taken"),
    "exchange": lambda storage: storage.exchange("mine", "step/part/deep"),
    "make a directory": lambda storage: storage.make_directory("step/part/new"),
    "make directories": lambda storage: storage.make_directory("step/part/more/new"),
    "sync": lambda storage: storage.sync_directory("step/part"),
    "lock": lambda storage: storage.try_lock("step/part/pins.json"),
    "name the holder": lambda storage: storage.lock_holder("step/part/data"),
    "name the owner": lambda storage: storage.other_owner("step/part/data"),
    "read": lambda storage: storage.read_bytes("step/part/data"),
    "read ranges": lambda storage: read_ranges(storage, "step/part/data"),
}
PLACES = {
    "delete": "data",
    "delete inside": "deep",
    "create": "new",
    "create deeper": "more",
    "write pieces": "new",
    "replace": "data",
    "rename into": "mine",
    "rename out of": "data",
    "exchange": "deep",
    "make a directory": "new",
    "make directories": "more",
    "lock": "pins.json.lock",
    "read": "data",
    "read ranges": "data",
}
"""Where else than at the directory a link may come."""

CASES = [
    *((name, "step/part") for name in CALLS),
    *((name, f"step/part/{last}") for name, last in PLACES.items()),
]


def read_ranges(storage, key):
    with storage.open_ranges(key) as ranges:
        content = bytearray(ranges.size_bytes)
        ranges.read_into(0, memoryview(content))
        return bytes(content)


class Scene:
    """`step/part` in a root, and a directory with the same names outside."""

    def __init__(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self.root, self.outside = folder / "root", folder / "outside"
        for top, content in ((self.root / "step" / "part", b"inside"), (self.outside, SECRET)):
            (top / "deep").mkdir(parents=True)
            (top / "data").write_bytes(content)
            (top / "deep" / "data").write_bytes(content)
        (self.root / "mine").mkdir()
        (self.root / "mine" / "data").write_bytes(b"mine")
        self.storage = LocalStorage(self.root)
        self.was = self.look()

    def look(self):
        found = {}
        for path in (self.outside, *self.outside.rglob("*")):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            found[path] = status.st_ino, status.st_mode, status.st_mtime_ns, status.st_ctime_ns, content
        return found

    def put_link(self, place):
        """Let `place` be a link to its like outside; what was there stays, under another name."""
        path = self.root / place
        if path.is_symlink() or not path.parent.is_dir():
            return
        if path.exists():
            path.rename(path.with_name("was"))
        relative = path.relative_to(self.root / "step" / "part")
        path.symlink_to(self.outside / relative)

    def call(self, call):
        # To be refused is one good answer; to move or delete the link itself is the other.
        with suppress(OSError):
            assert call(self.storage) != SECRET


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_link_that_was_there_before_leads_nowhere(tmp_path, name, place):
    scene = Scene(tmp_path / "x")
    scene.put_link(place)
    scene.call(CALLS[name])
    assert scene.look() == scene.was


def test_links_that_stay_in_the_root_are_read_through(tmp_path):
    scene = Scene(tmp_path)
    (scene.root / "link").symlink_to("step/part")
    (scene.root / "step" / "absolute").symlink_to(scene.root / "mine" / "data")
    (tmp_path / "also root").symlink_to(scene.root)
    for storage in (scene.storage, LocalStorage(tmp_path / "also root")):
        assert storage.read_bytes("link/data") == b"inside"
        assert read_ranges(storage, "step/absolute") == b"mine"


@pytest.mark.parametrize("target", [".", "circle", "nowhere", "../outside", "../outside/data"])
def test_links_that_lead_to_no_file_of_the_root_are_os_errors(tmp_path, target):
    scene = Scene(tmp_path)
    (scene.root / "circle").symlink_to(target)
    with pytest.raises(OSError, match=r"circle|nowhere"):
        scene.storage.read_bytes("circle")


def test_errors_name_the_whole_path(tmp_path):
    storage = Scene(tmp_path).storage
    for call in (
        lambda: storage.read_bytes("step/part/nothing"),
        lambda: storage.write_bytes("step/part/data", b"x"),
        lambda: storage.make_directory("step/part/deep"),
        lambda: storage.sync_directory("step/part/nothing"),
        lambda: storage.rename("step/part/nothing", "step/part/new"),
    ):
        with pytest.raises(OSError, match=r"root/step/part/(nothing|data|deep)'"):
            call()
    with pytest.raises(NotADirectoryError, match="step/part/data'"):
        storage.write_bytes("step/part/data/new", b"x")


@pytest.mark.parametrize("call", ["open", "lock"])
def test_a_pipe_in_place_of_a_file_is_refused_at_once(tmp_path, call):
    storage = LocalStorage(tmp_path)
    os.mkfifo(tmp_path / "a.lock")
    with pytest.raises(PermissionError, match="pipe"):
        storage.read_bytes("a.lock") if call == "open" else storage.try_lock("a")


def test_what_is_nested_too_deeply_to_be_deleted_is_an_os_error(tmp_path):
    storage = LocalStorage(tmp_path)
    folder = os.open(tmp_path, os.O_RDONLY)
    for name in ["top", *["deep"] * 1500]:
        os.mkdir(name, dir_fd=folder)
        inner = os.open(name, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    if sys.version_info >= (3, 13):  # rmtree no longer calls itself
        storage.delete("top")
        assert storage.list("") == []
        return
    with pytest.raises(OSError, match="top"):
        storage.delete("top")
    subprocess.run(["rm", "-r", tmp_path / "top"], check=True, timeout=60)


def test_no_descriptor_is_left_open(tmp_path):
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name, call in CALLS.items():
        scene = Scene(tmp_path / "x")
        if name != "lock":  # whoever has a lock holds its file open
            scene.call(call)
            scene.put_link("step/part")
            scene.call(call)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
