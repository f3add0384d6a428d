"""A further tier that is down, slow or wrong costs a save a moment, a resume a bounded time, an end 2 s."""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext

import pytest
import torch

from ckpt_core import CheckpointManager, Upload, UploadError
from ckpt_core.commit import Catalog, Lease, Owner, verify
from ckpt_core.errors import ConfigError, LoadError, RootBusyError
from ckpt_core.storage import LocalStorage, Storage, object_storage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.tiers import FurtherTier
from ckpt_core.tiers.uploading import _tier_uploads
from tests.kit.memory import MemoryStorage
from tests.support.service_faults import ServiceControl, ServiceFault
from tests.unit.commit.checkpoints import bucket_like

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state_of(step: int):
    return {"w": torch.arange(300.0) + step}


def steps(storage: Storage) -> list[int]:
    return [info.step for info in Catalog(storage).committed()]


def uploading() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(("ckpt-upload", "ckpt-tier"))]


class Answer:
    """A tier whose every request hangs until it is told how to go on."""

    def __init__(self, inner: Storage | None = None) -> None:
        self.inner = inner or MemoryStorage("tier")
        self.told: Future[None] = Future()
        self.storage = FaultyStorage(self.inner, [Fault(before=lambda _: self.told.result(60))])

    def well(self) -> None:
        self.told.set_result(None)

    def no(self, error: Exception) -> None:
        self.told.set_exception(error)

    def again(self) -> None:
        self.told = Future()


@pytest.fixture(autouse=True)
def moment(monkeypatch):
    monkeypatch.setattr(_tier_uploads, "_MOMENT_SECONDS", 0.1)


def test_a_first_save_waits_a_moment_for_all_tiers_together_and_uploads_when_they_answer(tmp_path, caplog):
    near, far = Answer(MemoryStorage("near")), Answer(MemoryStorage("far"))
    manager = CheckpointManager(tmp_path, upload=[Upload(near.storage), Upload(far.storage)])
    began = time.monotonic()
    handles = [manager.save(1, state_of(1))]
    handles[0].result(60)
    handles.append(manager.save(2, state_of(2)))
    handles[1].result(60)
    assert time.monotonic() - began < 2
    assert caplog.text.count("has not answered yet: saves go on, uploads are tried later") == 2
    near.well()
    far.well()
    assert handles[1].uploaded.result(60).step == 2
    manager.close()
    assert steps(far.inner)[-1] == steps(near.inner)[-1] == 2
    assert uploading() == []


@pytest.mark.parametrize("on_error", ["warn", "raise"])
@pytest.mark.parametrize("first", ["hangs", "down"])
def test_a_refusal_that_comes_late_is_raised_at_the_next_save(tmp_path, first, on_error):
    tier = Answer()
    if first == "down":
        tier.no(ConnectionError("down"))
    with CheckpointManager(tmp_path, upload=Upload(tier.storage, on_error=on_error)) as manager:
        handle = manager.save(1, state_of(1))
        handle.result(60)
        if first == "down":
            tier.again()
        tier.no(PermissionError("keys are refused"))
        handle.uploaded.exception(60)
        with pytest.raises(
            UploadError, match=r"nothing can be uploaded to memory://tier: .*keys are refused"
        ):
            manager.save(2, state_of(2))
        tier.again()
        tier.well()
        manager.save(3, state_of(3)).uploaded.result(60)  # mended meanwhile
        manager.save(4, state_of(4)).uploaded.result(60)
    assert steps(LocalStorage(tmp_path)) == [1, 3, 4]
    assert steps(tier.inner) == [3, 4]


@pytest.mark.parametrize("on_error", ["warn", "raise"])
def test_the_save_at_a_preemption_is_never_refused_for_an_upload(tmp_path, on_error):
    tier = Answer()
    with (
        pytest.raises(UploadError) if on_error == "raise" else nullcontext(),
        CheckpointManager(tmp_path, upload=Upload(tier.storage, on_error=on_error)) as manager,
    ):
        handle = manager.save(1, state_of(1))
        handle.result(60)
        tier.no(PermissionError("keys are refused"))
        handle.uploaded.exception(60)
        manager._cadence.preempted = True
        manager.save(2, state_of(2)).result(60)
    assert steps(LocalStorage(tmp_path)) == [1, 2]


def test_what_is_wrong_and_answers_at_once_is_refused_before_the_first_save(tmp_path):
    wrong = [FileNotFoundError("no such bucket"), PermissionError("keys are refused")]
    for number, error in enumerate(wrong):
        tier, other = Answer(), Answer()
        tier.no(error)
        root = tmp_path / str(number)
        with CheckpointManager(root, upload=[Upload(other.storage), Upload(tier.storage)]) as manager:
            with pytest.raises(ConfigError, match="memory://tier"):
                manager.save(1, state_of(1))
            assert manager.options.uploads[1].url == "memory://tier"
        assert steps(LocalStorage(root)) == []
        other.well()  # the claim that was under way is given back
        until = time.monotonic() + 30
        while uploading() or Owner.of(other.inner) is not None:
            assert time.monotonic() < until
            time.sleep(0.01)


