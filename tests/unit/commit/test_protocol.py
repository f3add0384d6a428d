from __future__ import annotations

import contextlib
import dataclasses

import pytest

from ckpt_core.commit import Catalog, abandon, begin, collect_orphans, commit, remove, verify
from ckpt_core.errors import CheckpointExistsError, ConfigError, SaveError
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.support.emulators import forget_memory
from tests.unit.commit.checkpoints import FILES, bucket_like, manifest_of, posix_like, save, write_files


class Crash(BaseException):
    """The process ends here: nothing after it runs but what a kernel or a store would do."""


def crash(_operation):
    raise Crash


@pytest.fixture(params=["posix", pytest.param("local", marks=pytest.mark.slow), "bucket"])
def new_storage(request, tmp_path):
    """Makes an empty storage whenever called."""
    folders = iter(range(1000))
    kinds = {
        "posix": posix_like,
        "bucket": bucket_like,
        "local": lambda: LocalStorage(tmp_path / str(next(folders))),
    }
    return kinds[request.param]


def steps(storage):
    return [info.step for info in Catalog(storage).committed()]


def assert_all_whole(storage):
    assert {info.name: verify(storage, info.name) for info in Catalog(storage).committed()} == {
        info.name: [] for info in Catalog(storage).committed()
    }


def crash_points(new_storage, prepare, act):
    """Storages on which `act` crashed before and after each of its operations in turn."""
    rehearsal = FaultyStorage(prepare(new_storage()))
    act(rehearsal)
    for nth in range(len(rehearsal.operations)):
        forget_memory()
        storage = prepare(new_storage())
        with pytest.raises(Crash):
            act(FaultyStorage(storage, [Fault(nth=nth, error=Crash())]))
        yield storage
        storage = prepare(new_storage())
        # An operation that finds nothing, such as a look for a marker, has no "after".
        with contextlib.suppress(Crash):
            act(FaultyStorage(storage, [Fault(nth=nth, after=crash)]))
        yield storage


def with_steps(*committed):
    def prepare(storage):
        for step in committed:
            save(storage, step)
        return storage

    return prepare


def test_a_commit_makes_the_checkpoint_and_leaves_nothing_else(new_storage):
    storage = new_storage()
    info = save(storage, 1000)
    assert info == Catalog(storage).find(step=1000)
    assert info.name == "step-000001000"
    assert info.size_bytes == sum(map(len, FILES.values()))
    assert Catalog(storage).manifest(info.name) == manifest_of(1000)
    assert [entry.name for entry in storage.list("")] == [info.name]
    assert verify(storage, info.name) == []


def test_a_crash_at_any_point_of_a_save_leaves_the_old_set_or_the_new_one(new_storage):
    seen = set()
    for storage in crash_points(new_storage, with_steps(1), lambda storage: save(storage, 2)):
        seen.add(tuple(steps(storage)))
        assert_all_whole(storage)
    assert seen == {(1,), (1, 2)}


def test_after_a_crash_at_any_point_the_step_can_be_saved_again(new_storage):
    for storage in crash_points(new_storage, with_steps(1), lambda storage: save(storage, 2)):
        if steps(storage) == [1]:
            working = begin(storage, "step-000000002", "feedface")
            write_files(storage, working)
            commit(storage, working, "step-000000002", manifest_of(2))
        assert steps(storage) == [1, 2]
        assert_all_whole(storage)
        collect_orphans(storage, keep=())
        assert [entry.name for entry in storage.list("")] == ["step-000000001", "step-000000002"]


def test_a_crash_at_any_point_of_a_prune_leaves_the_old_set_or_the_new_one(new_storage):
    seen = set()

    def prune(storage):
        remove(storage, Catalog(storage).find(step=1))

    for storage in crash_points(new_storage, with_steps(1, 2), prune):
        seen.add(tuple(steps(storage)))
        assert_all_whole(storage)
        collect_orphans(storage, keep=())
        assert len(storage.list("")) == len(steps(storage))
    assert seen == {(1, 2), (2,)}


def test_a_deletion_cut_short_is_no_checkpoint(new_storage):
    storage = with_steps(1, 2)(new_storage())
    bulk_delete = Fault(method="delete", nth=0 if storage.supports_rename else 1, error=Crash())
    with pytest.raises(Crash):
        remove(FaultyStorage(storage, [bulk_delete]), Catalog(storage).find(step=1))
    for name in Catalog(storage).torn():
        storage.delete(f"{name}/__0_0.distcp")
        assert verify(storage, name)
    assert steps(storage) == [2]
    assert_all_whole(storage)


def test_a_crash_while_collecting_orphans_loses_nothing(new_storage):
    def prepare(storage):
        save(storage, 1)
        write_files(storage, begin(storage, "step-000000002", "0000dead"))
        return storage

    for storage in crash_points(new_storage, prepare, lambda storage: collect_orphans(storage, keep=())):
        assert steps(storage) == [1]
        assert_all_whole(storage)


