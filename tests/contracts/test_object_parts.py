"""Uploads in parts to GCS and Azure: parts are found again, and the object never takes another's place."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import obstore
import pytest

from ckpt_core.errors import ConfigError
from ckpt_core.storage.object._obstore import AZURE_METADATA, GCS_METADATA, AzureContainer, GcsBucket
from tests.support.clouds import Cloud

pytestmark = pytest.mark.emulator

PATH = "run/step-000000001/__0_0.distcp"


@pytest.fixture(params=["gcs", "azure"])
def cloud(request):
    cloud = Cloud.fresh(request.param, request.getfixturevalue(f"{request.param}_endpoint"))
    yield cloud
    cloud.control.clear()
    cloud.control.release()


@pytest.fixture
def place(cloud):
    kind = GcsBucket if cloud.kind == "gcs" else AzureContainer
    return kind("…", cloud.bucket, cloud.options, 8.0, retry_config={"max_retries": 2})


@pytest.fixture
def begin(place, cloud):
    return lambda token: place.begin(PATH, token, f"run/.parts/{token}/{PATH}")


def send(upload, contents):
    names = [upload.name_of(number, f"{len(content):08x}") for number, content in enumerate(contents)]
    for name, content in zip(names, contents, strict=True):
        upload.send(name, [memoryview(content)[:1], memoryview(content)[1:]])
    return names


def token_of(place, cloud):
    found = obstore.get(place.store, PATH).attributes
    return found[GCS_METADATA if cloud.kind == "gcs" else AZURE_METADATA]


def completion(cloud):
    return ("POST", "*/compose*") if cloud.kind == "gcs" else ("PUT", "*comp=blocklist*")


@pytest.mark.parametrize("count", [1, 33])
def test_an_object_of_many_parts_is_whole_and_has_its_token(begin, place, cloud, count):
    contents = [bytes([number]) * (number + 2) for number in range(count)]
    upload = begin("token")
    upload.complete(send(upload, contents))
    upload.abandon()
    assert cloud.read(PATH) == b"".join(contents)
    assert token_of(place, cloud) == "token"
    assert cloud.names() == [PATH]


def test_parts_never_make_an_object_over_another(begin, cloud):
    upload = begin("late")
    names = send(upload, [b"late", b"too late"])
    cloud.write(PATH, b"newer")
    with pytest.raises(FileExistsError):
        upload.complete(names)
    upload.abandon()
    assert cloud.read(PATH) == b"newer"
    assert cloud.names() == [PATH]


def test_a_completion_that_arrives_late_does_not_overwrite_what_a_newer_job_has_sent(begin, cloud):
    late, newer = begin("late"), begin("newer")
    late_names, names = send(late, [b"late"]), send(newer, [b"newer"])
    begun = len(cloud.control.log())
    cloud.fault("hang", *completion(cloud), count=1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(late.complete, late_names)
        while not any(request.faults for request in cloud.control.log(begun)):
            time.sleep(0.01)
        newer.complete(names)
        cloud.control.release()
        assert isinstance(waiting.exception(), FileExistsError)
    assert cloud.read(PATH) == b"newer"


def test_a_completion_whose_answer_was_lost_is_known_by_its_token(begin, place, cloud):
    upload = begin("mine")
    names = send(upload, [b"a b c"])
    cloud.fault("lose", *completion(cloud), count=1)
    with pytest.raises(FileExistsError):
        upload.complete(names)
    assert token_of(place, cloud) == "mine"
    assert cloud.read(PATH) == b"a b c"


def test_parts_that_arrived_are_found_by_a_later_upload_with_their_token_only(begin, cloud):
    names = send(begin("mine"), [b"first", b"second"])
    assert begin("mine").there() == set(names)
    assert not begin("other").there() & {begin("other").name_of(0, "00000005")}
    begin("mine").complete(names)
    assert cloud.read(PATH) == b"firstsecond"


def test_options_without_a_translation_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"consistency, session_kwargs; leave them out"):
        GcsBucket("gs://b/run", "b", {"session_kwargs": {}, "consistency": "md5", "token": "anon"}, 8.0)
    with pytest.raises(ConfigError, match="location_mode"):
        AzureContainer("az://b/run", "b", {"account_name": "me", "location_mode": "secondary"}, 8.0)
    with pytest.raises(ConfigError, match="account_name or connection_string"):
        AzureContainer("az://b/run", "b", {"anon": True}, 8.0)