def with_a_newer_step_in_the_tier(root, tier: Answer) -> None:
    tier.well()
    with CheckpointManager(root, upload=Upload(tier.storage)) as manager:
        manager.save(1, state_of(1))
    with CheckpointManager(tier.storage) as elsewhere:
        elsewhere.resume(state_of(0))
        elsewhere.save(2, state_of(2))
    tier.again()


def listings(storage: FaultyStorage) -> int:
    return sum(1 for each in storage.operations if each.method in {"list", "directories"} and each.key == "")


def test_a_resume_waits_for_a_slow_tier_and_continues_its_lineage(tmp_path, caplog):
    tier = Answer()
    with_a_newer_step_in_the_tier(tmp_path, tier)
    threading.Timer(0.4, tier.well).start()
    with CheckpointManager(tmp_path, upload=Upload(tier.storage)) as manager:
        state = state_of(0)
        assert manager.resume(state) == 2
        assert torch.equal(state["w"], state_of(2)["w"])
        manager.save(3, state_of(3)).uploaded.result(60)
        assert [info.step for info in manager.checkpoints()] == [1, 2, 3]
    assert "lineage" not in caplog.text


def test_a_resume_without_an_answer_ends_in_bounded_time_and_says_how_to_go_on(tmp_path, monkeypatch, caplog):
    from ckpt_core.tiers import _tier

    tier = Answer()
    with_a_newer_step_in_the_tier(tmp_path, tier)
    monkeypatch.setattr(_tier, "_SAID_AFTER", 0.1)
    monkeypatch.setattr(FurtherTier.__init__, "__defaults__", (0.3,))
    options = {"upload": Upload(tier.storage), "deadline_seconds": 0.9}
    manager = CheckpointManager(tmp_path, journal=False, **options)
    before = len(tier.storage.operations)
    with pytest.raises(LoadError, match="the newest known is step 1") as refusal:
        manager.resume(state_of(0))
    assert "no answer to a listing within 0.3 s" in str(refusal.value)
    assert "To go on without it, stop, and load a checkpoint of another tier by its step" in caplog.text
    assert len(tier.storage.operations) - before == 1  # it was asked once
    assert manager.load(state_of(0), step=1) is not None
    tier.well()
    manager.close()


@pytest.mark.parametrize("tier", ["posix", "bucket"])
def test_a_resume_lists_a_tier_once(tmp_path, tier):
    counted = FaultyStorage(MemoryStorage("tier") if tier == "posix" else bucket_like())
    with CheckpointManager(tmp_path, upload=Upload(counted)) as manager:
        manager.save(1, state_of(1))
    before = len(counted.operations)
    with CheckpointManager(tmp_path, upload=Upload(counted)) as manager:
        assert manager.resume(state_of(0)) == 1
    # Of this size check, this listing, and the one that looks for what is newer and does not count.
    assert [each.key for each in counted.operations[before:] if each.method == "read"].count(
        "step-000000001/COMMITTED"
    ) <= 2


@pytest.mark.parametrize("ranks_leave", [False, True])
def test_an_end_takes_the_deadline_and_little_more_and_the_tier_is_given_back_later(tmp_path, ranks_leave):
    tier = Answer()
    manager = CheckpointManager(tmp_path, upload=Upload(tier.storage, deadline_seconds=0.2))
    manager.save(1, state_of(1)).result(60)
    began = time.monotonic()
    manager.close(wait_for_uploads=not ranks_leave)
    assert time.monotonic() - began < 0.2 + _tier_uploads._END_SECONDS + 1
    tier.well()
    for thread in uploading():
        thread.join(30)
    assert uploading() == []
    until = time.monotonic() + 30
    while Owner.of(tier.inner) is not None:
        assert time.monotonic() < until
        time.sleep(0.01)


class Mute:
    """A service that takes connections and never answers."""

    def __init__(self) -> None:
        self.taken = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self._connections: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        self._thread = threading.Thread(target=self._take, daemon=True)
        self._thread.start()

    def _take(self) -> None:
        while True:
            try:
                self._connections.append(self._server.accept()[0])
            except OSError:
                return
            self.taken.set()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # wakes up `accept`
        self._thread.join(60)
        for each in (self._server, *self._connections):
            each.close()


