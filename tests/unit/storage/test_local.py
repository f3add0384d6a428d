"""What only a POSIX directory can promise."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_core.names import SPARES
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.local import _paths
from ckpt_core.testing import Fault
from tests.support.system_calls import SystemCalls

pytestmark = pytest.mark.usefixtures("disk_syncs")


class Recorder:
    """Sees every fsync as the kernel does: which file it is and how much of it has left Python's buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: list[tuple[Path, int]] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        self.synced.append((path, 0 if path.is_dir() else os.fstat(descriptor).st_size))
        self._fsync(descriptor)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    storage = LocalStorage(tmp_path / "root")
    storage.check_root()
    return storage


def test_create_syncs_only_after_all_bytes_have_left_the_buffer(storage, recorder):
    with storage.create("a") as stream:
        stream.write(b"small enough to sit in Python's buffer")
        assert recorder.synced == []
    assert recorder.synced == [(storage.local_path("a"), 38)]


def test_create_makes_the_directories_on_the_way_durable(storage, recorder):
    storage.write_bytes("part/deep/a", b"x")
    assert [path for path, _ in recorder.synced] == [
        storage.local_path(""),
        storage.local_path("part"),
        storage.local_path("part/deep/a"),
    ]


def test_a_failed_create_leaves_the_partial_file_and_promises_nothing(storage, recorder):
    with pytest.raises(ZeroDivisionError):
        _write_and_fail(storage)
    assert recorder.synced == []
    assert storage.local_path("a").read_bytes() == b"half"


def test_replace_syncs_the_draft_then_renames_then_syncs_the_directory(storage, recorder):
    storage.replace("pins.json", b"content")
    (draft, size), (directory, _) = recorder.synced
    assert draft.name.startswith(".pins.json.")
    assert size == len(b"content")
    assert directory == storage.local_path("")


def test_a_failed_replace_keeps_the_old_content_and_no_draft(storage, monkeypatch):
    storage.replace("pins.json", b"old")
    monkeypatch.setattr(os, "fsync", _raise_enospc)
    with pytest.raises(OSError, match="No space left"):
        storage.replace("pins.json", b"new")
    assert storage.read_bytes("pins.json") == b"old"
    assert [entry.name for entry in storage.list("")] == ["pins.json"]


def test_make_directory_is_durable_in_its_parent(storage, recorder):
    storage.make_directory(".incomplete-1-step")
    assert [path for path, _ in recorder.synced] == [storage.local_path("")]


def test_sync_directory_tolerates_filesystems_that_cannot(storage, monkeypatch):
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", refuse)
    storage.sync_directory("")


def test_rename_without_kernel_support_still_refuses_an_empty_directory(storage, monkeypatch):
    monkeypatch.setattr(_paths, "_renameat2", None)
    storage.make_directory("new")
    storage.make_directory("old")
    with pytest.raises(FileExistsError):
        storage.rename("new", "old")
    storage.rename("new", "free")
    assert storage.local_path("free").is_dir()


def test_rename_refuses_a_dangling_link(storage):
    storage.make_directory("new")
    storage.local_path("step").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        storage.rename("new", "step")


def test_delete_unlinks_links_and_leaves_what_they_point_to(storage, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "a").write_bytes(b"x")
    storage.make_directory("step")
    storage.local_path("step/link").symlink_to(precious)
    storage.local_path("link").symlink_to(precious)
    storage.delete("step")
    storage.delete("link")
    assert (precious / "a").read_bytes() == b"x"
    assert storage.list("") == []


def test_delete_below_a_file_finds_nothing_to_do(storage):
    storage.write_bytes("a", b"x")
    storage.delete("a/b")
    assert storage.read_bytes("a") == b"x"


def test_delete_passes_over_what_others_delete_meanwhile(storage):
    for name in ("a", "b", "deep/c"):
        storage.write_bytes(f"step/{name}", b"x")

    def delete_too(operation):
        path = storage.local_path(operation.key)
        path.rmdir() if path.is_dir() else path.unlink()

    with SystemCalls(
        storage.url, [Fault(method=method, before=delete_too) for method in ("unlink", "rmdir")]
    ):
        storage.delete("step")
    assert storage.list("") == []


def test_an_error_of_a_deletion_names_the_whole_path(storage):
    storage.write_bytes("step/deep/a", b"x")
    error = PermissionError(errno.EACCES, "Permission denied")
    with (
        SystemCalls(storage.url, [Fault(method="unlink", error=error)]),
        pytest.raises(PermissionError, match=f"{storage.url}/step/deep/a"),
    ):
        storage.delete("step")


def test_a_file_that_stays_as_an_earlier_call_left_it_is_made_durable(storage, recorder):
    storage.local_path("a").write_bytes(bytes(10))
    storage.put_file("a", 10, lambda _offset, _buffer: None, identity="zeros")
    assert recorder.synced == [(storage.local_path("a"), 10)]


