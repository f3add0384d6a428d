"""`upload=`: due checkpoints reach the further tier, whatever happens, and training never waits for it."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from fnmatch import fnmatch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from ckpt_core import CheckpointManager, EverySteps, KeepLatest, Upload, UploadError
from ckpt_core.commit import Catalog, Lease, verify
from ckpt_core.errors import ConfigError, RootBusyError
from ckpt_core.storage import LocalStorage, Storage, object_storage
from ckpt_core.telemetry import InMemorySink
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.tiers import read_tiers
from tests.kit.memory import MemoryStorage
from tests.unit.commit.checkpoints import bucket_like

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(step: int):
    return {"w": torch.arange(3000.0) + step, "note": {"step": step}}


def names(storage: Storage) -> list[str]:
    return [info.name for info in Catalog(storage).committed()]


def steps(storage: Storage) -> list[int]:
    return [info.step for info in Catalog(storage).committed()]


def saved(manager: CheckpointManager, *to_save: int, wait: bool = False):
    handles = []
    for step in to_save:
        handles.append(manager.save(step, state_of(step)))
        handles[-1].result(60)
        if wait:
            handles[-1].uploaded.result(60)
    return handles


class Gate:
    """A tier in which uploads wait until they are let through."""

    def __init__(self, key: str = "*.distcp") -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self.storage = FaultyStorage(
            MemoryStorage("gate"), [Fault(method="create", key=key, before=self._wait)]
        )

    def _wait(self, _) -> None:
        self.reached.set()
        assert self.opened.wait(60)


class Failing:
    """A tier that fails until `error` is taken away."""

    def __init__(self, error: BaseException | None, *, method: str = "create", key: str = "*.distcp") -> None:
        self.error = error
        self.storage = FaultyStorage(
            MemoryStorage("failing"), [Fault(method=method, key=key, before=self._fail)]
        )

    def _fail(self, _) -> None:
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_every_due_checkpoint_is_a_root_of_its_own_in_the_tier_byte_by_byte(tmp_path, kind):
    root = tmp_path / "root"
    tier = LocalStorage(tmp_path / "share") if kind == "disk" else bucket_like()
    to = tmp_path / "share" if kind == "disk" else tier
    sink = InMemorySink()
    with CheckpointManager(root, upload=Upload(to, every=2), save=EverySteps(1), sinks=[sink]) as manager:
        handles = [manager.maybe_save(step, state_of(step)) for step in range(1, 6)]
        outcomes = [handle.uploaded.result(60) for handle in handles]
    assert [info and info.step for info in outcomes] == [None, 2, None, 4, None]
    assert steps(tier) == [2, 4, 5]  # the last one in any case
    assert [failure for name in names(tier) for failure in verify(tier, name)] == []
    for name in names(tier):
        for path in (root / name).iterdir():
            assert tier.read_bytes(f"{name}/{path.name}") == path.read_bytes()
    assert len(sink.finished("upload")) == 3
    shutil.rmtree(root)
    with CheckpointManager(to) as alone:
        state = state_of(0)
        assert alone.resume(state) == 5
        assert torch.equal(state["w"], state_of(5)["w"])
    if kind == "disk":
        state = {"w": torch.zeros(3000)}
        dcp.load(state, checkpoint_id=tmp_path / "share" / "step-000000004")
        assert torch.equal(state["w"], state_of(4)["w"])


def test_with_several_tiers_a_save_is_uploaded_when_the_last_one_has_it():
    near, far = Gate(), MemoryStorage("far")
    with CheckpointManager(MemoryStorage("root"), upload=[Upload(near.storage), Upload(far)]) as manager:
        (handle,) = saved(manager, 1)
        while steps(far) != [1]:
            time.sleep(0.01)
        assert not handle.uploaded.done()
        near.opened.set()
        assert handle.uploaded.result(60).step == 1


def test_a_due_checkpoint_is_not_pruned_before_it_is_in_the_tier_or_overtaken(tmp_path):
    gate = Gate()
    root = LocalStorage(tmp_path)
    options = {"keep": KeepLatest(1), "on_error": "raise"}
    with CheckpointManager(root, upload=Upload(gate.storage, when_busy="overtake"), **options) as manager:
        first, *between, last = saved(manager, 1, 2, 3, 4)
        assert gate.reached.wait(60)
        manager.wait()
        assert steps(root) == [1, 4]  # running, and waiting; 2 and 3 were overtaken
        (record,) = read_tiers(root)
        assert [len(record.due), record.due[-1]] == [2, "step-000000004"]
        with pytest.raises(ConfigError, match="its upload has not ended"):
            manager.discard("step-000000001")
        assert 1 in manager.prune(dry_run=True).keep
        gate.opened.set()
        assert first.uploaded.result(60).step == 1
        assert [handle.uploaded.result(60) for handle in between] == [None, None]
        assert last.uploaded.result(60).step == 4
        assert [info.step for info in manager.prune().drop] == [1]
    assert steps(gate.storage) == [1, 4]


def test_a_queue_uploads_all_and_a_save_waits_where_it_must(tmp_path):
    gate = Gate()
    with CheckpointManager(tmp_path / "a", upload=Upload(gate.storage, when_busy="queue")) as manager:
        saved(manager, 1, 2, 3)
        gate.opened.set()
    assert steps(gate.storage) == [1, 2, 3]

    gate = Gate()
    with CheckpointManager(tmp_path / "b", upload=Upload(gate.storage, when_busy="wait")) as manager:
        saved(manager, 1)
        assert gate.reached.wait(60)
        saved(manager, 2)
        opener = threading.Timer(0.2, gate.opened.set)
        opener.start()
        third = manager.save(3, state_of(3))  # waits until 2 has begun, so until 1 has ended
        assert gate.opened.is_set()
        assert third.uploaded.result(60).step == 3
    assert steps(gate.storage) == [1, 2, 3]


def test_each_tier_has_its_own_retention_and_keeps_its_newest_until_a_newer_one_is_there():
    broken = Failing(None, key="*COMMITTED")
    root, tier = MemoryStorage("root"), broken.storage
    upload = Upload(tier, every=2, keep=KeepLatest(1), deadline_seconds=0.5)
    with CheckpointManager(root, upload=upload, keep=KeepLatest(3)) as manager:
        saved(manager, 1, 2, 3, 4, 5, wait=True)
        manager.wait()
        assert (steps(root), steps(tier)) == ([3, 4, 5], [4])
        broken.error = OSError("no")
        saved(manager, 6)
        assert steps(tier) == [4]
    assert steps(tier) == [4]


@pytest.mark.parametrize("kind", ["posix", "bucket"])
def test_what_a_run_has_left_is_uploaded_by_the_next_and_continued_from_where_it_was(tmp_path, kind):
    inner = MemoryStorage("tier") if kind == "posix" else bucket_like()
    tier = FaultyStorage(inner, [Fault(key="*shared.json", method="create", error=TimeoutError("down"))])
    options = {"save": EverySteps(1), "keep": KeepLatest(3)}
    with CheckpointManager(tmp_path, upload=Upload(tier, deadline_seconds=0.3), **options) as manager:
        saved(manager, 1)
    assert steps(inner) == []
    again = FaultyStorage(inner)
    with CheckpointManager(tmp_path, upload=Upload(again), **options) as manager:
        assert manager.resume(state_of(0)) == 1
    assert steps(inner) == [1]
    collected = ".trash-*" if kind == "posix" else "*/manifest.json"
    removed = [one.key for one in again.operations if one.method in {"rename", "delete"}]
    assert not any(fnmatch(key.rpartition(" -> ")[2], collected) for key in removed)
    assert [entry.name for entry in inner.list("") if entry.name.startswith(".")] == [".ckpt-suite"]


def test_the_next_run_uploads_only_what_is_due_and_newer_than_the_tier(tmp_path):
    root, tier = LocalStorage(tmp_path), MemoryStorage("tier")
    gone = Failing(ConnectionError("down"), method="*", key="*").storage
    upload = {"every": 2, "deadline_seconds": 0.05, "when_busy": "queue", "on_preemption": "leave"}
    with CheckpointManager(root, upload=Upload(gone, **upload), save=EverySteps(1)) as manager:
        for step in range(1, 8):
            manager.maybe_save(step, state_of(step)).result(60)
        manager.close(wait_for_uploads=False)
    (tmp_path / ".ckpt-suite/tiers.json").unlink()
    upload["deadline_seconds"] = 60
    with CheckpointManager(root, upload=Upload(tier, **upload), save=EverySteps(1)) as manager:
        manager.resume(state_of(0))
    assert steps(tier) == [2, 4, 6]


@pytest.mark.parametrize("when_busy", ["overtake", "queue"])
@pytest.mark.parametrize("kind", ["disk", "bucket"])
def test_an_unfinished_upload_that_the_next_run_does_not_continue_is_removed(tmp_path, kind, when_busy):
    inner = LocalStorage(tmp_path / "tier") if kind == "disk" else bucket_like()
    tried = threading.Event()
    failing = Fault(key="*.distcp", before=lambda _: tried.set(), error=OSError("cut"))
    upload = {"deadline_seconds": 60, "on_preemption": "leave", "when_busy": when_busy}
    root = tmp_path / "root"
    with CheckpointManager(root, upload=Upload(FaultyStorage(inner, [failing]), **upload)) as manager:
        saved(manager, 1)
        assert tried.wait(10)
        manager.close(wait_for_uploads=False)
    with CheckpointManager(root) as manager:
        manager.resume(state_of(0))
        saved(manager, 2)
    assert [entry.name for entry in inner.list("") if "step-000000001" in entry.name]
    with CheckpointManager(root, upload=Upload(inner, **upload)) as manager:
        manager.resume(state_of(0))
    assert steps(inner) == ([2] if when_busy == "overtake" else [1, 2])
    left = [entry.name for entry in inner.list("") if "step-" in entry.name]
    assert left == names(inner)


def test_training_starts_and_goes_on_while_the_tier_is_down_and_uploads_when_it_is_back(tmp_path, caplog):
    down = Failing(ConnectionError("down"), method="*", key="*")
    with CheckpointManager(tmp_path, upload=Upload(down.storage)) as manager:
        (handle,) = saved(manager, 1)
        down.error = None
        assert handle.uploaded.result(60).step == 1
    assert "cannot be reached (ConnectionError: down): saves go on, uploads are tried later" in caplog.text
    assert steps(down.storage) == [1]


def test_a_failed_upload_is_reported_once_and_stops_training_only_where_it_must(tmp_path, caplog):
    tier = Failing(PermissionError("credentials have expired")).storage
    sink = InMemorySink()
    upload = Upload(tier, deadline_seconds=0.01)
    with CheckpointManager(tmp_path / "a", upload=upload, sinks=[sink]) as manager:
        (first,) = saved(manager, 1)
        assert "credentials have expired" in str(first.uploaded.exception(60))
        saved(manager, 2)
    assert len([each for each in sink.finished("upload.failed") if each.attributes["step"] == 1]) == 1
    assert caplog.text.count("ERROR") >= 1

    upload = Upload(tier, deadline_seconds=0.01, on_error="raise")
    with CheckpointManager(tmp_path / "b", upload=upload) as manager:
        (first,) = saved(manager, 1)
        first.uploaded.exception(60)
        with pytest.raises(UploadError, match="step 1 is not in memory://failing"):
            manager.save(2, state_of(2))


def test_a_damaged_local_checkpoint_is_not_uploaded(tmp_path):
    gate = Gate("*manifest.json")
    with CheckpointManager(tmp_path, upload=Upload(gate.storage)) as manager:
        (handle,) = saved(manager, 1)
        assert gate.reached.wait(60)
        data = tmp_path / "step-000000001" / "__0_0.distcp"
        content = bytearray(data.read_bytes())
        content[len(content) // 2] ^= 1
        data.chmod(0o600)
        data.write_bytes(content)
        gate.opened.set()
        assert "__0_0.distcp" in str(handle.uploaded.exception(60))
        assert steps(gate.storage) == []


def open_once_left(gate: Gate, caplog) -> None:
    until = time.monotonic() + 30
    while "not yet in" not in caplog.text and time.monotonic() < until:
        time.sleep(0.01)
    gate.opened.set()


@pytest.mark.parametrize("how", ["deadline", "preemption", "exception"])
def test_the_end_waits_for_uploads_up_to_a_limit_and_names_the_rest(tmp_path, caplog, how):
    caplog.set_level(logging.INFO)
    gate = Gate()
    seconds = 0.1 if how == "deadline" else 600.0
    manager = CheckpointManager(
        tmp_path, upload=Upload(gate.storage, deadline_seconds=seconds, on_preemption="leave")
    )
    (handle,) = saved(manager, 1)
    assert gate.reached.wait(60)
    hangs = threading.Thread(target=open_once_left, args=(gate, caplog))
    hangs.start()
    if how == "exception":
        with pytest.raises(KeyError), manager:
            raise KeyError
    else:
        if how == "preemption":
            manager._cadence.preempted = True
        manager.close()
    assert "not yet in memory://gate: step(s) 1; the next run uploads the rest" in caplog.text
    assert f"`ckpt upload {tmp_path} --to memory://gate`" in caplog.text
    assert handle.uploaded.result(60) is None
    assert list(read_tiers(LocalStorage(tmp_path))[0].due) == ["step-000000001"]
    assert steps(gate.storage) == []


def test_storage_that_hangs_for_good_holds_up_no_end(tmp_path, caplog):
    gate = Gate()
    with CheckpointManager(tmp_path, upload=Upload(gate.storage, deadline_seconds=0.1)) as manager:
        saved(manager, 1)
        assert gate.reached.wait(60)
    assert "not yet in memory://gate: step(s) 1" in caplog.text
    assert not gate.opened.is_set()
    gate.opened.set()


@pytest.mark.emulator
def test_a_bucket_is_a_tier_whose_secrets_are_nowhere(tmp_path, s3_endpoint, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG, logger="ckpt_core")
    boto3 = pytest.importorskip("boto3")
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "hushhush"}
    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **keys)
    client.create_bucket(Bucket="tiers-of-uploads")
    options = {"key": "testing", "secret": "hushhush", "endpoint_url": s3_endpoint}
    upload = {"to": "s3://tiers-of-uploads/run", "keep": {"latest": 1}, "storage_options": options}
    with CheckpointManager(tmp_path / "run", upload=upload) as manager:
        saved(manager, 2)
    shutil.rmtree(tmp_path / "run")
    with CheckpointManager(upload["to"], storage_options=options) as alone:
        assert [info.step for info in alone.checkpoints()] == [2]
        assert alone.verify() == []
    assert "hushhush" not in caplog.text + repr(manager.options)
    assert all(b"hushhush" not in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_tier_that_can_never_be_written_is_refused_before_the_first_save(tmp_path):
    for error in (FileNotFoundError("no such bucket"), PermissionError("keys are refused")):
        tier = Failing(error, method="check_root", key="*").storage
        with CheckpointManager(tmp_path / "run", upload=Upload(tier)) as manager:
            with pytest.raises(ConfigError, match="memory://failing"):
                manager.save(1, state_of(1))
            assert manager.checkpoints() == []


def test_no_thread_is_left_after_the_end(tmp_path):
    with CheckpointManager(tmp_path, upload=Upload(MemoryStorage("tier"), bandwidth="10 MB/s")) as manager:
        saved(manager, 1)
    assert not [each.name for each in threading.enumerate() if each.name.startswith("ckpt-upload")]


def test_tiers_that_are_one_place_are_refused_at_the_start(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "run")
    for root, upload in [
        (tmp_path / "run", tmp_path / "run"),
        (tmp_path / "run", tmp_path / "run" / "up"),
        (tmp_path / "run", tmp_path),
        (tmp_path / "run", tmp_path / "link"),
        (tmp_path / "run", [Upload("memory://b/run"), Upload("memory://b/run/")]),
        ("memory://b/run", "memory://b/run/up"),
    ]:
        with pytest.raises(ConfigError, match="a further tier needs a place of its own"):
            CheckpointManager(root, upload=upload)
    assert not (tmp_path / "run").exists()
    CheckpointManager(tmp_path / "run", upload=[tmp_path / "running", "memory://b/run"]).close()


def test_a_tier_that_another_job_uploads_to_is_refused_before_the_first_save(tmp_path):
    with (
        Lease.acquire(LocalStorage(tmp_path / "tier"), "another"),
        CheckpointManager(tmp_path / "run", upload=tmp_path / "tier") as manager,
        pytest.raises(RootBusyError, match="is held by another in this very process"),
    ):
        manager.save(1, state_of(1))
    assert steps(LocalStorage(tmp_path / "run")) == []


def test_without_an_upload_a_save_is_uploaded_on_commit_and_notes_nothing(tmp_path):
    with CheckpointManager(tmp_path) as manager:
        (handle,) = saved(manager, 1)
        assert handle.uploaded is handle.committed
    assert dict(Catalog(LocalStorage(tmp_path)).manifest("step-000000001").annotations) == {}
    assert not (tmp_path / ".ckpt-suite/tiers.json").exists()


def test_an_abandoned_name_in_the_tier_does_not_stop_a_run_that_went_back(tmp_path):
    tier = object_storage("memory://wentback/run")
    options = {"upload": Upload(tier), "keep": KeepLatest(1), "abandoned": "prune"}
    with CheckpointManager(tmp_path, **options) as manager:
        saved(manager, 1, 2, 3, wait=True)
        manager.load(state := state_of(0), step=3)
        manager.start_afresh()
        (handle,) = saved(manager, 2)
        assert handle.uploaded.result(60).step == 2
        assert state["note"] == {"step": 3}
    found = [info for info in Catalog(tier).committed(abandoned=True) if info.step == 2]
    assert len(found) == 2


def test_a_tier_given_by_a_relative_path_is_recorded_by_its_absolute_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("root", upload=Upload("durable")) as checkpoints:
        checkpoints.save(1, state_of(1))
    monkeypatch.chdir("/")
    assert [each.url for each in read_tiers(LocalStorage(tmp_path / "root"))] == [str(tmp_path / "durable")]
    assert steps(LocalStorage(tmp_path / "durable")) == [1]


@pytest.mark.parametrize("when_busy", ["overtake", "wait", "queue"])
def test_what_becomes_due_after_a_later_manager_took_the_tier_is_left_and_says_so(tmp_path, when_busy):
    upload = Upload(str(tmp_path / "tier"), when_busy=when_busy, deadline_seconds=5)
    with CheckpointManager(tmp_path / "a", upload=upload) as earlier:
        assert earlier.save(1, state_of(1)).uploaded.result(30).step == 1
        with CheckpointManager(tmp_path / "b", upload=upload) as later:
            later.resume(state_of(0))
            assert later.save(5, state_of(5)).uploaded.result(30).step == 5
            for step in (2, 3):
                handle = earlier.save(step, state_of(step))
                assert handle.result().step == step
                assert handle.uploaded.result(30) is None
    assert steps(LocalStorage(tmp_path / "tier")) == [1, 5]