def test_requests_of_botocore_under_way_are_cancelled_at_the_end(tmp_path):
    pytest.importorskip("botocore")
    service = Mute()
    options = {"key": "k", "secret": "s", "endpoint_url": service.url, "client_kwargs": {"region_name": "x"}}
    upload = Upload("s3://bucket/run", deadline_seconds=0.1, storage_options=options)
    manager = CheckpointManager(tmp_path, upload=upload)
    manager.save(1, state_of(1)).result(60)
    assert service.taken.wait(60)
    began = time.monotonic()
    manager.close()
    assert time.monotonic() - began < 2.5
    for thread in uploading():
        thread.join(5)
    assert uploading() == []
    service.close()


@pytest.mark.parametrize("client", ["botocore", "obstore"])
def test_a_time_out_is_told_as_one_with_its_place_and_seconds(client):
    service = Mute()
    options = {"endpoint_url": service.url, "request_seconds": 1.0}
    if client == "obstore":
        pytest.importorskip("obstore")
        storage, options = "gs://bucket/run", {**options, "token": "anon"}
    else:
        pytest.importorskip("botocore")
        storage, options = "s3://bucket/run", {**options, "key": "aKey", "secret": "hushhush"}
        options |= {"client_kwargs": {"region_name": "us-east-1"}}
    tier = object_storage(storage, **options)
    for call in (lambda: tier.list(""), lambda: tier.replace("a", b"a")):
        with pytest.raises(TimeoutError) as failure:
            call()
        told = re.search(
            r"no answer from the object store within ([0-9.]+) s, further tries", str(failure.value)
        )
        assert told is not None, str(failure.value)
        assert 0.2 < float(told[1]) < 5
        assert failure.value.filename == storage
    service.close()


@pytest.mark.emulator
@pytest.mark.parametrize("hangs", ["*__0_0.distcp*", "*COMMITTED*", "*writer.json*"])
def test_an_upload_that_hangs_anywhere_is_cancelled_at_the_end_without_an_error(
    tmp_path, s3_endpoint, caplog, hangs
):
    boto3 = pytest.importorskip("boto3")
    service, bucket = ServiceControl(s3_endpoint), f"hangs-{len(hangs)}"
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    cloud = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **keys)
    cloud.create_bucket(Bucket=bucket)
    options = {"key": "testing", "secret": "testing", "endpoint_url": s3_endpoint}
    upload = Upload(f"s3://{bucket}/run", deadline_seconds=0.3, storage_options=options)
    manager = CheckpointManager(tmp_path, upload=upload)
    manager.save(1, state_of(1)).uploaded.result(60)
    service.set(ServiceFault(action="hang", target=f"*{bucket}/run/{hangs}", count=None))
    try:
        handle = manager.save(2, state_of(2))
        handle.result(60)
        began = time.monotonic()
        manager.close()
        assert time.monotonic() - began < 4
        for thread in uploading():
            thread.join(20)  # one may wait between two tries
        assert uploading() == []
    finally:
        service.clear()
        service.release()
    assert handle.uploaded.result(60) is None
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.emulator
@pytest.mark.parametrize("what", ["denied", "expired", "deleted"])
def test_credentials_that_end_and_a_bucket_that_goes_in_mid_run_are_told_once_and_recovered_from(
    tmp_path, s3_endpoint, caplog, what
):
    boto3 = pytest.importorskip("boto3")
    service, bucket = ServiceControl(s3_endpoint), f"gone-{what}"
    keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
    cloud = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **keys)
    cloud.create_bucket(Bucket=bucket)
    options = {"key": "testing", "secret": "testing", "endpoint_url": s3_endpoint}
    upload = Upload(f"s3://{bucket}/run", deadline_seconds=0.3, storage_options=options)
    with CheckpointManager(tmp_path, upload=upload) as manager:
        manager.save(1, state_of(1)).uploaded.result(60)
        if what == "deleted":
            for each in cloud.list_objects_v2(Bucket=bucket)["Contents"]:
                cloud.delete_object(Bucket=bucket, Key=each["Key"])
            cloud.delete_bucket(Bucket=bucket)
        else:
            code = {"denied": "AccessDenied", "expired": "ExpiredToken"}[what]
            service.set(ServiceFault(action="error", code=code, count=None, target=f"*{bucket}*"))
        try:
            failure = str(manager.save(2, state_of(2)).uploaded.exception(60))
        finally:
            service.clear()
        if what == "deleted":
            cloud.create_bucket(Bucket=bucket)
        assert f"step 2 is not in s3://{bucket}/run" in failure
        assert {
            "denied": "check the credentials of this job and what they allow",
            "expired": "the credentials of this job have expired; renew them",
            "deleted": "bucket does not exist",
        }[what] in failure
        assert manager.save(3, state_of(3)).uploaded.result(60).step == 3
    told = [record for record in caplog.records if "step 2 is not in" in record.getMessage()]
    assert [record.levelname for record in told] == ["WARNING", "ERROR"]
    assert steps(manager.storage) == [1, 2, 3]


