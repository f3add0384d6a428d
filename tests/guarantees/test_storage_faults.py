"""Whatever storage does to a save: it is told, nothing committed is touched, and saves go on after it.

A sample; `python -m tests.reliability --only faults` tries every system call with every error.
"""

from __future__ import annotations

import errno
import shutil
import subprocess
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch

from ckpt_core import CheckpointManager, KeepLatest
from ckpt_core.errors import CheckpointError, ConfigError, RootBusyError, SaveError
from ckpt_core.names import WRITER
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.own_files import beside_own
from tests.reliability.ranks.storage_faults import cases
from tests.reliability.sampling import sample
from tests.support.system_calls import SystemCalls

pytestmark = pytest.mark.reliability

MEBIBYTE = 1 << 20
LONG = 30.0

# place: system call, error, who of how many; one or more of every place and of every kind of error
SAMPLE = [
    "take the root: create EROFS, the coordinator of 2",
    "open: mkdir ENOSPC, the coordinator of 2",
    "data: write EDQUOT, one worker of 2",
    "data: write at most 1000 bytes a write, all of 2",
    "data: write hangs, one worker of 2",
    "data: fsync EIO, the coordinator of 2",
    "data: fsync hangs, the coordinator of 1",
    "rank's small files: create EROFS, all of 2",
    "rank's directory: fsync EIO, one worker of 2",
    ".metadata: write ENOSPC, the coordinator of 2",
    "manifest: write at most 1 bytes a write, the coordinator of 1",
    "marker: fsync EIO, the coordinator of 2",
    "rename: rename hangs, the coordinator of 2",
    "rename: rename EIO, the coordinator of 1",
    "root after the rename: fsync EIO, the coordinator of 2",
    "prune: unlink EIO, the coordinator of 2",
    "prune: unlink hangs, the coordinator of 1",
    "load: look: list ESTALE, the coordinator of 2",
    "load: small files: open ESTALE, all of 2",
    "load: data: read EIO, one worker of 2",
]


