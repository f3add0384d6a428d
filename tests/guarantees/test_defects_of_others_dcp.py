"""What stock `torch.distributed.checkpoint` does to people, and what happens to them here instead.

docs/defects.md says where each is from, and which tests of ours elsewhere belong to it.
"""

from __future__ import annotations

import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ckpt_core import CheckpointManager, CorruptCheckpointError, UnsafeCheckpointError
from tests.guarantees.stock import flip, still_so

pytestmark = [pytest.mark.reliability, pytest.mark.filterwarnings("ignore")]

STEP = "step-000000001"


def state(value: float = 1.0, count: int = 4) -> dict[str, torch.Tensor]:
    return {f"t{number}": torch.full((1000,), value + number) for number in range(count)}


def saved_by_stock(folder: Path, value: float = 1.0, **options: object) -> Path:
    dcp.save(state(value), storage_writer=FileSystemWriter(folder, **options))
    return folder


def loaded_by_stock(folder: Path) -> dict[str, torch.Tensor]:
    target = {name: torch.full((1000,), -1.0) for name in state()}
    dcp.load(target, checkpoint_id=folder)
    return target


def saved_by_us(root: Path, value: float = 1.0) -> Path:
    with CheckpointManager(root) as checkpoints:
        checkpoints.save(1, state(value)).result()
    return root / STEP


def payload_of(path: Path, value: float) -> int:
    """Where the payload of the tensor filled with `value` lies."""
    return path.read_bytes().index(torch.full((1000,), value).numpy().tobytes())


# --- integrity ----------------------------------------------------------------------------------------------


def test_stock_loads_a_flipped_bit_without_a_word(tmp_path):
    data = saved_by_stock(tmp_path) / "__0_0.distcp"
    flip(data, payload_of(data, 2.0) + 11)
    still_so(not torch.equal(loaded_by_stock(tmp_path)["t1"], state()["t1"]), "a flipped bit is loaded")


def test_stock_overwrites_what_is_live_before_it_finds_the_damage(tmp_path):
    data = saved_by_stock(tmp_path) / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 3000)
    target = {name: torch.full((1000,), -1.0) for name in state()}
    with pytest.raises(CheckpointException):
        dcp.load(target, checkpoint_id=tmp_path)
    still_so(
        any(not torch.equal(value, torch.full((1000,), -1.0)) for value in target.values()),
        "a load that fails leaves the model half overwritten",
    )


def test_stock_casts_another_dtype_without_a_word(tmp_path):
    saved_by_stock(tmp_path, value=1.001)
    target = {name: torch.zeros(1000, dtype=torch.bfloat16) for name in state()}
    dcp.load(target, checkpoint_id=tmp_path)
    still_so(target["t0"][0].item() == 1.0, "values of another dtype are cast")


def test_metadata_of_a_single_rank_never_takes_the_place_of_the_whole(tmp_path):
    """Stock falls back to `__0.metadata`, whoever left it there."""
    ours = saved_by_us(tmp_path / "run")
    (ours / ".metadata").rename(ours / "__0.metadata")
    target = {name: torch.full((1000,), -1.0) for name in state()}
    with CheckpointManager(tmp_path / "run") as checkpoints, pytest.raises(CorruptCheckpointError):
        checkpoints.load(target, step=1)
    assert all(torch.equal(value, torch.full((1000,), -1.0)) for value in target.values())


def test_stock_takes_the_metadata_of_a_single_rank_for_the_whole(tmp_path):
    folder = saved_by_stock(tmp_path)
    (folder / ".metadata").rename(folder / "__0.metadata")
    try:
        loaded = torch.equal(loaded_by_stock(folder)["t0"], state()["t0"])
    except CheckpointException:
        loaded = False
    still_so(loaded, "`__0.metadata` is read where `.metadata` is missing")


# --- durability ---------------------------------------------------------------------------------------------


@pytest.fixture
def synced(monkeypatch) -> dict[int, int]:
    """inode -> size at its last fsync, which still is a real one."""
    sizes: dict[int, int] = {}
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        sizes[status.st_ino] = status.st_size

    monkeypatch.setattr(os, "fsync", recording)
    return sizes