def test_a_claim_that_was_removed_is_made_again_and_that_of_another_job_respected(tmp_path, caplog):
    for tier in (LocalStorage(tmp_path / "share"), MemoryStorage("posix"), bucket_like()):
        with CheckpointManager(tmp_path / tier.url.replace("/", "-"), upload=Upload(tier)) as manager:
            manager.save(1, state_of(1)).uploaded.result(60)
            tier.delete(".ckpt-suite/writer.json")
            manager.save(2, state_of(2)).uploaded.result(60)
            assert "writer.json was removed while this job holds the root, and is there again" in caplog.text
            assert Owner.of(tier) is not None
            tier.replace(".ckpt-suite/writer.json", b"not ours")
            failure = manager.save(3, state_of(3)).uploaded.exception(60)
            assert f"{tier.url} was taken over by another job, whose claim cannot be read" in str(failure)
            assert "its saves go on" in str(failure)
            assert "stopped saving" not in str(failure)
            assert steps(manager.storage) == [1, 2, 3]
            tier.delete(".ckpt-suite/writer.json")
            manager.save(4, state_of(4)).uploaded.result(60)
        assert steps(tier) == [1, 2, 4]


def test_a_job_whose_claim_was_removed_by_another_begins_its_upload_again():
    """Another job may have come and gone, and deleted what was torn."""
    inner, visits = bucket_like(), [None]

    def come_and_go(_) -> None:
        if not visits:
            return
        visits.clear()
        with Lease.acquire(inner, "another"):
            inner.delete("step-000000001/manifest.json")
            inner.delete("step-000000001/__0_0.distcp")

    tier = FaultyStorage(inner, [Fault(method="create", key="*shared.json", before=come_and_go)])
    with CheckpointManager(MemoryStorage("root"), upload=Upload(tier)) as manager:
        assert manager.save(1, state_of(1)).uploaded.result(60).step == 1
    (there,) = Catalog(inner).committed()  # by another name: what is left under its own is torn
    assert verify(inner, there.name) == []


def test_a_directory_that_was_moved_away_is_not_made_again_and_goes_on_when_it_is_back(tmp_path):
    tier, away = tmp_path / "tier", tmp_path / "away"
    for left in ("nothing", "an empty mount point"):
        upload = Upload(tier, deadline_seconds=0.1)
        with CheckpointManager(tmp_path / left, upload=upload) as manager:
            manager.save(1, state_of(1)).uploaded.result(60)
            tier.rename(away)
            if left != "nothing":
                tier.mkdir()
            failure = str(manager.save(2, state_of(2)).uploaded.exception(60))
            assert f"was moved, deleted or unmounted; bring it back, or restart: '{tier}'" in failure
            assert not tier.exists() or list(tier.iterdir()) == []
            if tier.exists():
                tier.rmdir()
            away.rename(tier)
            assert manager.save(3, state_of(3)).uploaded.result(60).step == 3
        assert steps(LocalStorage(tier)) == [1, 3]
        shutil.rmtree(tier)
    with CheckpointManager(tmp_path / "run", upload=tier) as manager:
        manager.save(1, state_of(1)).uploaded.result(60)
        tier.rename(away)
    assert not tier.exists()  # nor by the journal, which tells of the end


def test_what_was_due_for_a_tier_that_the_next_run_does_not_have_is_named(tmp_path, caplog):
    with CheckpointManager(tmp_path / "run", upload=tmp_path / "one") as manager:
        manager.save(1, state_of(1))
        manager.close(wait_for_uploads=False)
    before = (tmp_path / "one" / "step-000000001").exists()
    with CheckpointManager(tmp_path / "run", upload=tmp_path / "other") as manager:
        assert manager.resume(state_of(0)) == 1
    assert steps(LocalStorage(tmp_path / "other")) == [1]
    told = (
        f"step(s) 1 were due for {tmp_path}/one, where this run uploads nothing: `ckpt upload {tmp_path}/run"
    )
    assert (told in caplog.text) is not before


def test_a_root_never_claims_itself_again(tmp_path):
    with Lease.acquire(LocalStorage(tmp_path), "job") as lease:
        (tmp_path / ".ckpt-suite/writer.json").unlink()
        with pytest.raises(RootBusyError, match="its claim was removed"):
            lease.check()
        lease.check(reclaim=True)
        lease.check()


def test_of_two_that_claim_again_in_a_bucket_one_is_fenced():
    tier = bucket_like()
    first, second = Lease.acquire(tier, "first"), Lease.acquire(tier, "second")
    tier.delete(".ckpt-suite/writer.json")
    second.check(reclaim=True)
    with pytest.raises(RootBusyError, match="taken over by second"):
        first.check(reclaim=True)