def state_of(step: int, size_bytes: int = 4096) -> dict[str, torch.Tensor]:
    return {"w": torch.full((size_bytes // 4,), float(step))}


def manager(root: object, **options: object) -> CheckpointManager:
    return CheckpointManager(root, keep=KeepLatest(2), **{"deadline_seconds": LONG, **options})


def saved(checkpoints: CheckpointManager, step: int, size_bytes: int = 4096) -> int:
    handle = checkpoints.save(step, state_of(step, size_bytes))
    assert handle is not None
    return handle.result().step


def refused(checkpoints: CheckpointManager, step: int, size_bytes: int = 4096) -> CheckpointError:
    """The error of a save that fails."""
    with pytest.raises(CheckpointError) as caught:
        saved(checkpoints, step, size_bytes)
    checkpoints.wait()  # it was received, and is not raised again
    return caught.value


def assert_whole(checkpoints: CheckpointManager, step: int) -> None:
    state = state_of(0)
    assert checkpoints.verify(step) == []
    checkpoints.load(state, step=step)
    assert torch.equal(state["w"], state_of(step)["w"])


@pytest.mark.slow
def test_whatever_system_call_fails_the_error_is_the_documented_one_and_nothing_is_lost(tmp_path):
    assert len(sample(tmp_path, "faults", cases=SAMPLE)) == len(SAMPLE)


def test_every_place_of_a_save_and_of_a_load_is_tried_on_one_rank_and_on_all():
    every = list(cases())
    assert set(SAMPLE) - set(map(str, every)) == set()
    assert len(set(map(str, every))) == len(every) >= 250
    assert {case.who for case in every if case.place == "data"} == {"one worker", "the coordinator", "all"}
    errors = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE}
    assert {case.number for case in every if case.number} == errors


@pytest.fixture
def small_disk(tmp_path: Path) -> Generator[Callable[[str], None]]:
    """Mounts a filesystem of its own on `tmp_path/disk`, with the options that it is called with."""
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip(f"cannot mount a filesystem here: {done.stderr.decode().strip()}")

    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=False)


@pytest.mark.parametrize(
    ("options", "size_bytes"),
    [
        pytest.param("size=2m", 3 * MEBIBYTE, id="no space"),
        pytest.param("size=64m,nr_inodes=48", 4096, id="no inodes"),
    ],
)
def test_a_disk_that_is_really_full_costs_only_the_save_that_does_not_fit(
    tmp_path, small_disk, options, size_bytes
):
    small_disk(options)
    root, ballast = tmp_path / "disk" / "run", tmp_path / "disk" / "ballast"
    ballast.mkdir()
    with manager(root) as checkpoints:
        saved(checkpoints, 1)
        files = 0
        if size_bytes == 4096:
            while True:
                try:
                    (ballast / str(files)).touch()
                except OSError:
                    break
                files += 1
        error = refused(checkpoints, 2, size_bytes)
        assert isinstance(error, SaveError)
        assert (error.step, list(error.failures) or [0]) == (2, [0])
        assert [info.step for info in checkpoints.checkpoints()] == [1]
        assert_whole(checkpoints, 1)
        shutil.rmtree(ballast)
        assert saved(checkpoints, 3) == 3
        assert_whole(checkpoints, 3)
    assert beside_own(root) - {WRITER} == {"step-000000001", "step-000000003"}


def test_a_disk_that_was_mounted_read_only_is_told_before_anything_is_done(tmp_path, small_disk):
    # While a job holds its lock no filesystem can be made read-only by hand; what the kernel does of itself
    # then, EROFS on every call, is among the cases of the sample.
    small_disk("size=16m")
    disk, state = tmp_path / "disk", state_of(0)

    def remount(mode: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{mode}", str(disk)], check=True, capture_output=True)

    with manager(disk / "run") as checkpoints:
        saved(checkpoints, 1)
    remount("ro")
    with manager(disk / "run") as checkpoints:
        with pytest.raises(ConfigError, match=rf"cannot be written to {disk}/run.*Read-only file system"):
            checkpoints.resume(state)
        with pytest.raises(ConfigError, match=r"Read-only file system"):
            checkpoints.save(2, state_of(2))
        assert_whole(checkpoints, 1)
        remount("rw")
        assert checkpoints.resume(state) == 1
        assert saved(checkpoints, 2) == 2


def test_a_working_directory_that_is_removed_under_a_save_costs_that_save_only(tmp_path):
    root = tmp_path / "run"

    def remove(_: object) -> None:
        for working in root.glob(".incomplete-*-step-000000002~"):
            shutil.rmtree(working)

    fault = Fault(method="sync_directory", key="*step-000000002*", nth=0, before=remove)
    with manager(FaultyStorage(LocalStorage(root), [fault])) as checkpoints:
        saved(checkpoints, 1)
        error = refused(checkpoints, 2)
        assert isinstance(error, SaveError)
        assert "step 2 was not saved" in str(error)
        assert_whole(checkpoints, 1)
        assert saved(checkpoints, 3) == 3


def test_a_root_that_is_removed_is_told_and_not_silently_made_anew(tmp_path):
    root = tmp_path / "run"
    checkpoints = manager(root)
    saved(checkpoints, 1)
    root.rename(tmp_path / "gone")  # in one step, as the journal may just be writing into it
    for step in (2, 3):
        error = refused(checkpoints, step)
        assert isinstance(error, RootBusyError)
        assert "its claim was removed" in str(error)
    assert not list(root.glob("*step-*"))
    with pytest.raises(RootBusyError):
        saved(checkpoints, 4)
    checkpoints.close()
    with manager(root) as again:
        assert saved(again, 5) == 5


def test_an_fsync_that_failed_is_not_tried_again_and_its_file_is_discarded(tmp_path):
    root = tmp_path / "run"
    fault = Fault(method="fsync", key="*step-000000002*.distcp", nth=0, error=OSError(errno.EIO, "I/O error"))
    with SystemCalls(root, [fault]) as calls, manager(root) as checkpoints:
        saved(checkpoints, 1)
        assert "I/O error" in str(refused(checkpoints, 2))
        synced = [
            each.key for each in calls.operations if each.method == "fsync" and "-step-000000002" in each.key
        ]
        assert len([key for key in synced if key.endswith(".distcp")]) == 1
        assert not list(root.glob("*step-000000002*"))
        assert saved(checkpoints, 2) == 2
        assert_whole(checkpoints, 2)


def test_a_name_that_could_not_be_made_durable_is_told_as_in_doubt_and_what_it_replaced_stays(tmp_path):
    root, name = tmp_path / "run", "last.ckpt"
    broken = threading.Event()

    def fail_next_fsync_of_the_root(_: object) -> None:
        broken.set()
        calls.inject([Fault(method="fsync", key="", error=OSError(errno.EIO, "I/O error"))])

    exchange = Fault(method="exchange", key=f"*{name}*", after=fail_next_fsync_of_the_root)
    with SystemCalls(root) as calls, manager(root) as checkpoints:
        checkpoints.save(1, state_of(1), name=name).result()
        calls.inject([exchange])
        with pytest.raises(SaveError, match=r"a power cut may take it back") as caught:
            checkpoints.save(2, state_of(2), name=name).result()
        assert broken.is_set()
        assert caught.value.in_doubt
        assert "was not saved" not in str(caught.value)
        # After a power cut that name may mean the old one: so that one is still there, whole.
        (old,) = root.glob(f".incomplete-*-{name}~")
        assert (old / "COMMITTED").exists()
        calls.inject(())
        checkpoints.wait()
        assert saved(checkpoints, 3) == 3
    state = state_of(0)
    with manager(root) as again:
        again.load(state, name=name)
    assert torch.equal(state["w"], state_of(2)["w"])


def test_a_write_that_wakes_up_after_the_root_was_given_back_leaves_the_next_job_alone(tmp_path):
    root, gate = tmp_path / "run", threading.Event()
    hang = Fault(method="fsync", key="*step-000000001*.distcp", nth=0, before=lambda _: gate.wait(LONG))
    with SystemCalls(root, [hang]):
        first = manager(root, deadline_seconds=0.5)
        others = set(threading.enumerate())
        first.save(1, state_of(7))
        (thread,) = (each for each in set(threading.enumerate()) - others if each.name == "ckpt-save")
        with pytest.raises(
            SaveError, match=r"step 1 was not saved.*rank 0: writing the tensors has made no progress"
        ):
            first.close()
        with manager(root) as second:
            assert saved(second, 1) == 1
            before = sorted(path.name for path in root.iterdir())
            gate.set()
            thread.join(LONG)
            assert not thread.is_alive()
            assert sorted(path.name for path in root.iterdir()) == before
            assert_whole(second, 1)
            assert saved(second, 2) == 2
