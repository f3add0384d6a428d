"""No upload takes the place of another, on any service: not late, not twice, not with its answer lost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.clouds import Cloud

pytestmark = pytest.mark.emulator

CHUNK = 2**19
# In one part, and in two.
SIZES = (10, 700_000)


@pytest.fixture(params=["gcs", "azure"])
def cloud(request):
    cloud = Cloud.fresh(request.param, request.getfixturevalue(f"{request.param}_endpoint"))
    yield cloud
    cloud.control.clear()
    cloud.control.release()


@pytest.fixture
def storage(cloud):
    return cloud.storage("run", write_block_bytes=CHUNK, request_seconds=20.0)


def on_creation(cloud, action, size):
    """A fault of the request that makes an object appear."""
    if cloud.kind == "azure" and size > CHUNK:
        cloud.fault(action, "PUT", "*/run/a[?]comp=blocklist", count=1)
    elif size > CHUNK:
        cloud.fault(action, "POST", "*/run/a/compose[?]*", count=1)
    else:
        cloud.fault(action, "PUT", "*/run/a", count=1)


def until(holds):
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.mark.parametrize("size", SIZES)
def test_an_upload_begun_before_another_ended_is_refused(storage, cloud, size):
    def upload_late():
        with storage.create("a") as stream:
            stream.write(b"l" * size)
            cloud.write("run/a", b"newer")

    with pytest.raises(FileExistsError):
        upload_late()
    assert cloud.read("run/a") == b"newer"


@pytest.mark.parametrize("size", SIZES)
def test_of_two_uploads_at_the_same_time_one_wins(storage, cloud, size):
    begun = len(cloud.control.log())
    on_creation(cloud, "hang", size)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(storage.write_bytes, "a", b"l" * size)
        until(lambda: any(request.faults for request in cloud.control.log(begun)))
        storage.write_bytes("a", b"newer")
        cloud.control.release()
        assert isinstance(late.exception(), FileExistsError)
    assert cloud.read("run/a") == b"newer"


@pytest.mark.parametrize("size", SIZES)
def test_an_upload_whose_answer_was_lost_is_known_to_be_there(storage, cloud, size):
    begun = len(cloud.control.log())
    on_creation(cloud, "lose", size)
    storage.write_bytes("a", b"m" * size)
    assert any(request.faults for request in cloud.control.log(begun))
    assert cloud.read("run/a") == b"m" * size


def test_credentials_that_are_refused_say_so(storage, cloud):
    cloud.fault("error", "P*", "*", code="AccessDenied")
    with pytest.raises(PermissionError, match="check the credentials of this job"):
        storage.write_bytes("a", b"x")
