"""A save that does not fit is refused with figures before a byte is written, or room is made safely."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core import (
    CheckpointManager,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLatest,
    KeepWeights,
    KeepWithin,
    NoRoomError,
    SaveError,
)
from ckpt_core.commit import Catalog, verify
from ckpt_core.retention import plan_prune
from ckpt_core.saving._disk_space import droppable
from ckpt_core.storage import LocalStorage
from ckpt_core.telemetry import InMemorySink
from ckpt_core.testing import FaultyStorage
from ckpt_core.types import CheckpointInfo
from tests.kit.memory import MemoryStorage
from tests.kit.ranks import run_ranks

pytestmark = pytest.mark.reliability

SIZE = 600_000
CHANGES = {"create", "write", "replace", "make_directory", "rename", "delete"}


def state_of(step, size_bytes=SIZE):
    return {"x": torch.full((size_bytes // 4,), float(step))}


def steps(storage):
    infos = Catalog(storage).committed()
    assert all(verify(storage, info.name) == [] for info in infos if info.damaged is None)
    return [info.step for info in infos]


def saved(checkpoints, *numbers):
    for number in numbers:
        checkpoints.save(number, state_of(number)).result()
        checkpoints.wait()


def refused(checkpoints, step, size_bytes=SIZE, **options):
    """Why this save was refused; told to whoever holds the handle, and by the next call."""
    handle = checkpoints.save(step, state_of(step, size_bytes), **options)
    with pytest.raises(NoRoomError) as told:
        checkpoints.wait()
    with pytest.raises(NoRoomError) as caught:
        handle.result()
    assert told.value is caught.value
    return caught.value


def used(storage):
    return storage.capacity_bytes - storage.space().free_bytes


@pytest.fixture
def disk():
    """Space for many saves, without a headroom. A journal would take of it at any moment."""
    return MemoryStorage("disk", capacity_bytes=100 * SIZE, capacity_files=10_000)


def changes(storage, since=0):
    return [f"{o.method} {o.key}" for o in storage.operations[since:] if o.method in CHANGES]


def test_a_save_that_cannot_fit_is_refused_with_figures_before_a_byte_is_written(disk):
    storage = FaultyStorage(disk)
    with CheckpointManager(storage, journal=False, headroom=1000) as checkpoints:
        saved(checkpoints, 1)
        disk.capacity_bytes = used(disk) + SIZE // 2
        before = len(storage.operations)
        error = refused(checkpoints, 2)
        assert changes(storage, before) == []
        disk.capacity_bytes *= 10
        saved(checkpoints, 3)
    assert (error.step, error.phase, error.headroom_bytes) == (2, "open", 1000)
    assert error.needed_bytes >= SIZE > error.free_bytes == SIZE // 2
    told = str(error)
    for part in ("disk", "takes 6", "293.0 KiB", "1000 B are headroom", "Nothing was written", "step 1,"):
        assert part in told
    assert steps(disk) == [1, 3]


def test_a_refused_save_stops_nothing_if_errors_are_only_reported(disk, caplog):
    with CheckpointManager(disk, journal=False, headroom=0, on_error="warn") as checkpoints:
        saved(checkpoints, 1)
        disk.capacity_bytes = used(disk)
        checkpoints.save(2, state_of(2))
        checkpoints.wait()
    assert "training continues without the checkpoint of step 2" in caplog.text
    assert steps(disk) == [1]


@pytest.mark.parametrize(("headroom", "fits"), [(0, True), (SIZE, False), ("1 %", True), ("99 %", False)])
def test_saves_leave_the_headroom_free(disk, headroom, fits):
    disk.capacity_bytes = 2 * SIZE
    with CheckpointManager(disk, journal=False, headroom=headroom, on_error="warn") as checkpoints:
        checkpoints.save(1, state_of(1))
    assert steps(disk) == ([1] if fits else [])


def test_files_are_counted_as_bytes_are(disk):
    with CheckpointManager(disk, journal=False, headroom=0) as checkpoints:
        saved(checkpoints, 1)
        free = disk.space().free_files
        disk.capacity_files -= free - 5
        error = refused(checkpoints, 2)
        disk.capacity_files += error.needed_files - 5
        saved(checkpoints, 3)
    assert error.free_files == 5 < error.needed_files
    assert "and 5 files" in str(error)
    assert steps(disk) == [1, 3]


def tight(disk, room_for, *, keep, numbers=(1, 2), **options):
    """A manager whose disk, after these steps, has room for so many saves, and the storage that logs."""
    storage = FaultyStorage(disk)
    checkpoints = CheckpointManager(storage, journal=False, headroom=0, keep=keep, **options)
    saved(checkpoints, *numbers)
    size_bytes = used(disk) / len(Catalog(disk).committed())
    disk.capacity_bytes = int(used(disk) + room_for * size_bytes)
    return checkpoints, storage


def test_room_is_made_by_what_the_policy_would_drop_anyway_oldest_first(disk):
    checkpoints, storage = tight(disk, 0.5, keep=KeepLatest(2))
    with checkpoints:
        before = len(storage.operations)
        saved(checkpoints, 3)
        done = changes(storage, before)
        saved(checkpoints, 4, 5)
    gone = next(place for place, each in enumerate(done) if ".trash-" in each and "step-000000001" in each)
    begun = next(
        place for place, each in enumerate(done) if ".incomplete-" in each and "step-000000003" in each
    )
    assert gone < begun
    assert steps(disk) == [4, 5]


def test_no_more_is_removed_ahead_than_is_needed(disk):
    """A policy that a person has just made stricter would drop three; one is enough."""
    checkpoints, _ = tight(disk, 0.5, keep=None, numbers=(1, 2, 3, 4))
    checkpoints.close()
    sink = InMemorySink()
    with CheckpointManager(disk, journal=False, headroom=0, keep=KeepLatest(2), sinks=[sink]) as checkpoints:
        checkpoints.continue_from()
        saved(checkpoints, 5)
    removed = [
        (event.attributes["step"], event.attributes.get("reason")) for event in sink.finished("prune.remove")
    ]
    assert removed == [(1, "room"), (2, None), (3, None)]
    assert steps(disk) == [4, 5]


@pytest.mark.parametrize("keep", [KeepLatest(1), KeepEvery(100), KeepBest("loss")])
def test_room_is_never_made_below_one_committed_checkpoint(disk, keep):
    checkpoints, _ = tight(disk, 0.5, keep=keep, numbers=(1,), on_error="warn")
    with checkpoints:
        checkpoints.save(2, state_of(2))
        checkpoints.wait()
        assert steps(disk) == [1]


def test_what_was_committed_last_stays_although_an_older_run_came_further(disk):
    """Training went back from step 100 to 10: what it can go on from is step 10."""
    checkpoints, _ = tight(disk, 0.5, keep=KeepLatest(1), numbers=(100, 10), on_error="warn")
    with checkpoints:
        checkpoints.save(20, state_of(20))
        checkpoints.wait()
    assert steps(disk) == [10, 100]


def test_nothing_is_removed_that_would_not_make_it_fit(disk):
    checkpoints, _ = tight(disk, 0.1, keep=KeepLatest(2))
    with checkpoints:
        error = refused(checkpoints, 3, 3 * SIZE)
    assert re.search(r"Kept: step 1, .*KeepLatest.*step 2, ", str(error))
    assert steps(disk) == [1, 2]


def test_pinned_and_damaged_checkpoints_are_never_removed_for_room(disk):
    checkpoints, _ = tight(disk, 2.5, keep=KeepLatest(2), numbers=(1, 2))
    catalog = Catalog(disk)
    catalog.pin(1, "paper")
    saved(checkpoints, 3)
    catalog.mark_damaged("step-000000002", "a bit")
    saved(checkpoints, 4)
    disk.capacity_bytes = used(disk) + SIZE // 2
    saved(checkpoints, 5)  # for which step 3 went
    with checkpoints:
        disk.capacity_bytes = used(disk) + SIZE // 2
        catalog.pin(4, "demo")
        error = refused(checkpoints, 6)
    assert re.search(r"pinned: paper.*pinned: demo.*step 2, .*marked as damaged", str(error))
    assert steps(disk) == [1, 2, 4, 5]


def test_room_is_only_made_if_what_stays_verifies(disk):
    checkpoints, _ = tight(disk, 0.5, keep=KeepLatest(2), on_error="warn")
    data = "step-000000002/__0_0.distcp"
    content = bytearray(disk.read_bytes(data))
    content[len(content) // 2] ^= 1
    disk.replace(data, bytes(content))
    with checkpoints:
        checkpoints.save(3, state_of(3))
        checkpoints.wait()
    assert {info.step: bool(info.damaged) for info in Catalog(disk).committed()} == {1: False, 2: True}


def test_without_a_policy_nothing_is_ever_removed(disk):
    checkpoints, _ = tight(disk, 0.5, keep=None)
    with checkpoints:
        refused(checkpoints, 3)
    assert steps(disk) == [1, 2]


def test_what_crashes_left_goes_before_any_checkpoint(disk):
    checkpoints, _ = tight(disk, 1.5, keep=KeepLatest(2))
    disk.write_bytes(".trash-0123abcd-step-000000009/__0_0.distcp", bytes(SIZE))
    sink = InMemorySink()
    with checkpoints:
        checkpoints._pruner._telemetry._sinks = (sink,)
        saved(checkpoints, 3)
    assert [event.attributes.get("reason") for event in sink.finished("prune.remove")] == [None]
    assert steps(disk) == [2, 3]


def test_a_checkpoint_to_be_replaced_stays_until_the_new_one_is_whole(disk):
    with CheckpointManager(disk, journal=False, headroom=0, keep=KeepLatest(1)) as checkpoints:
        checkpoints.save(1, state_of(1), name="last").result()
        checkpoints.wait()
        disk.capacity_bytes = used(disk) + SIZE // 2
        refused(checkpoints, 2, name="last")
        assert Catalog(disk).find(name="last").step == 1
        disk.capacity_bytes += SIZE
        checkpoints.save(3, state_of(3), name="last").result()
    assert steps(disk) == [3]


def small_disk(folder, options):
    """A real filesystem of a few MiB; skips where none may be mounted."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no filesystem can be mounted here: {done.stderr.strip()}")
    return folder


