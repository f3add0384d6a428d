"""P3 on an object store: late, lost, hung and refused requests, lagging listings, replaced jobs."""

from __future__ import annotations

import secrets
import socket
import time

import pytest

from ckpt_core import CheckpointManager, KeepLatest, RootBusyError, SaveError
from ckpt_core.commit import Catalog, collect_orphans, remove, verify
from ckpt_core.errors import CheckpointExistsError
from ckpt_core.names import OWN
from ckpt_core.root import _ownership
from ckpt_core.storage import object_storage
from tests.reliability.objects.filled import state_of, value_of
from tests.reliability.sampling import sample
from tests.support.service_faults import ServiceControl, ServiceFault

pytestmark = [pytest.mark.reliability, pytest.mark.emulator]

MIB = 2**20


class Bucket:
    """A bucket of an emulator with faults, and managers on one root in it."""

    def __init__(self, endpoint, client):
        self.endpoint, self.client = endpoint, client
        self.name = f"bucket-{secrets.token_hex(8)}"
        self.control = ServiceControl(endpoint)
        client.create_bucket(Bucket=self.name)

    def storage(self, who="job", *, request_seconds=20.0, **options):
        return object_storage(
            f"s3://{self.name}/run",
            key=who,
            secret="testing",
            endpoint_url=self.endpoint,
            write_block_bytes=5 * MIB,
            request_seconds=request_seconds,
            config_kwargs={"retries": {"mode": "standard", "total_max_attempts": 2}},
            **options,
        )

    def manager(self, who="job", **options):
        return CheckpointManager(self.storage(who), deadline_seconds=120, **options)

    def fault(self, action, key, **details):
        """A fault of requests for one object, or, with `?`, of a listing."""
        self.control.set(ServiceFault(action=action, target=f"/{self.name}*run/{key}", **details))

    def asked(self, method, key, since=0):
        path = f"/{self.name}/run/{key}"
        return [r for r in self.control.log(since) if r.method == method and r.target.startswith(path)]

    @property
    def uploads(self):
        return self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])


@pytest.fixture
def bucket(s3_endpoint):
    boto3 = pytest.importorskip("boto3")
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    bucket = Bucket(s3_endpoint, boto3.client("s3", endpoint_url=s3_endpoint, **keys))
    yield bucket
    bucket.control.clear()
    bucket.control.release()


def until(holds):
    """Ask again and again, but leave the emulator the time to do other things."""
    while not holds():
        time.sleep(0.02)


# Uploads


def test_an_upload_whose_answer_was_lost_is_known_to_be_there(bucket):
    storage = bucket.storage()
    bucket.fault("lose", "small", method="PUT", count=1)
    storage.write_bytes("small", b"content")
    assert storage.read_bytes("small") == b"content"
    assert len(bucket.asked("PUT", "small")) == 2


def test_an_upload_in_parts_whose_completion_is_never_answered_is_known_to_be_there(bucket):
    storage = bucket.storage(request_seconds=60)
    bucket.fault("lose", "large[?]uploadId=*", method="POST")
    storage.write_bytes("large", bytes(6 * MIB))
    assert storage.size("large") == 6 * MIB
    assert bucket.uploads == []


def test_an_upload_never_takes_the_place_of_another_and_never_removes_it(bucket):
    storage = bucket.storage()

    def upload_late():
        with storage.create("a") as stream:
            stream.write(b"late")
            bucket.client.put_object(Bucket=bucket.name, Key="run/a", Body=b"newer")

    with pytest.raises(FileExistsError):
        upload_late()
    assert storage.read_bytes("a") == b"newer"


def test_a_request_without_an_answer_ends_in_time_and_says_so(bucket):
    storage = bucket.storage(request_seconds=1.0)
    bucket.fault("hang", "a", method="PUT")
    with pytest.raises(TimeoutError, match=r"no answer .* within 1 s.*request_seconds"):
        storage.write_bytes("a", b"late")