def test_the_marker_is_written_last_and_everything_is_synced_around_the_rename():
    storage = FaultyStorage(posix_like())
    save(storage, 7)
    durable = ("close", "sync_directory", "rename")
    order = [(o.method, o.key) for o in storage.operations if o.method in durable]
    working = ".incomplete-00000007-step-000000007~"
    assert order[-6:] == [
        ("close", f"{working}/manifest.json"),
        ("close", f"{working}/COMMITTED"),
        ("sync_directory", working),
        ("sync_directory", f"{working}/model"),
        ("rename", f"{working} -> step-000000007"),
        ("sync_directory", ""),
    ]


def test_on_an_object_store_the_marker_is_the_last_object():
    storage = FaultyStorage(bucket_like())
    save(storage, 7)
    assert [o.key for o in storage.operations if o.method == "close"][-2:] == [
        "step-000000007/manifest.json",
        "step-000000007/COMMITTED",
    ]


def test_a_committed_step_is_never_written_again(new_storage):
    storage = with_steps(5)(new_storage())
    with pytest.raises(CheckpointExistsError, match=r"step-000000005 is committed already"):
        begin(storage, "step-000000005", "abcdef01")
    assert_all_whole(storage)
    assert Catalog(storage).torn() == []


def test_of_two_saves_of_one_step_the_first_to_commit_wins():
    storage = posix_like()
    mine, theirs = (begin(storage, "step-000000005", save_id) for save_id in ("aaaaaaaa", "bbbbbbbb"))
    for working in (mine, theirs):
        write_files(storage, working)
    commit(storage, mine, "step-000000005", manifest_of(5))
    with pytest.raises(CheckpointExistsError, match="committed already"):
        commit(storage, theirs, "step-000000005", manifest_of(5))
    assert_all_whole(storage)
    assert steps(storage) == [5]


def test_a_save_id_belongs_to_one_save():
    storage = posix_like()
    begin(storage, "step-000000005", "abcdef01")
    with pytest.raises(CheckpointExistsError, match="abcdef01"):
        begin(storage, "step-000000005", "abcdef01")


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "a/b",
        ".incomplete-12345678-a",
        ".trash-12345678-a",
        ".replaced-12345678-a",
        ".metadata",
        ".ckpt-suite/.pins.json.0123abcd.tmp",
        "COMMITTED",
        ".ckpt-suite/pins.json.lock",
        "a\nb",
        "x" * 201,
    ],
)
def test_names_that_would_not_be_listed_are_refused(new_storage, name):
    with pytest.raises(ConfigError, match="name of a checkpoint"):
        begin(new_storage(), name, "abcdef01")


def test_a_save_id_that_would_not_be_recognised_is_refused():
    with pytest.raises(ConfigError, match="hex"):
        begin(posix_like(), "step-000000005", "My-Id")


def test_a_file_lost_or_cut_short_by_the_storage_is_found_before_the_marker(new_storage):
    for damage in ({"__0_0.distcp": b"short"}, {"model/__0_0.distcp": None}):
        storage = new_storage()
        working = begin(storage, "step-000000005", "abcdef01")
        files = {path: content for path, content in (FILES | damage).items() if content is not None}
        write_files(storage, working, files)
        with pytest.raises(SaveError, match=f"{next(iter(damage))} has ") as caught:
            commit(storage, working, "step-000000005", manifest_of(5))
        assert (caught.value.step, caught.value.phase) == (5, "commit")
        assert steps(storage) == []


def test_a_manifest_that_could_not_be_read_back_is_not_committed(new_storage):
    storage = new_storage()
    working = begin(storage, "step-000000005", "abcdef01")
    write_files(storage, working)
    with pytest.raises(SaveError, match="world_size"):
        commit(storage, working, "step-000000005", dataclasses.replace(manifest_of(5), world_size=0))
    assert steps(storage) == []


def test_abandoning_removes_the_torn_directory_only(new_storage):
    storage = with_steps(1)(new_storage())
    working = begin(storage, "step-000000002", "abcdef01")
    write_files(storage, working)
    abandon(storage, working)
    assert [entry.name for entry in storage.list("")] == ["step-000000001"]


def test_abandoning_never_removes_what_is_committed(new_storage):
    storage = with_steps(1)(new_storage())
    abandon(storage, "step-000000001")
    assert steps(storage) == [1]


def test_a_failure_to_abandon_is_only_logged(new_storage, caplog):
    storage = new_storage()
    working = begin(storage, "step-000000002", "abcdef01")
    write_files(storage, working)
    abandon(FaultyStorage(storage, [Fault(method="delete", error=OSError("read-only"))]), working)
    assert "read-only" in caplog.text


def test_a_failed_sync_after_the_rename_is_reported_and_the_checkpoint_is_whole():
    storage = posix_like()
    faulty = FaultyStorage(storage, [Fault(method="sync_directory", key="", error=OSError("EIO"))])
    with pytest.raises(SaveError, match=r"step 1 is complete.*could not be made durable.*EIO") as caught:
        save(faulty, 1)
    assert caught.value.in_doubt
    assert steps(storage) == [1]
    assert_all_whole(storage)
