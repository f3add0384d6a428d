"""What frees space needs none: on a real filesystem without a free byte, or without a free inode."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress

import pytest
import torch

from ckpt_core import CheckpointManager, KeepLatest
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Lease, verify
from ckpt_core.commit._catalog import locked, read_pins, replace_pins
from ckpt_core.errors import RootBusyError
from ckpt_core.names import PINS
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import Fault
from tests.support.power import PowerLog, power_cut
from tests.support.system_calls import SystemCalls

pytestmark = pytest.mark.reliability

SIZE = 200_000


def state_of(step):
    return {"x": torch.full((SIZE // 4,), float(step))}


def fill_bytes(disk):
    """Take every free byte, as a log of somebody else does; inodes stay."""
    with suppress(OSError), (disk / "log").open("wb", buffering=0) as stream:
        while True:
            stream.write(bytes(4096))
    assert os.statvfs(disk).f_bavail == 0


def fill_inodes(disk):
    """Take every free inode; bytes stay."""
    (disk / "many").mkdir()
    with suppress(OSError):
        for number in range(10_000):
            (disk / "many" / str(number)).touch()
    assert os.statvfs(disk).f_ffree == 0


FILL = pytest.mark.parametrize("fill", [fill_bytes, fill_inodes])


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=150", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a filesystem here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture
def root(disk):
    """A root of three steps, as a job that ended has left it."""
    with CheckpointManager(disk / "run") as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state_of(step)).result()
    return disk / "run"


def steps(root):
    storage = LocalStorage(root)
    infos = Catalog(storage).committed()
    assert all(verify(storage, info.name) == [] for info in infos)
    return [info.step for info in infos]


def forget_locks(root):
    for lock in root.glob("*/*.lock"):
        lock.unlink()


def drain_spares(root):
    """The spare files are used up, or could not be made."""
    for spare in root.glob("*/.spare-*"):
        spare.unlink()


def leave_claim(root):
    """A job that was killed has left its record."""
    (root / ".ckpt-suite/writer.json").write_text(
        '{"id": "1", "job": "killed", "host": "elsewhere", "pid": 1, "started": 1}'
    )


def nothing(root):
    """The job has ended as it should."""


LEFT = pytest.mark.parametrize("left", [nothing, forget_locks, drain_spares, leave_claim])


@FILL
@LEFT
def test_prune_needs_no_space_and_the_save_after_it_succeeds(disk, root, fill, left, capsys):
    left(root)
    fill(disk)
    assert main(["prune", str(root), "--keep-latest", "1"]) == 0, capsys.readouterr().err
    assert steps(root) == [3]
    with CheckpointManager(root) as checkpoints:
        assert checkpoints.resume(state_of(0)) == 3
        checkpoints.save(4, state_of(4)).result()
    assert steps(root) == [3, 4]


@FILL
@LEFT
def test_a_job_whose_retention_frees_space_starts_and_saves_on_a_full_disk(disk, root, fill, left):
    left(root)
    fill(disk)
    with CheckpointManager(root, keep=KeepLatest(1), headroom=0) as checkpoints:
        assert checkpoints.resume(state_of(0)) == 3
        checkpoints.save(4, state_of(4)).result()
        checkpoints.save(5, state_of(5)).result()
    assert steps(root)[-1] == 5
    assert not (root / ".ckpt-suite/writer.json").exists()


@FILL
def test_a_job_on_a_full_disk_is_told_by_its_first_save_and_goes_on_once_there_is_room(disk, root, fill):
    fill(disk)
    with CheckpointManager(root, headroom=0, on_error="warn") as checkpoints:
        assert checkpoints.resume(state_of(0)) == 3
        checkpoints.save(4, state_of(4))
        checkpoints.wait()
        for path in disk.glob("log"):
            path.unlink()
        for path in disk.glob("many/*"):
            path.unlink()
        checkpoints.save(5, state_of(5)).result()
        assert (
            root / ".ckpt-suite/writer.json"
        ).exists()  # the record is made as soon as there is room for it
    assert steps(root) == [1, 2, 3, 5]


@FILL
def test_the_lock_alone_keeps_a_second_job_out_of_a_full_disk(disk, root, fill):
    drain_spares(root)
    fill(disk)
    with Lease.acquire(LocalStorage(root), "the first") as lease:
        assert not (root / ".ckpt-suite/writer.json").exists()
        lease.check()
        answer = subprocess.run(
            [sys.executable, "-m", "ckpt_core.cli", "prune", str(root), "--keep-latest", "1"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert answer.returncode == 1
        assert "is being written by another live process" in answer.stderr
    assert steps(root) == [1, 2, 3]


@FILL
def test_a_job_without_room_for_its_record_still_yields_to_one_that_takes_over(disk, root, fill):
    drain_spares(root)
    fill(disk)
    with Lease.acquire(LocalStorage(root), "the first") as lease:
        for path in [*disk.glob("log"), *disk.glob("many/*")]:
            path.unlink()
        leave_claim(root)
        with pytest.raises(RootBusyError, match="taken over by killed"):
            lease.check()


@FILL
def test_what_a_kind_names_is_pruned_without_space(disk, root, fill):
    assert main(["mark", f"{root}@3", "bad", "--reason", "spike"]) == 0
    fill(disk)
    assert main(["prune", str(root), "--bad"]) == 0
    assert steps(root) == [1, 2]


@FILL
def test_what_says_which_steps_may_go_changes_on_a_full_disk(disk, root, fill):
    assert main(["pin", f"{root}@1", "--reason", "published"]) == 0
    assert main(["mark", f"{root}@2", "bad", "--reason", "spike"]) == 0
    fill(disk)
    assert main(["pin", f"{root}@2", "--reason", "the spike of the paper"]) == 0
    assert main(["mark", f"{root}@3", "bad", "--reason", "another"]) == 0
    assert main(["mark", f"{root}@2", "good"]) == 0
    assert main(["unpin", f"{root}@1"]) == 0
    found = {info.step: (info.pinned, info.bad) for info in Catalog(LocalStorage(root)).committed()}
    assert found == {1: (None, None), 2: ("the spike of the paper", None), 3: (None, "another")}


@FILL
def test_the_first_pin_and_the_first_mark_find_room_and_so_do_those_after_them(disk, root, fill):
    fill(disk)
    assert main(["pin", f"{root}@1", "--reason", "published"]) == 0
    assert main(["mark", f"{root}@3", "bad", "--reason", "spike"]) == 0
    assert main(["pin", f"{root}@2", "--reason", "the paper's"]) == 0
    assert main(["unpin", f"{root}@1"]) == 0
    assert main(["mark", f"{root}@2", "bad", "--reason", "another"]) == 0
    assert main(["prune", str(root), "--bad"]) == 0
    assert steps(root) == [1, 2]


def test_what_finds_no_room_says_where_and_what_to_do(disk, root, capsys):
    drain_spares(root)
    fill_inodes(disk)
    assert main(["pin", f"{root}@1", "--reason", "published"]) == 1
    assert "no room for this small file: free some, as by `ckpt prune`" in (told := capsys.readouterr().err)
    assert f"{root}/.ckpt-suite/pins.json" in told


def test_only_a_spare_file_without_another_name_is_taken_and_never_through_a_link(disk, root):
    precious = [disk / "aimed at", disk / "twin"]
    for each in precious:
        each.write_bytes(bytes(8192))
    drain_spares(root)
    (root / ".ckpt-suite/.spare-0").symlink_to(precious[0])
    (root / ".ckpt-suite/.spare-1").hardlink_to(precious[1])
    os.mkfifo(root / ".ckpt-suite/.spare-2")
    fill_bytes(disk)
    assert main(["pin", f"{root}@1", "--reason", "published"]) == 1
    assert not (root / ".ckpt-suite/pins.json").exists()
    assert [each.stat().st_size for each in precious] == [8192, 8192]


class CrashError(BaseException):
    """The process is killed."""


def test_a_power_cut_while_a_full_disk_is_pinned_leaves_the_pins_of_before_or_after(tmp_path):
    full = [
        Fault(
            method="create",
            key=".ckpt-suite/.pins.json.*",
            error=OSError(errno.ENOSPC, "No space left on device"),
        ),
    ]
    found = set()
    for number in range(1, 100):
        root, log = tmp_path / f"{number}", tmp_path / f"{number}.log"
        storage = LocalStorage(root)
        with locked(storage, PINS):
            replace_pins(storage, {1: "before"})
        PowerLog.begin(root, log)
        crash = Fault(nth=number, before=_crash)
        try:
            with SystemCalls(root, [PowerLog(root, log).fault, *full, crash]):
                replace_pins(storage, {1: "before", 2: "after"})
            done = True
        except CrashError:
            done = False
        for fate, seed in (("strict", 0), ("journal", number), ("random", number), ("random", number + 1)):
            power_cut(log, root, left := tmp_path / f"{number}.{fate}.{seed}", fate=fate, seed=seed)
            pins = read_pins(LocalStorage(left))
            assert pins in ({1: "before"}, {1: "before", 2: "after"})
            found.add((done, len(pins)))
        if done:
            break
    assert {(False, 1), (False, 2), (True, 2)} == found


def _crash(_):
    raise CrashError