def not_durable(folder: Path, synced: dict[int, int]) -> set[str]:
    """Files of which a power loss right after the save may cost something."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.name for path in files if synced.get(path.stat().st_ino) != path.stat().st_size}


def test_every_file_of_a_save_is_whole_when_it_is_synced_and_so_are_its_directories(tmp_path, synced):
    ours = saved_by_us(tmp_path / "run")
    assert {path.name for path in ours.iterdir()} >= {".metadata", "COMMITTED", "__0_0.distcp"}
    assert not_durable(ours, synced) == set()
    assert ours.stat().st_ino in synced
    assert ours.parent.stat().st_ino in synced


def test_stock_syncs_no_directory(tmp_path, synced):
    folder = saved_by_stock(tmp_path / "run")
    still_so(folder.stat().st_ino not in synced, "no directory is synced")


def interrupted(monkeypatch, at: int) -> None:
    """Let the process be interrupted while stock writes the tensor of that number."""
    write, written = torch.save, iter(range(100))

    def interrupt(*args: object, **options: object) -> None:
        if next(written) == at:
            raise KeyboardInterrupt
        write(*args, **options)

    monkeypatch.setattr(torch, "save", interrupt)


def test_stock_destroys_the_checkpoint_that_it_was_about_to_overwrite(tmp_path, monkeypatch):
    folder = saved_by_stock(tmp_path, 1.0)
    with monkeypatch.context() as patch:
        interrupted(patch, at=2)
        with pytest.raises((KeyboardInterrupt, CheckpointException)):
            saved_by_stock(folder, 5.0)
    try:
        whole = loaded_by_stock(folder)["t3"][0].item() == 4.0
    except CheckpointException:
        whole = False
    still_so(not whole, "a save that is interrupted destroys what it was about to overwrite")


def test_stock_loads_a_mixture_of_two_saves(tmp_path):
    """As after the death of one of two ranks that were overwriting."""
    old, new = saved_by_stock(tmp_path / "old", 1.0, thread_count=2), tmp_path / "new"
    saved_by_stock(new, 5.0, thread_count=2)
    (old / "__0_1.distcp").write_bytes((new / "__0_1.distcp").read_bytes())
    found = {int(value[0].item()) - number for number, value in enumerate(loaded_by_stock(old).values())}
    still_so(found == {1, 5}, "files of two saves are loaded as one checkpoint")


def test_files_of_two_saves_are_never_loaded_as_one_checkpoint(tmp_path):
    old, new = saved_by_us(tmp_path / "old", 1.0), saved_by_us(tmp_path / "new", 5.0)
    (old / "__0_0.distcp").write_bytes((new / "__0_0.distcp").read_bytes())
    with CheckpointManager(tmp_path / "old") as checkpoints, pytest.raises(CorruptCheckpointError):
        checkpoints.load(state())


# --- failures that nobody hears of --------------------------------------------------------------------------


class HalfBroken(FileSystem):
    """Whatever a spawned thread opens cannot be written; the main thread waits until one has tried."""

    def __init__(self) -> None:
        self.failed = Event()

    def create_stream(self, path: str | os.PathLike[str], mode: str) -> AbstractContextManager[io.IOBase]:
        if threading.current_thread() is not threading.main_thread():
            self.failed.set()
            raise OSError(5, "Input/output error")
        assert self.failed.wait(30)
        return super().create_stream(path, mode)


def test_stock_reports_success_when_a_writing_thread_failed(tmp_path):
    writer = FileSystemWriter(tmp_path, thread_count=2)
    writer.fs = HalfBroken()
    dcp.save(state(), storage_writer=writer)
    still_so((tmp_path / ".metadata").exists(), "a save of which a part is missing is a success")
    with pytest.raises((KeyError, CheckpointException)):
        loaded_by_stock(tmp_path)


def test_stock_keeps_the_failure_of_a_save_to_itself_and_out_of_except_exception(tmp_path):
    future = dcp.async_save(state(), storage_writer=Failing(tmp_path / "run"))
    error = future.exception()
    still_so(not isinstance(error, Exception), "`except Exception` does not catch what a save raises")
    dcp.save(state(), checkpoint_id=tmp_path / "next")  # nobody asked, nobody is told


class Failing(FileSystemWriter):
    """A disk that is full."""

    def write_data(self, plan: object, planner: SavePlanner) -> object:
        raise OSError(28, "No space left on device")


# --- security -----------------------------------------------------------------------------------------------


class Planted:
    """A pickle that runs a command of its own when it is read."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self.trace,)


