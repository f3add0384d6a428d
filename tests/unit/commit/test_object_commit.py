"""Commits where nothing can be renamed: late markers, lost answers, lagging listings, replaced jobs."""

from __future__ import annotations

import errno

import pytest

from ckpt_core.commit import Catalog, Inventory, abandon, begin, collect_orphans, commit, verify
from ckpt_core.errors import RootBusyError, SaveError
from ckpt_core.testing import Fault, FaultyStorage
from tests.unit.commit.checkpoints import bucket_like, manifest_of, posix_like, save, write_files

pytestmark = pytest.mark.reliability

NAME = "step-000000002"
MARKER = f"{NAME}/COMMITTED"


def replaced():
    raise RootBusyError("taken over")


def uploaded(storage):
    begin(storage, NAME, "00000002")
    write_files(storage, NAME)
    return storage


def test_a_marker_of_which_nothing_was_told_keeps_its_objects_so_that_it_is_true_whenever_it_shows():
    storage = uploaded(bucket_like())
    silent = FaultyStorage(
        storage, [Fault(method="create", key=MARKER, error=TimeoutError(errno.ETIMEDOUT, "no answer"))]
    )
    with pytest.raises(SaveError, match=r"step 2 may or may not be committed .*no answer") as caught:
        commit(silent, NAME, NAME, manifest_of(2))
    assert caught.value.in_doubt
    late = bucket_like()
    save(late, 2)
    storage.write_bytes(MARKER, late.read_bytes(MARKER))
    assert verify(storage, NAME) == []


def test_a_marker_that_was_refused_is_no_riddle():
    storage = uploaded(bucket_like())
    refused = FaultyStorage(storage, [Fault(method="create", key=MARKER, error=PermissionError("no"))])
    with pytest.raises(PermissionError):
        commit(refused, NAME, NAME, manifest_of(2))


def test_a_job_that_was_replaced_before_its_marker_does_not_write_it():
    storage = uploaded(bucket_like())
    with pytest.raises(RootBusyError):
        commit(storage, NAME, NAME, manifest_of(2), check=replaced)
    assert not storage.exists(MARKER)


def cleared_before_marker(storage):
    """Another job takes the root at the last moment, and clears away what has no marker."""
    taken = []

    def take(_operation):
        taken.append(True)
        collect_orphans(storage, keep=())

    def check():
        if taken:
            replaced()

    return FaultyStorage(storage, [Fault(method="create", key=MARKER, before=take)]), check


def test_a_marker_that_came_after_its_objects_were_cleared_away_is_taken_back():
    storage = uploaded(bucket_like())
    raced, check = cleared_before_marker(storage)
    with pytest.raises(RootBusyError):
        commit(raced, NAME, NAME, manifest_of(2), check=check)
    assert Catalog(storage).committed() == []


def test_a_checkpoint_that_was_whole_when_the_root_was_taken_stays_for_the_other_job():
    storage = uploaded(bucket_like())
    asked = []

    def check():
        asked.append(True)
        if len(asked) == 2:
            replaced()

    with pytest.raises(RootBusyError):
        commit(storage, NAME, NAME, manifest_of(2), check=check)
    assert [info.step for info in Catalog(storage).committed()] == [2]
    assert verify(storage, NAME) == []


def test_the_root_is_asked_for_only_where_nothing_else_keeps_jobs_apart():
    storage = posix_like()
    working = begin(storage, NAME, "00000002")
    write_files(storage, working)
    commit(storage, working, NAME, manifest_of(2), check=replaced)


def test_what_a_listing_does_not_show_yet_is_asked_for_by_name():
    lagging = uploaded(bucket_like())
    lagging.list = lambda key, real=lagging.list: [e for e in real(key) if e.name != "__0_0.distcp"]
    commit(lagging, NAME, NAME, manifest_of(2))
    assert verify(lagging, NAME) == []


def test_a_committed_checkpoint_is_no_orphan_although_no_listing_shows_its_marker():
    lagging = bucket_like()
    save(lagging, 2)
    lagging.list = lambda key, real=lagging.list: [e for e in real(key) if e.name != "COMMITTED"]
    assert collect_orphans(lagging, keep=()) == []
    assert verify(lagging, NAME) == []


def test_a_marker_without_its_objects_does_not_count_for_retention():
    storage = bucket_like()
    save(storage, 1)
    save(storage, 2)
    marker = storage.read_bytes(MARKER)
    storage.delete(NAME)
    storage.write_bytes(MARKER, marker)
    assert [(info.step, info.damaged is None) for info in Inventory(storage).history()] == [
        (1, True),
        (2, False),
    ]


def test_abandoning_leaves_what_is_committed():
    storage = bucket_like()
    save(storage, 2)
    abandon(storage, NAME)
    assert verify(storage, NAME) == []


OWN = [
    "__0_0.distcp",
    "__1_0.distcp.replica",
    "chunks-00000.json.z",
    "chunks-00001.json.z.replica",
    "local-00001.json",
    "manifest.json",
    "manifest.json.replica",
    "manifest.json.sig",
    "rank-00000.json",
    "rank-00000.json.replica",
    "shared-00001.json",
    "shared.json",
    "shared.json.replica",
]


@pytest.mark.parametrize("first", range(len(OWN)))
@pytest.mark.parametrize("theirs", [False, True])
def test_whatever_an_interrupted_deletion_has_left_is_removed_and_nothing_else(first, theirs):
    storage = bucket_like()
    save(storage, 1)
    for path in OWN[first:]:
        storage.write_bytes(f"{NAME}/{path}", b"{}")
    if theirs:
        storage.write_bytes(f"{NAME}/notes.txt", b"mine")
    assert Catalog(storage).torn() == [NAME]
    assert collect_orphans(storage, keep=()) == [NAME]
    assert [each.name for each in storage.list(NAME)] == ["notes.txt"] * theirs
    assert Catalog(storage).torn() == []
    assert verify(storage, "step-000000001") == []


def test_what_others_put_under_a_steps_name_is_not_removed():
    storage = bucket_like()
    theirs = (
        f"{NAME}/model.safetensors",
        f"{NAME}/hf/shared.json",
        "step-000000003/.metadata",
        "notes/shared.json",
    )
    for key in theirs:
        storage.write_bytes(key, b"theirs")
    assert collect_orphans(storage, keep=()) == []
    assert all(map(storage.exists, theirs))
