"""Lock files are for those who may write to the root: readers cannot take them, links are refused."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckpt_core.commit import Lease
from ckpt_core.errors import RootBusyError
from ckpt_core.names import OWN, WRITER
from ckpt_core.storage import LocalStorage

IS_ROOT = os.geteuid() == 0
NOBODY = 65534
SQUATTER = (
    "import fcntl, os, sys\n"
    "os.chdir(sys.argv[1])\n"
    "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
    "try: fcntl.lockf(os.open('writer.json.lock', os.O_RDONLY), fcntl.LOCK_SH | fcntl.LOCK_NB)\n"
    "except PermissionError: print('refused', flush=True)\n"
    "else: print('locked', flush=True)\n"
    "sys.stdin.read()\n"
)
HOLDER = (
    "import fcntl, os, sys\n"
    "os.mkdir(sys.argv[1] + '/.ckpt-suite')\n"
    "file = os.open(sys.argv[1] + '/.ckpt-suite/writer.json.lock', os.O_RDWR | os.O_CREAT, 0o600)\n"
    "fcntl.lockf(file, fcntl.LOCK_EX)\n"
    "print('locked', flush=True)\n"
    "sys.stdin.read()\n"
)


def mode_of(path):
    return path.stat().st_mode & 0o777


def taken(storage, key="writer.json"):
    lock = storage.try_lock(key)
    assert lock is not None
    lock.release()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize(
    ("of_root", "of_lock"), [(0o755, 0o600), (0o775, 0o660), (0o2770, 0o660), (0o700, 0o600)]
)
def test_a_lock_file_is_for_those_who_may_write_to_the_root(tmp_path, of_root, of_lock, umask):
    tmp_path.chmod(of_root)
    before = os.umask(umask)
    try:
        taken(LocalStorage(tmp_path), WRITER)
    finally:
        os.umask(before)
    assert mode_of(tmp_path / f"{WRITER}.lock") == of_lock
    assert mode_of(tmp_path / OWN) == mode_of(tmp_path)
    for path in (tmp_path / OWN, tmp_path / f"{WRITER}.lock"):
        assert path.stat().st_gid == tmp_path.stat().st_gid


@pytest.mark.skipif(not IS_ROOT, reason="only root can give a directory to another group")
def test_the_group_of_the_root_may_lock_it_and_no_other_group(tmp_path):
    os.chown(tmp_path, -1, NOBODY)
    tmp_path.chmod(0o775)
    taken(LocalStorage(tmp_path), WRITER)
    for path, mode in ((tmp_path / OWN, 0o775), (tmp_path / f"{WRITER}.lock", 0o660)):
        assert (path.stat().st_gid, mode_of(path)) == (NOBODY, mode)


def test_a_lock_file_of_an_earlier_version_is_taken_from_readers(tmp_path):
    path = tmp_path / "writer.json.lock"
    path.touch()
    path.chmod(0o644)
    taken(LocalStorage(tmp_path))
    assert mode_of(path) == 0o600


def test_a_lock_file_with_a_second_name_keeps_its_mode(tmp_path):
    """The other name may be that of something else; copies of a root by hard links have such files."""
    (tmp_path / "root").mkdir()
    (tmp_path / "other").touch()
    (tmp_path / "other").chmod(0o644)
    os.link(tmp_path / "other", tmp_path / "root" / "writer.json.lock")
    taken(LocalStorage(tmp_path / "root"))
    assert mode_of(tmp_path / "other") == 0o644


@pytest.mark.parametrize("target", ["nothing", "precious"])
def test_a_link_as_lock_file_is_refused_and_nothing_is_made_there(tmp_path, target):
    (tmp_path / "root").mkdir()
    (tmp_path / "precious").write_bytes(b"x")
    (tmp_path / "root" / "writer.json.lock").symlink_to(tmp_path / target)
    with pytest.raises(PermissionError, match="a symbolic link is in the way"):
        LocalStorage(tmp_path / "root").try_lock("writer.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["precious", "root"]


@pytest.mark.skipif(not IS_ROOT, reason="only root can start a process of another user")
def test_a_reader_of_the_root_cannot_keep_a_job_out(tmp_path):
    taken(LocalStorage(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", SQUATTER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as squatter:
        assert squatter.stdout.readline() == "refused\n"
        taken(LocalStorage(tmp_path))
        squatter.communicate()


@pytest.mark.skipif(not IS_ROOT, reason="only root can start a process of another user")
def test_a_lock_file_of_another_user_is_told_as_such():
    program = (
        "import os, sys\n"
        "from ckpt_core.storage import LocalStorage\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: LocalStorage(sys.argv[1]).try_lock('writer.json')\n"
        "except PermissionError as error: print(error)\n"
    )
    # Others may look into this one, as they may not below the directories of pytest.
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)  # noqa: PTH101 - a string
        taken(LocalStorage(root))
        command = [sys.executable, "-c", program, root]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "may not open the lock file, which user id 0 made" in answer.stdout, answer


@pytest.mark.skipif(sys.platform != "linux", reason="the layout of `struct flock` is that of Linux")
def test_who_holds_the_root_is_named_by_its_process_id(tmp_path):
    storage = LocalStorage(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "locked\n"
        assert storage.lock_holder(WRITER) == holder.pid
        with pytest.raises(RootBusyError, match=rf"another live process; the kernel names pid {holder.pid} "):
            Lease.acquire(storage, "a job")
        holder.communicate()
    assert storage.lock_holder(WRITER) is None


def test_to_ask_who_holds_a_lock_does_not_give_it_up(tmp_path):
    storage = LocalStorage(tmp_path)
    assert storage.lock_holder("writer.json") is None
    lock = storage.try_lock("writer.json")
    assert lock is not None
    assert storage.lock_holder("writer.json") == os.getpid()
    child = os.fork()
    if child == 0:
        descriptor = os.open(tmp_path / "writer.json.lock", os.O_RDWR)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    lock.release()


def test_a_fork_while_a_thread_takes_a_lock_can_take_locks(tmp_path, monkeypatch):
    amid, go_on, lockf = threading.Event(), threading.Event(), fcntl.lockf

    def slow(descriptor, operation):
        amid.set()
        assert go_on.wait(60)
        return lockf(descriptor, operation)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(fcntl, "lockf", slow)
        parents = pool.submit(LocalStorage(tmp_path / "parent").try_lock, "writer.json")
        assert amid.wait(60)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            fcntl.lockf = lockf
            os._exit(0 if LocalStorage(tmp_path / "child").try_lock("writer.json") else 7)
        go_on.set()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        parents.result(60).release()