@pytest.mark.parametrize("kind", ["directory", "link", "hard link", "pipe", "the user's file"])
def test_on_a_full_disk_no_spare_is_used_that_is_no_file_of_its_own(storage, tmp_path, kind):
    precious = tmp_path / "precious"
    precious.write_bytes(b"the user's")
    for spare in map(storage.local_path, SPARES):
        if kind == "directory":
            spare.mkdir()
            (spare / "mine").write_bytes(b"the user's")
        elif kind == "pipe":
            os.mkfifo(spare)
        elif kind == "the user's file":
            spare.write_bytes(b"the user's")
        else:
            (os.symlink if kind == "link" else os.link)(precious, spare)
    full = Fault(method="create", error=OSError(errno.ENOSPC, "No space left on device"))
    before = storage.list("")
    with SystemCalls(storage.url, [full]), pytest.raises(OSError, match="no room for this small file"):
        storage.replace("pins.json", b"{}")
    assert storage.list("") == before
    assert precious.read_bytes() == b"the user's"


def test_the_root_does_not_move_when_the_script_changes_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("runs")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    storage.write_bytes("a", b"x")
    assert (tmp_path / "runs" / "a").exists()


def test_a_file_as_root_is_told_apart(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for root in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(NotADirectoryError, match="a file is where the checkpoint root should be"):
            LocalStorage(root).check_root()


def test_a_root_that_cannot_be_written_is_named(tmp_path):
    """Tests may run as root, whom no mode stops, so a process without privileges tries it."""
    program = (
        "import os, sys, pathlib\n"
        "from ckpt_core.storage import LocalStorage\n"
        "root = pathlib.Path(sys.argv[1]); root.chmod(0o555)\n"
        "if os.getuid() == 0: os.chdir(root); os.setuid(65534)\n"
        "storage = LocalStorage('.')\n"
        "try: storage.check_root()\n"
        "except PermissionError as error: print(error)\n"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=60, check=False
    )
    assert "cannot create files in the checkpoint root; check owner, mode and mount" in answer.stdout, answer


def test_a_root_that_cannot_be_made_is_named():
    with pytest.raises(OSError, match=r"cannot use the checkpoint root|cannot create files") as caught:
        LocalStorage("/proc/ckpt").check_root()
    assert "/proc/ckpt" in str(caught.value)


def test_a_listing_shows_links_as_links_wherever_they_lead(storage):
    storage.local_path("circle").symlink_to("circle")
    storage.local_path("dangling").symlink_to("nowhere")
    storage.write_bytes("deep/a", b"x")
    storage.local_path("linked").symlink_to("deep")
    found = [(entry.name, entry.is_directory, entry.is_link) for entry in storage.list("")]
    assert found == [
        ("circle", False, True),
        ("dangling", False, True),
        ("deep", True, False),
        ("linked", True, True),
    ]
    assert [storage.entry(entry.name) for entry in storage.list("")] == storage.list("")


def test_a_link_is_renamed_as_a_link(storage):
    storage.write_bytes("deep/a", b"x")
    storage.local_path("link").symlink_to("deep")
    storage.rename("link", "deep/moved")
    assert storage.local_path("deep/moved").is_symlink()


def test_free_space_of_a_root_that_is_not_there_yet_is_unknown(tmp_path):
    assert LocalStorage(tmp_path / "later").space() == (None, None, None)


HOLDER = (
    "import sys\n"
    "from ckpt_core.storage import LocalStorage\n"
    "lock = LocalStorage(sys.argv[1]).try_lock('writer.json')\n"
    "print(lock is not None, flush=True)\n"
    "sys.stdin.read()\n"
)


def test_a_lock_excludes_other_processes_until_its_holder_is_killed(storage):
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, storage.url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "True\n"
        assert storage.try_lock("writer.json") is None
        holder.kill()
        holder.wait(60)
    lock = storage.try_lock("writer.json")
    assert lock is not None
    lock.release()
    assert _another_process_gets_the_lock(storage)


def test_a_lock_excludes_a_second_claim_of_the_same_process_and_survives_it(storage):
    lock = storage.try_lock("writer.json")
    assert lock is not None
    assert LocalStorage(storage.url).try_lock("writer.json") is None
    # Had the refused claim opened and closed the file, the kernel would have dropped the lock.
    assert not _another_process_gets_the_lock(storage)
    lock.release()


def test_reading_and_replacing_the_locked_file_does_not_drop_the_lock(storage):
    lock = storage.try_lock("writer.json")
    assert lock is not None
    storage.replace("writer.json", b"me")
    assert storage.read_bytes("writer.json") == b"me"
    assert not _another_process_gets_the_lock(storage)
    lock.release()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP])
def test_where_locks_do_not_exist_the_claim_is_granted_with_a_warning(storage, monkeypatch, caplog, number):
    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.lockf", refuse)
    with caplog.at_level(logging.WARNING):
        first, second = storage.try_lock("writer.json"), storage.try_lock("writer.json")
    assert first is not None
    assert second is not None
    first.release()
    assert "cannot lock files" in caplog.text
    assert storage.url in caplog.text


def _another_process_gets_the_lock(storage: LocalStorage) -> bool:
    command = [sys.executable, "-c", HOLDER, storage.url]
    answer = subprocess.run(command, input="", capture_output=True, text=True, timeout=60, check=True)
    return answer.stdout == "True\n"


def _write_and_fail(storage: LocalStorage) -> None:
    with storage.create("a") as stream:
        stream.write(b"half")
        raise ZeroDivisionError


def _raise_enospc(descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