def test_stock_runs_what_somebody_planted_in_the_metadata(tmp_path):
    folder = saved_by_stock(tmp_path / "run")
    (folder / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "trace")))
    with pytest.raises((CheckpointException, AttributeError)):
        loaded_by_stock(folder)
    still_so((tmp_path / "trace").exists(), "code in `.metadata` is run")


def test_nothing_that_is_planted_in_the_metadata_is_run(tmp_path):
    ours = saved_by_us(tmp_path / "run")
    (ours / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "trace")))
    with CheckpointManager(tmp_path / "run") as checkpoints, pytest.raises(CorruptCheckpointError):
        checkpoints.load(state(), step=1)
    stock = saved_by_stock(tmp_path / "stock")
    (stock / ".metadata").write_bytes(pickle.dumps(Planted(tmp_path / "trace")))
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(UnsafeCheckpointError, match="attack"):
        checkpoints.load(state(), name="stock")
    assert not (tmp_path / "trace").exists()


# --- caches and buffers -------------------------------------------------------------------------------------


@pytest.fixture
def caches() -> Iterator[None]:
    """Stock keeps plans per class and process; leave none behind."""
    names = [name for name in vars(SavePlanner) if name.startswith("_cached")]
    for name in names:
        getattr(SavePlanner, name).clear()
    yield
    for name in names:
        getattr(SavePlanner, name).clear()


@pytest.mark.usefixtures("caches")
def test_stock_records_the_dtype_of_the_save_before(tmp_path):
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        writer = FileSystemWriter(tmp_path / name)
        dcp.save(
            {"w": torch.ones(8, dtype=dtype)},
            storage_writer=writer,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
    told = FileSystemReader(tmp_path / "bf16").read_metadata().state_dict_metadata["w"].properties.dtype
    still_so(told is torch.float32, "a cached plan tells the dtype of an earlier save")


def test_every_save_records_its_own_dtype_and_names(tmp_path):
    states = [
        {"w": torch.ones(8, dtype=torch.float32), "opt": {"a.b": torch.ones(2)}},
        {"w": torch.ones(8, dtype=torch.bfloat16), "opt": {"a": {"b": torch.ones(2)}}},
    ]
    with CheckpointManager(tmp_path) as checkpoints:
        for step, each in enumerate(states, start=1):
            checkpoints.save(step, each).result()
    for step, each in enumerate(states, start=1):
        metadata = FileSystemReader(tmp_path / f"step-00000000{step}").read_metadata()
        assert metadata.state_dict_metadata["w"].properties.dtype is each["w"].dtype
        assert metadata.planner_data["opt.a.b"] == (("opt", "a.b") if step == 1 else ("opt", "a", "b"))


class Gated(FileSystemWriter):
    """Writes when it is told to."""

    def __init__(self, path: Path, gate: Event) -> None:
        super().__init__(path)
        self.gate = gate

    def write_data(self, plan: object, planner: SavePlanner) -> object:
        assert self.gate.wait(30)
        return super().write_data(plan, planner)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="the second stage() of torch 2.11 is a KeyError")
def test_stock_overwrites_copies_that_are_still_being_written(tmp_path):
    stager, gate = DefaultStager(StagingOptions(False, False, False, False)), Event()
    live = {"w": torch.ones(1000)}
    first = dcp.async_save(live, storage_writer=Gated(tmp_path / "1", gate), async_stager=stager)
    live["w"].fill_(2.0)
    second = dcp.async_save(live, storage_writer=Gated(tmp_path / "2", gate), async_stager=stager)
    gate.set()
    first.result(), second.result()
    loaded = {"w": torch.zeros(1000)}
    dcp.load(loaded, checkpoint_id=tmp_path / "1")
    still_so(loaded["w"][0].item() == 2.0, "a stager that is used again overwrites the save before")
