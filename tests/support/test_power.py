"""A power cut takes what was not synced, and nothing else: writers that forget a sync are found out."""

from __future__ import annotations

import os

import pytest

from ckpt_core.storage import LocalStorage
from tests.support.power import PowerLog, power_cut
from tests.support.system_calls import SystemCalls

pytestmark = pytest.mark.reliability

SEEDS = range(60)


class Disk:
    """A root that is written to, and what power cuts leave of it."""

    def __init__(self, folder):
        self.root, self.folder, self.log = folder / "root", folder, folder / "log"
        (self.root / "old").mkdir(parents=True)
        (self.root / "old" / "f").write_bytes(b"old")
        PowerLog.begin(self.root, self.log)
        self.cuts = 0

    def write(self, act):
        with SystemCalls(self.root, [PowerLog(self.root, self.log).fault]):
            act(self.root)
        return self

    def after_a_cut(self, fate="strict", seed=0):
        self.cuts += 1
        target = self.folder / f"cut-{self.cuts}"
        power_cut(self.log, self.root, target, fate=fate, seed=seed)
        return {
            str(path.relative_to(target)): path.read_bytes() if path.is_file() else None
            for path in target.rglob("*")
        }

    def fates(self):
        kinds = ("journal", "random")
        return [self.after_a_cut(), *(self.after_a_cut(kind, seed) for kind in kinds for seed in SEEDS)]


OLD = {"old": None, "old/f": b"old"}


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path)


def sync(path):
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def test_what_was_there_before_is_durable(disk):
    assert disk.after_a_cut() == OLD


def test_a_file_without_any_sync_is_gone_or_anything(disk):
    disk.write(lambda root: (root / "f").write_bytes(b"new"))
    assert disk.after_a_cut() == OLD
    found = {content.get("f", "gone") for content in disk.fates()}
    assert {"gone", b"", b"new", b"\0\0\0"} <= found
    assert any(each in found for each in (b"n", b"ne")), "part of it"


def test_a_synced_name_without_its_content_is_an_empty_file(disk):
    def act(root):
        (root / "f").write_bytes(b"new")
        sync(root)

    assert disk.write(act).after_a_cut() == OLD | {"f": b""}


def test_synced_content_without_its_name_is_gone(disk):
    def act(root):
        (root / "f").write_bytes(b"new")
        sync(root / "f")

    disk.write(act)
    assert disk.after_a_cut() == OLD
    assert {content.get("f", "gone") for content in disk.fates()} == {"gone", b"new"}


def test_content_and_name_together_survive_every_fate(disk):
    def act(root):
        (root / "f").write_bytes(b"new")
        sync(root / "f")
        sync(root)

    disk.write(act)
    assert all(content == OLD | {"f": b"new"} for content in disk.fates())


def test_a_write_after_the_sync_is_not_durable(disk):
    def act(root):
        (root / "f").write_bytes(b"new")
        sync(root / "f")
        sync(root)
        with (root / "f").open("ab") as file:
            file.write(b"er")

    disk.write(act)
    assert disk.after_a_cut()["f"] == b"new"
    assert {content["f"] for content in disk.fates()} >= {b"new", b"newer", b"\0" * 5}


def test_a_rename_is_all_or_nothing_until_it_is_synced(disk):
    disk.write(lambda root: (root / "old").rename(root / "new"))
    renamed = {"new": None, "new/f": b"old"}
    assert disk.after_a_cut() == OLD
    fates = disk.fates()
    assert all(content in (OLD, renamed) for content in fates)
    assert renamed in fates
    disk.write(sync)
    assert all(content == renamed for content in disk.fates())


def test_an_exchange_is_all_or_nothing(disk):
    def act(root):
        (root / "other").mkdir()
        (root / "other" / "g").write_bytes(b"other")
        sync(root / "other" / "g")
        sync(root / "other")
        sync(root)
        LocalStorage(root).exchange("old", "other")

    before = OLD | {"other": None, "other/g": b"other"}
    after = {"other": None, "other/f": b"old", "old": None, "old/g": b"other"}
    fates = disk.write(act).fates()
    assert all(content in (before, after) for content in fates)
    assert before in fates
    assert after in fates


def test_a_deletion_that_was_not_synced_may_be_undone(disk):
    disk.write(lambda root: LocalStorage(root).delete("old"))
    assert disk.after_a_cut() == OLD
    found = [frozenset(content.items()) for content in disk.fates()]
    assert set(found) == {frozenset(), frozenset({("old", None)}), frozenset(OLD.items())}


def test_no_directory_has_two_names(disk):
    def act(root):
        (root / "old").rename(root / "b")
        (root / "b").rename(root / "c")

    fates = disk.write(act).fates()
    assert {name for content in fates for name in content} >= {"old", "c"}
    assert all(len([name for name in content if "/" not in name]) == 1 for content in fates)


def test_the_notes_of_several_processes_are_one_story(disk):
    def in_a_child(act):
        child = os.fork()
        if child == 0:
            disk.write(act)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0

    in_a_child(lambda root: (root / "f").write_bytes(b"new"))
    in_a_child(lambda root: sync(root / "f"))
    assert "f" not in disk.after_a_cut()
    in_a_child(sync)
    assert disk.after_a_cut() == OLD | {"f": b"new"}


def test_what_local_storage_says_is_durable_is(disk):
    def act(root):
        storage = LocalStorage(root)
        storage.make_directory("a")
        storage.write_bytes("a/small", b"small")
        storage.write_pieces("a/large", [memoryview(bytes(5000))])
        storage.sync_directory("a")
        storage.replace("pins.json", b"{}")
        storage.rename("a", "b")
        storage.sync_directory("")

    expected = OLD | {"b": None, "b/small": b"small", "b/large": bytes(5000), "pins.json": b"{}"}
    assert all(content == expected for content in disk.write(act).fates())