@pytest.fixture
def silent_endpoint():
    """A server that takes every connection, and neither reads nor answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    ("url", "credentials"),
    [
        ("s3://bucket/run", {"key": "a", "secret": "b"}),
        ("gs://bucket/run", {"token": "anon", "project": "test"}),
    ],
)
@pytest.mark.parametrize(
    "act",
    [
        pytest.param(lambda s: s.replace("a", bytes(32 * MIB)), id="an upload that nobody reads"),
        pytest.param(lambda s: s.exists("a"), id="a question"),
        pytest.param(lambda s: s.list(""), id="a listing"),
    ],
)
def test_a_server_that_is_silent_is_not_waited_for_beyond_the_limit(silent_endpoint, url, credentials, act):
    pytest.importorskip("botocore" if url.startswith("s3") else "gcsfs")
    storage = object_storage(url, endpoint_url=silent_endpoint, request_seconds=1.0, **credentials)
    with pytest.raises(TimeoutError, match=r"no answer .* within [0-9.]+ s"):
        act(storage)


def test_time_outs_and_tries_fit_into_the_deadline_unless_the_user_sets_them():
    pytest.importorskip("botocore")
    chosen = {"key": "a", "secret": "b", "endpoint_url": "http://127.0.0.1:9"}
    with CheckpointManager("s3://bucket/run", deadline_seconds=60, storage_options=chosen) as checkpoints:
        config = checkpoints.storage._requests._settings.config
        assert config.read_timeout * config.retries["total_max_attempts"] <= 20
    own = {**chosen, "config_kwargs": {"read_timeout": 7}}
    with CheckpointManager("s3://bucket/run", deadline_seconds=60, storage_options=own) as checkpoints:
        assert checkpoints.storage._requests._settings.config.read_timeout == 7


@pytest.mark.parametrize("code", ["InternalError", "ServiceUnavailable", "SlowDown"])
def test_a_store_that_is_unwell_is_not_taken_for_lost_bytes(bucket, code):
    import errno

    storage = bucket.storage()
    storage.write_bytes("a", b"x")
    bucket.fault("error", "a", code=code, method="GET")
    with pytest.raises(OSError, match="the object store failed") as caught:
        storage.read_bytes("a")
    assert caught.value.errno != errno.EIO


@pytest.mark.parametrize("act", [lambda s: s.write_bytes("a", b"x"), lambda s: s.exists("a")])
def test_expired_credentials_say_so_and_what_to_do(bucket, act):
    bucket.fault("error", "a", code="ExpiredToken")
    with pytest.raises(PermissionError, match="credentials of this job have expired; renew them"):
        act(bucket.storage())


def test_uploads_that_a_crash_left_unfinished_are_aborted_and_no_others(bucket):
    storage = bucket.storage()
    for key in (
        "run/step-000000003/__0_0.distcp",
        "run/other/step-000000003/x",
        "elsewhere/step-000000003/x",
    ):
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    assert collect_orphans(storage, keep=("step-000000003",)) == []
    assert collect_orphans(storage, keep=()) == ["step-000000003"]
    left = {upload["Key"] for upload in bucket.uploads}
    assert left == {"run/other/step-000000003/x", "elsewhere/step-000000003/x"}


# The commit


def test_a_marker_whose_answer_was_lost_is_a_commit(bucket):
    with bucket.manager() as checkpoints:
        bucket.fault("lose", "step-000000001/COMMITTED", method="PUT", count=1)
        checkpoints.save(1, state_of(1)).result()
        assert checkpoints.verify() == []


def test_a_marker_that_hangs_fails_the_save_truthfully_and_may_come_true_later(bucket):
    storage = bucket.storage(request_seconds=2.0)
    with CheckpointManager(storage, deadline_seconds=120) as checkpoints:
        bucket.fault("hang", "step-000000001/COMMITTED", method="PUT")
        with pytest.raises(SaveError, match="step 1 may or may not be committed") as caught:
            checkpoints.save(1, state_of(1)).result()
        assert caught.value.in_doubt
        bucket.control.clear()
        bucket.control.release()
        checkpoints.wait()
        until(lambda: storage.exists("step-000000001/COMMITTED"))
        assert checkpoints.verify(1) == []
        checkpoints.save(2, state_of(2)).result()
        assert [info.step for info in checkpoints.checkpoints()] == [1, 2]


# Two jobs


def late_upload(bucket, key):
    """An older job whose upload of `key` of step 2 hangs; a newer one has taken over and saved step 2."""
    older = bucket.manager("older")
    older.resume(state_of(0))
    older.save(1, state_of(1)).result()
    bucket.fault("hang", f"step-000000002/{key}", who="older", method="PUT")
    begun = len(bucket.control.log())
    late = older.save(2, state_of(-2))
    until(lambda: any(request.faults for request in bucket.control.log(begun)))
    _ownership._held.clear()  # the older job stands for one of another process
    newer = bucket.manager("newer")
    assert newer.resume(state_of(0)) == 1
    newer.save(2, state_of(2)).result()
    return older, late, newer


@pytest.mark.parametrize("key", ["__0_0.distcp", "manifest.json", "COMMITTED"])
def test_a_late_upload_of_a_job_that_was_replaced_does_not_damage_the_newer_checkpoint(bucket, key):
    older, late, newer = late_upload(bucket, key)
    bucket.control.clear()
    bucket.control.release()
    error = late.committed.exception()
    assert isinstance(error, (RootBusyError, SaveError, CheckpointExistsError))
    assert newer.verify(2) == []
    state = state_of(0)
    newer.load(state, step=2)
    assert value_of(state) == 2
    newer.save(3, state_of(3)).result()
    assert [info.step for info in newer.checkpoints()] == [1, 2, 3]
    newer.close()
    older.close()


def with_a_late_marker(checkpoints, step):
    """Commit a step, and leave of it what is left if the marker arrives after another job has cleared up."""
    checkpoints.save(step, state_of(step)).result()
    storage, name = checkpoints.storage, f"step-{step:09d}"
    marker = storage.read_bytes(f"{name}/COMMITTED")
    storage.delete(name)
    storage.write_bytes(f"{name}/COMMITTED", marker)


def test_a_marker_that_came_after_its_objects_were_cleared_away_costs_no_other_checkpoint():
    storage = object_storage(f"memory://{secrets.token_hex(8)}/run")
    with CheckpointManager(storage) as checkpoints:
        with_a_late_marker(checkpoints, 9)
    with CheckpointManager(storage, keep=KeepLatest(1)) as checkpoints:
        checkpoints.save(1, state_of(1)).result()
        checkpoints.save(2, state_of(2)).result()
        checkpoints.wait()
        assert [info.step for info in checkpoints.checkpoints(abandoned=True)] == [2, 9]


def test_a_marker_that_came_after_its_objects_were_cleared_away_is_passed_over(caplog):
    storage = object_storage(f"memory://{secrets.token_hex(8)}/run")
    with CheckpointManager(storage) as checkpoints:
        checkpoints.save(1, state_of(1)).result()
        with_a_late_marker(checkpoints, 2)
    state = state_of(0)
    with CheckpointManager(storage) as checkpoints:
        assert checkpoints.resume(state) == 1
        assert value_of(state) == 1
        assert "step-000000002 is committed but damaged" in caplog.text
        checkpoints.save(2, state_of(2)).result()
        assert checkpoints.verify(2) == []


# Listings


def test_a_listing_that_hides_the_newest_marker_hides_neither_the_checkpoint_nor_makes_it_an_orphan(bucket):
    with bucket.manager() as checkpoints:
        checkpoints.save(1, state_of(1)).result()
        checkpoints.save(2, state_of(2)).result()
    bucket.control.set(ServiceFault(action="hide", hidden="run/step-000000002/COMMITTED"))
    state = state_of(0)
    with bucket.manager() as checkpoints:
        assert checkpoints.resume(state) == 2
        assert checkpoints.verify() == []
    assert value_of(state) == 2


def test_a_checkpoint_that_no_listing_shows_yet_is_never_overwritten(bucket):
    with bucket.manager() as checkpoints:
        checkpoints.save(1, state_of(1)).result()
        checkpoints.save(2, state_of(2)).result()
    bucket.control.set(ServiceFault(action="hide", hidden="run/step-000000002/*"))
    with bucket.manager() as checkpoints:
        assert checkpoints.resume(state_of(0)) == 1
        with pytest.raises((CheckpointExistsError, SaveError)):
            checkpoints.save(2, state_of(-2)).result()
        bucket.control.clear()
        assert checkpoints.verify(2) == []
        checkpoints.wait()


def test_a_listing_that_shows_what_was_pruned_does_not_bring_it_back(bucket):
    with bucket.manager(keep=KeepLatest(1)) as checkpoints:
        checkpoints.save(1, state_of(1)).result()
        Catalog(bucket.storage()).committed()
        number = len(bucket.control.log())
        checkpoints.save(2, state_of(2)).result()
    bucket.control.set(ServiceFault(action="stale", as_of=number))
    stale = Catalog(bucket.storage())
    assert [info.step for info in stale.committed()] == []
    bucket.control.clear()
    assert [info.step for info in stale.committed()] == [2]


def test_a_marker_is_deleted_although_no_listing_shows_it(bucket):
    with bucket.manager() as checkpoints:
        checkpoints.save(1, state_of(1)).result()
        (info,) = checkpoints.checkpoints()
    storage = bucket.storage()
    bucket.control.set(ServiceFault(action="hide", hidden="*/COMMITTED"))
    remove(storage, info)
    bucket.control.clear()
    assert Catalog(storage).committed() == []
    assert {entry.name for entry in storage.list("")} <= {OWN}


def test_a_listing_that_does_not_show_the_data_yet_fails_no_commit(bucket):
    bucket.control.set(ServiceFault(action="hide", hidden="*/__0_0.distcp"))
    with bucket.manager() as checkpoints:
        checkpoints.save(1, state_of(1)).result()
        assert verify(checkpoints.storage, "step-000000001") == []


# A sample of the long run


@pytest.mark.slow
def test_a_kill_at_sampled_requests_and_sampled_faults_lose_nothing(tmp_path):
    pytest.importorskip("moto")
    outcomes = sample(tmp_path, "s3", count=2, seed=20260101)
    assert len(outcomes) == 4
    assert sum(outcome.kills for outcome in outcomes) >= 2