@pytest.fixture
def mounted(tmp_path):
    folders = []

    def mount(options):
        folders.append(small_disk(tmp_path / f"disk{len(folders)}", options))
        return folders[-1]

    yield mount
    for folder in folders:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(checkpoints, size_bytes):
    """Save until there is no room any more; the error that ended it, and how many were saved."""
    number = 0
    while True:
        number += 1
        try:
            checkpoints.save(number, state_of(number, size_bytes)).result()
            checkpoints.wait()
        except SaveError as error:
            return error, number - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "size_bytes", "least"),
    [("size=4m", 300_000, 8), ("size=4m", 4, 20), ("size=64m,nr_inodes=60", 40_000, 4)],
)
def test_a_save_that_is_let_through_fits_on_a_real_filesystem(mounted, options, size_bytes, least):
    root = mounted(options)
    with CheckpointManager(root, headroom=0) as checkpoints:
        error, saves = fill(checkpoints, size_bytes)
        assert type(error) is NoRoomError, f"the disk ran full: {error}"
        checkpoints.wait()
    assert saves >= least
    assert len(steps(LocalStorage(root))) == saves
    assert not list(root.glob(".incomplete-*"))


def test_on_a_full_filesystem_saves_succeed_once_there_is_room_again(mounted):
    root = mounted("size=4m")
    ballast = root / "ballast"
    with CheckpointManager(root, headroom="1 %", keep=KeepLatest(1)) as checkpoints:
        saved(checkpoints, 1)
        ballast.write_bytes(bytes(LocalStorage(root).space().free_bytes))
        refused(checkpoints, 2)
        ballast.unlink()
        saved(checkpoints, 3)
    assert steps(LocalStorage(root)) == [3]


