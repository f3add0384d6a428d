"""P3 on GCS and Azure: a life of a job, torn and replaced, with the client that users get."""

from __future__ import annotations

import time

import pytest

from ckpt_core import CheckpointManager, KeepLatest, RootBusyError, SaveError
from ckpt_core.errors import CheckpointExistsError
from ckpt_core.names import OWN
from ckpt_core.root import _ownership
from tests.reliability.objects.filled import state_of, value_of
from tests.support.clouds import Cloud

pytestmark = [pytest.mark.reliability, pytest.mark.emulator]

LARGE = 2**17
"""Columns of a float32 matrix with two rows: 1 MiB, four parts."""


@pytest.fixture(params=["gcs", "azure"])
def cloud(request):
    cloud = Cloud.fresh(request.param, request.getfixturevalue(f"{request.param}_endpoint"))
    yield cloud
    cloud.control.clear()
    cloud.control.release()


def manager(cloud, **options):
    storage = cloud.storage("run", write_block_bytes=2**18, request_seconds=30.0)
    return CheckpointManager(storage, deadline_seconds=120, **options)


def until(holds):
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


def test_a_job_saves_in_parts_prunes_and_is_resumed_and_leaves_nothing_else(cloud):
    with manager(cloud, keep=KeepLatest(1)) as checkpoints:
        assert checkpoints.resume(state_of(0, LARGE)) is None
        for step in (1, 2):
            checkpoints.save(step, state_of(step, LARGE)).result()
        checkpoints.wait()
    state = state_of(0, LARGE)
    with manager(cloud, keep=KeepLatest(1)) as checkpoints:
        assert checkpoints.resume(state) == 2
        assert value_of(state) == 2
        assert checkpoints.verify() == []
    assert {name.split("/")[1] for name in cloud.names()} - {OWN} == {"step-000000002"}


def test_a_save_that_was_refused_midway_is_passed_over_and_cleared_away(cloud):
    with manager(cloud) as checkpoints:
        checkpoints.save(1, state_of(1, LARGE)).result()
        completion = "*comp=blocklist" if cloud.kind == "azure" else "*/compose[?]*"
        cloud.fault("error", "P*", completion, code="AccessDenied")
        with pytest.raises(SaveError, match="check the credentials"):
            checkpoints.save(2, state_of(2, LARGE)).result()
        cloud.control.clear()
        checkpoints.wait()
    with manager(cloud) as checkpoints:
        assert checkpoints.resume(state_of(0, LARGE)) == 1
        checkpoints.save(2, state_of(2, LARGE)).result()
        assert checkpoints.verify() == []
    assert not [name for name in cloud.names() if ".ckpt-uploads" in name]


def test_a_marker_whose_answer_was_lost_is_a_commit(cloud):
    with manager(cloud) as checkpoints:
        cloud.fault("lose", "PUT", "*/step-000000001/COMMITTED", count=1)
        checkpoints.save(1, state_of(1)).result()
        assert checkpoints.verify() == []


def test_a_late_marker_of_a_job_that_was_replaced_does_not_damage_the_newer_checkpoint(cloud):
    older = manager(cloud)
    older.resume(state_of(0))
    older.save(1, state_of(1)).result()
    cloud.fault("hang", "PUT", "*/step-000000002/COMMITTED", count=1)
    begun = len(cloud.control.log())
    late = older.save(2, state_of(-2))
    until(lambda: any(request.faults for request in cloud.control.log(begun)))
    _ownership._held.clear()  # the older job stands for one of another process
    newer = manager(cloud)
    assert newer.resume(state_of(0)) == 1
    newer.save(2, state_of(2)).result()
    cloud.control.release()
    error = late.committed.exception()
    assert isinstance(error, (RootBusyError, SaveError, CheckpointExistsError))
    assert newer.verify(2) == []
    state = state_of(0)
    newer.load(state, step=2)
    assert value_of(state) == 2
    newer.close()
    older.close()


def test_a_listing_that_hides_the_newest_marker_hides_no_checkpoint(cloud):
    with manager(cloud) as checkpoints:
        checkpoints.save(1, state_of(1)).result()
        checkpoints.save(2, state_of(2)).result()
    cloud.fault("hide", "GET", "*", hidden="run/step-000000002/COMMITTED")
    state = state_of(0)
    with manager(cloud) as checkpoints:
        assert checkpoints.resume(state) == 2
    assert value_of(state) == 2
