"""Uploads by a process of its own: nothing of them runs in the training, and nothing is lost if it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import psutil
import pytest
import torch

from ckpt_core import CheckpointManager, EverySteps, Upload, UploadError
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage, Storage, object_storage
from ckpt_core.tiers import CheckpointCopy, CopyProcess, CopyTerms
from tests.kit.memory import MemoryStorage

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

_LARGE = 18 << 20
"""Numbers in a state that is worth a process: 72 MiB."""
_SLOW = "150 MB/s"


def large(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(float(_LARGE)) + step}


def copying() -> set[int]:
    """The processes of this one that copy."""
    return {each.pid for each in psutil.Process().children() if "_copy_process:" in command_of(each.pid)}


def command_of(pid: int) -> str:
    """What was started; "" once it has ended."""
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def process_of(uploaded: Future[object]) -> int:
    """Wait until a process copies; return it."""
    pause = threading.Event()
    while not (found := copying()):
        assert not uploaded.done(), uploaded.exception() or "uploaded without a process"
        pause.wait(0.01)
    (pid,) = found
    return pid


def whole(root: Path, step: int) -> bool:
    storage = LocalStorage(root)
    (info,) = [info for info in Catalog(storage).committed() if info.step == step]
    return not verify(storage, info.name)


def test_an_upload_runs_in_a_process_and_no_thread_of_the_training_copies(tmp_path):
    with CheckpointManager(tmp_path / "root", upload=Upload(tmp_path / "tier", bandwidth=_SLOW)) as manager:
        handle = manager.save(1, large(1))
        pid = process_of(handle.uploaded)
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt-send")]
        assert os.getpriority(os.PRIO_PROCESS, pid) >= 10
        handle.uploaded.result(60)
        again = manager.save(2, large(2))
        assert process_of(again.uploaded) == pid
    assert whole(tmp_path / "tier", 1)
    assert whole(tmp_path / "tier", 2)
    assert not copying()


def test_what_is_small_is_copied_here(tmp_path):
    with CheckpointManager(tmp_path / "root", upload=Upload(tmp_path / "tier")) as manager:
        manager.save(1, {"w": torch.ones(1000)}).uploaded.result(60)
        assert not copying()
    assert whole(tmp_path / "tier", 1)


def test_a_process_that_is_killed_is_replaced_by_this_one(tmp_path, caplog):
    with CheckpointManager(tmp_path / "root", upload=Upload(tmp_path / "tier", bandwidth=_SLOW)) as manager:
        handle = manager.save(1, large(1))
        os.kill(process_of(handle.uploaded), signal.SIGKILL)
        handle.uploaded.result(60)
        assert whole(tmp_path / "tier", 1)
        manager.save(2, large(2)).uploaded.result(60)
        assert not copying()
    assert whole(tmp_path / "tier", 2)
    (warning,) = [text for text in caplog.messages if "its process" in text]
    assert "exit code -9" in warning


def test_signals_to_every_process_of_a_job_do_not_end_the_upload(tmp_path, caplog):
    with CheckpointManager(tmp_path / "root", upload=Upload(tmp_path / "tier", bandwidth=_SLOW)) as manager:
        handle = manager.save(1, large(1))
        pid = process_of(handle.uploaded)
        ignored = 0
        while not ignored >> (signal.SIGTERM - 1) & 1:  # its first lines
            status = Path(f"/proc/{pid}/status").read_text()
            ignored = int(status.partition("SigIgn:")[2].split()[0], 16)
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, each)
        handle.uploaded.result(60)
        assert copying() == {pid}
    assert not caplog.messages


def test_a_process_that_hangs_holds_up_no_end(tmp_path):
    upload = Upload(tmp_path / "tier", deadline_seconds=0.5, bandwidth=_SLOW)
    with CheckpointManager(tmp_path / "root", upload=upload) as manager:
        pid = process_of(manager.save(1, large(1)).uploaded)
        os.kill(pid, signal.SIGSTOP)
    assert not copying()
    assert not command_of(pid)


def test_a_copy_that_another_thread_ends_is_left_to_the_caller(tmp_path):
    process, copy = large_copy(tmp_path)
    done: list[int] = []

    def close_at_once(size: int) -> None:
        done.append(size)
        if len(done) == 1:
            threading.Thread(target=process.close).start()

    terms = CopyTerms(progress=close_at_once, bytes_per_second=1 << 20)
    assert process.copy_files(copy, copy.manifest.files, terms) is None
    assert sum(done) == 0
    assert not copying()


def test_a_program_that_is_no_python_is_replaced_by_this_one(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("ckpt_core.tiers._work_process.get_executable", lambda: "/bin/false")
    with CheckpointManager(tmp_path / "root", upload=Upload(tmp_path / "tier")) as manager:
        manager.save(1, large(1)).uploaded.result(60)
    assert whole(tmp_path / "tier", 1)
    assert any("has ended (exit code 1)" in text for text in caplog.messages)


def test_close_kills_the_process_at_its_deadline_and_the_next_run_continues(tmp_path):
    slow = Upload(tmp_path / "tier", bandwidth="8 MB/s", deadline_seconds=0.5)
    with CheckpointManager(tmp_path / "root", upload=slow) as manager:
        process_of(manager.save(1, large(1)).uploaded)
    assert not copying()
    assert not Catalog(LocalStorage(tmp_path / "tier")).committed()
    with CheckpointManager(tmp_path / "root", upload=Upload(tmp_path / "tier")) as manager:
        manager.resume({"w": torch.zeros(_LARGE)})
    assert whole(tmp_path / "tier", 1)


_JOB = """
import os, psutil, sys, time, torch
from ckpt_core import CheckpointManager, Upload
manager = CheckpointManager(sys.argv[1], upload=Upload(sys.argv[2], bandwidth="8 MB/s"))
manager.save(1, {"w": torch.arange(float(18 << 20)) + 1}).committed.result()
while not (found := psutil.Process().children()):
    time.sleep(0.01)
