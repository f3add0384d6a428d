"""In a root that others may write to, what is theirs is left."""

from __future__ import annotations

import logging
import os

import pytest

from ckpt_core.commit import Catalog, collect_orphans
from ckpt_core.storage import LocalStorage
from tests.unit.commit.checkpoints import save, write_files

pytestmark = pytest.mark.reliability

NOBODY = 65534
LEFT = {
    "a torn save": ".incomplete-deadbeef-step-000000009",
    "a checkpoint on its way out": ".trash-deadbeef-step-000000009",
    "a checkpoint that was replaced": ".aside-deadbeef-step-000000001",
    "a draft of a claim": ".ckpt-suite/.writer.json.deadbeef.tmp",
    "a draft of pins": ".ckpt-suite/.pins.json.deadbeef.tmp",
    "a probe": ".probe-deadbeef",
}
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def leave(storage, name):
    """Put something of that name into the root, as a crash or a neighbour would."""
    if "step-" in name:
        write_files(storage, name)
    else:
        storage.write_bytes(name, b"{}")
    return storage.local_path(name)


def give_away(path):
    for each in (path, *path.rglob("*")):
        os.chown(each, NOBODY, NOBODY)


@as_root
@pytest.mark.parametrize("what", list(LEFT))
def test_what_another_user_left_is_not_touched_and_told_once(tmp_path, caplog, what):
    storage = LocalStorage(tmp_path)
    save(storage, 1)
    path = leave(storage, LEFT[what])
    give_away(path)
    before = sorted((each, each.lstat().st_mtime_ns) for each in (path, *path.rglob("*")))
    with caplog.at_level(logging.WARNING):
        assert collect_orphans(storage, keep=()) == []
        assert collect_orphans(storage, keep=()) == []
    assert sorted((each, each.lstat().st_mtime_ns) for each in (path, *path.rglob("*"))) == before
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert f"{path} was left by a crash, or looks so, and belongs to user id {NOBODY}" in told[0]


@as_root
def test_what_another_user_left_does_not_keep_own_leftovers_there(tmp_path):
    storage = LocalStorage(tmp_path)
    give_away(leave(storage, LEFT["a torn save"]))
    own = leave(storage, ".incomplete-deadbee1-step-000000009")
    assert collect_orphans(storage, keep=()) == [own.name]


@as_root
def test_a_replacement_that_another_user_could_not_finish_is_undone(tmp_path):
    """A checkpoint is not lost to all others of a shared root because the job was somebody else's."""
    storage = LocalStorage(tmp_path)
    save(storage, 1)
    (tmp_path / "step-000000001").rename(tmp_path / ".aside-deadbeef-step-000000001")
    give_away(tmp_path / ".aside-deadbeef-step-000000001")
    collect_orphans(storage, keep=())
    assert [info.step for info in Catalog(storage).committed()] == [1]


def test_own_leftovers_go_where_the_filesystem_gives_all_files_to_one_user(tmp_path, monkeypatch):
    """As NFS gives those of root to nobody, and FUSE all of them to who mounted it."""
    storage = LocalStorage(tmp_path)
    path = leave(storage, LEFT["a torn save"])
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert collect_orphans(storage, keep=()) == [path.name]


@as_root
def test_a_leftover_that_is_a_link_is_judged_by_who_made_the_link(tmp_path):
    storage = LocalStorage(tmp_path / "root")
    storage.check_root()
    (tmp_path / "precious").mkdir()
    (tmp_path / "root" / ".ckpt-suite").mkdir()
    link = tmp_path / "root" / ".ckpt-suite/.writer.json.deadbeef.tmp"
    link.symlink_to(tmp_path / "precious")
    os.chown(link, NOBODY, NOBODY, follow_symlinks=False)
    assert storage.other_owner(f".ckpt-suite/{link.name}") == f"user id {NOBODY}"
    os.chown(link, 0, 0, follow_symlinks=False)
    assert storage.other_owner(f".ckpt-suite/{link.name}") is None