def refused_by_headroom(root):
    with CheckpointManager(root, headroom="1000000 TiB", on_error="warn") as checkpoints:
        handle = checkpoints.save(1, state_of(1))
        try:
            handle.result()
        except NoRoomError as error:
            return str(error), error.needed_bytes
    return None


@pytest.mark.slow
@pytest.mark.distributed
def test_every_rank_is_told_the_same_figures(tmp_path):
    first, second = run_ranks(refused_by_headroom, 2, str(tmp_path))
    assert first == second
    assert "headroom" in first[0]
    assert first[1] > SIZE
    assert not list(tmp_path.glob("*step-*"))


@st.composite
def histories(draw):
    count = draw(st.integers(0, 8))
    numbers = draw(st.lists(st.integers(0, 50), min_size=count, max_size=count, unique=True))
    return [
        CheckpointInfo(
            step=step,
            name=f"step-{step:09d}",
            created=draw(st.floats(0, 1000)),
            size_bytes=10,
            metrics={"loss": draw(st.floats(0, 1))},
            pinned=draw(st.sampled_from([None, None, "why"])),
            damaged=draw(st.sampled_from([None, None, "a bit"])),
        )
        for step in numbers
    ]


POLICIES = [
    KeepLatest(1),
    KeepLatest(3),
    KeepEvery(10),
    KeepBest("loss"),
    KeepLatest(2) | KeepEvery(7),
    KeepAll(),
]


@given(history=histories(), policy=st.sampled_from(POLICIES), step=st.integers(0, 60))
def test_what_may_go_ahead_of_a_commit_is_what_the_policy_drops_and_never_what_a_resume_needs(
    history, policy, step
):
    coming = CheckpointInfo(step=step, name=f"step-{step:09d}", created=2000.0)
    gone = {info.step for info in droppable(policy, history, coming, 2000.0)}
    sound = [info for info in history if info.damaged is None]
    others = [info for info in history if info.name != coming.name]
    assert gone <= {info.step for info in plan_prune(policy, [*others, coming], 2000.0).drop}
    assert not gone & {info.step for info in history if info.pinned or info.damaged}
    if sound:
        newest = max(sound, key=lambda info: info.step)
        last = max(sound, key=lambda info: (info.created, info.step))
        assert not gone & {newest.step, last.step, step}


def test_what_stays_as_weights_does_not_go_ahead_of_a_commit_for_what_it_takes_now():
    history = [
        CheckpointInfo(
            step=step, name=f"step-{step:09d}", created=float(step), size_bytes=100, save_id=str(step)
        )
        for step in range(1, 5)
    ]
    coming = CheckpointInfo(step=5, name="step-000000005", created=5.0)
    policy = (KeepLatest(1) | KeepWeights(KeepEvery(1))) & KeepWithin(150)
    assert [info.step for info in droppable(policy, history, coming, 5.0)] == [1, 2, 3]
    assert droppable(policy, history, coming, 5.0, sizes=lambda info, dtype: 30) == []