if os.fork() == 0:  # as a worker of a loader, which outlives a killed job and holds what it had open
    time.sleep(600)
print(found[0].pid, flush=True)
time.sleep(600)
"""


def test_the_process_ends_with_a_killed_job_and_the_next_run_uploads_the_rest(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", _JOB, tmp_path / "root", tmp_path / "tier"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as job:
        try:
            pid = int(job.stdout.readline())
            assert "_copy_process:" in command_of(pid)
            job.kill()
            until, pause = time.monotonic() + 30, threading.Event()
            while command_of(pid):
                assert time.monotonic() < until, "the process has outlived its parent"
                pause.wait(0.02)
        finally:
            os.killpg(job.pid, signal.SIGKILL)  # the fork
    with CheckpointManager(tmp_path / "root", upload=Upload(tmp_path / "tier")) as manager:
        state = {"w": torch.zeros(_LARGE)}
        manager.resume(state)
    assert torch.equal(state["w"], large(1)["w"])
    assert whole(tmp_path / "tier", 1)
    assert [
        entry.name for entry in LocalStorage(tmp_path / "tier").list("") if "incomplete" in entry.name
    ] == []


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_damage_is_told_as_by_a_thread_and_never_committed(tmp_path, damage):
    with CheckpointManager(tmp_path / "root", save=EverySteps(1)) as manager:
        manager.save(1, large(1)).result(60)
    (name,) = [info.name for info in Catalog(LocalStorage(tmp_path / "root")).committed()]
    (data,) = [each for each in (tmp_path / "root" / name).iterdir() if each.stat().st_size > 64 << 20]
    if damage == "missing":
        data.unlink()
    else:
        with data.open("r+b") as file:
            file.seek(40 << 20)
            file.write(b"\xff" * 8)
            if damage == "truncated":
                file.truncate()
    upload = Upload(tmp_path / "tier", on_error="raise")
    manager = CheckpointManager(tmp_path / "root", save=EverySteps(1), upload=upload)
    manager.prune()  # takes the root, and so begins what was left
    with pytest.raises(UploadError, match=data.name):
        manager.close()
    assert not Catalog(LocalStorage(tmp_path / "tier")).committed()


def large_copy(tmp_path: Path) -> tuple[CopyProcess, CheckpointCopy]:
    """A copy whose target is prepared, and the process for it."""
    source, target = LocalStorage(tmp_path / "root"), LocalStorage(tmp_path / "tier")
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, large(1)).result(60)
    copy = CheckpointCopy.of(source, target, Catalog(source).committed()[0].name)
    copy.begin()
    process = CopyProcess.between(source, target, Upload(tmp_path / "tier"), deadline_seconds=10)
    assert process is not None
    return process, copy


def test_errors_of_the_target_arrive_with_their_type_and_the_process_stays(tmp_path):
    process, copy = large_copy(tmp_path)
    files, done = copy.manifest.files, [0]
    in_the_way = tmp_path / "tier" / copy.working
    in_the_way.rename(tmp_path / "moved")
    in_the_way.write_bytes(b"of somebody else")
    for _ in range(2):
        with pytest.raises(NotADirectoryError, match=copy.working):
            process.copy_files(copy, files, CopyTerms())
    assert in_the_way.read_bytes() == b"of somebody else"
    (pid,) = copying()
    in_the_way.unlink()
    (tmp_path / "moved").rename(in_the_way)
    assert process.copy_files(copy, files, CopyTerms(progress=done.append)) == {}
    assert sum(done) == sum(entry.size_bytes for entry in files)
    assert copying() == {pid}
    process.close()
    assert not copying()


def test_damage_is_left_to_the_caller_who_may_have_it_whole_elsewhere(tmp_path):
    process, copy = large_copy(tmp_path)
    (data,) = [entry for entry in copy.manifest.files if entry.size_bytes > 64 << 20]
    (tmp_path / "root" / copy.name / data.path).unlink()
    done = [0]
    terms = CopyTerms(progress=done.append)
    assert process.copy_files(copy, copy.manifest.files, terms) is None
    assert sum(done) == 0
    process.close()


class _Elsewhere(MemoryStorage):
    """A root that only this process has."""


@pytest.mark.parametrize(
    ("source", "target", "upload"),
    [
        (MemoryStorage("a"), LocalStorage("/b"), Upload("/b")),
        (LocalStorage("/a"), MemoryStorage("b"), Upload(MemoryStorage("b"))),
        (LocalStorage("/a"), object_storage("memory://b"), Upload("memory://b")),
        (LocalStorage("/a"), MemoryStorage("s3"), Upload("s3://b", storage_options={"session": object()})),
        (_Elsewhere("a"), LocalStorage("/b"), Upload("/b")),
    ],
    ids=["source", "storage", "memory", "session", "subclass"],
)
def test_a_way_that_another_process_cannot_go_has_no_process(source: Storage, target: Storage, upload):
    assert CopyProcess.between(source, target, upload, deadline_seconds=10) is None


def test_no_secret_is_on_the_command_line_or_in_a_log(tmp_path, caplog):
    with CheckpointManager(tmp_path / "root") as manager:
        manager.save(1, large(1)).result(60)
    source, unused = LocalStorage(tmp_path / "root"), LocalStorage(tmp_path / "unused")
    options = {"key": "K-secret", "secret": "S-secret", "endpoint_url": "http://127.0.0.1:9"}
    upload = Upload("s3://bucket/run", storage_options=options)
    process = CopyProcess.between(source, MemoryStorage("in place of the bucket"), upload, deadline_seconds=1)
    assert process is not None
    seen: set[str] = set()

    def look() -> None:
        seen.update(map(command_of, copying()))

    copy = CheckpointCopy.of(source, unused, Catalog(source).committed()[0].name)
    with pytest.raises(OSError, match="s3://bucket/run") as refused:
        process.copy_files(copy, copy.manifest.files, CopyTerms(stop=look))
    process.close()
    assert seen
    assert "secret" not in f"{seen}{refused.value}{caplog.text}"
