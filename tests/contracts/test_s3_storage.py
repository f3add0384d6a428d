from __future__ import annotations

import base64
import gc
import random
import tracemalloc
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch

from benchmarks.s3 import Server, serving
from ckpt_core import CheckpointManager
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions
from ckpt_core.storage import ObjectStorage, Storage, object_storage
from ckpt_core.storage.object import _s3
from ckpt_core.testing import StorageTests
from tests.support.service_faults import ServiceControl, ServiceFault

pytestmark = pytest.mark.emulator

MIB = 2**20


class TestS3Storage(StorageTests):
    @pytest.fixture
    def client(self, s3_endpoint: str) -> Any:
        boto3 = pytest.importorskip("boto3")
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        return boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1", **keys)

    @pytest.fixture
    def storage(self, s3_endpoint: str, client: Any) -> Storage:
        self.client = client
        bucket = f"bucket-{uuid.uuid4().hex}"
        client.create_bucket(Bucket=bucket)
        return self.open(f"s3://{bucket}/runs/llama", s3_endpoint)

    def open(self, url: str, endpoint: str) -> ObjectStorage:
        return _storage(url, endpoint)

    def raw_read(self, storage: Storage, key: str) -> bytes:
        try:
            return self.client.get_object(**_address(storage, key))["Body"].read()
        except self.client.exceptions.NoSuchKey:
            raise FileNotFoundError(key) from None

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        self.client.put_object(**_address(storage, key), Body=content)

    def test_an_upload_of_many_parts_is_whole(self, storage: Storage) -> None:
        content = bytes(range(256)) * (4 * 4096) + b"the end"
        with storage.create("large") as stream:
            for start in range(0, len(content), MIB):
                stream.write(content[start : start + MIB])
        assert self.raw_read(storage, "large") == content

    @pytest.mark.parametrize("size", [10, 12 * MIB], ids=["one part", "many parts"])
    def test_a_failed_upload_never_shows_an_object_and_leaves_nothing_to_pay_for(
        self, storage: Storage, size: int
    ) -> None:
        bucket = _address(storage, "")["Bucket"]
        # Versions remember what was there for a moment only.
        self.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration={"Status": "Enabled"})

        def write_and_fail() -> None:
            with storage.create("large") as stream:
                stream.write(bytes(size))
                assert size < MIB or self._uploads(storage), (
                    "parts should be on their way, or this test shows nothing"
                )
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_and_fail()
        gc.collect()
        assert not self._uploads(storage)
        assert "Versions" not in self.client.list_object_versions(Bucket=bucket)

    def test_a_bucket_that_does_not_exist_is_named(self, s3_endpoint: str) -> None:
        storage = self.open("s3://no-such-bucket/runs", s3_endpoint)
        with pytest.raises(FileNotFoundError, match="'no-such-bucket' does not exist"):
            storage.check_root()

    def test_a_bucket_as_root_survives_the_deletion_of_all_it_holds(
        self, s3_endpoint: str, client: Any
    ) -> None:
        bucket = f"bucket-{uuid.uuid4().hex}"
        client.create_bucket(Bucket=bucket)
        storage = self.open(f"s3://{bucket}", s3_endpoint)
        storage.check_root()
        storage.write_bytes("step/a", b"x")
        storage.delete("step")
        assert storage.list("") == []
        assert bucket in {found["Name"] for found in client.list_buckets()["Buckets"]}

    def _uploads(self, storage: Storage) -> list[Any]:
        bucket = _address(storage, "")["Bucket"]
        return self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])


class _File:
    """A file to put: notes what is read, and fails when a test wants it to."""

    def __init__(self, content: bytes, fails_at: int | None = None) -> None:
        self.content, self.fails_at = content, fails_at

    def __call__(self, offset: int, buffer: memoryview) -> None:
        if offset == self.fails_at:
            raise ZeroDivisionError
        buffer[:] = self.content[offset : offset + len(buffer)]


class _Bucket:
    """A bucket, its storage, and the faults and the log of its service."""

    def __init__(self, endpoint: str, **options: Any) -> None:
        boto3 = pytest.importorskip("boto3")
        keys = {"aws_access_key_id": "testing", "aws_secret_access_key": "testing"}
        self.client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
        self.name = f"bucket-{uuid.uuid4().hex}"
        self.client.create_bucket(Bucket=self.name)
        self.control = ServiceControl(endpoint)
        self.storage = _storage(f"s3://{self.name}/run", endpoint, **options)

    @property
    def uploads(self) -> list[Any]:
        return self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", [])


@pytest.fixture
def bucket(s3_endpoint: str) -> Generator[_Bucket]:
    bucket = _Bucket(s3_endpoint, max_concurrency=1)
    yield bucket
    bucket.control.clear()


@pytest.fixture(scope="module")
def server() -> Generator[Server]:
    """A service that compares checksums and lists those of parts, which moto does not."""
    with serving(verifies=True) as server:
        yield server


@pytest.fixture
def verified(server: Server) -> ObjectStorage:
    url = f"s3://{server.bucket}/{uuid.uuid4().hex}"
    more = {"write_block_bytes": 5 * MIB, "max_concurrency": 1}
    return object_storage(url, **server.storage_options, **more)


@pytest.mark.parametrize(("size", "requests"), [(100, 1), (MIB, 1), (MIB + 1, 2)])
def test_a_small_object_is_read_by_one_request(
    server: Server, verified: ObjectStorage, size: int, requests: int
) -> None:
    content = random.Random(size).randbytes(size)
    verified.write_bytes("a", content)
    before = server.counters()["requests"]
    assert verified.read_bytes("a") == content
    assert _more(server, before) == {"get_object": requests}


def test_descriptions_of_services_are_parsed_once_for_all_clients(server: Server) -> None:
    one, two = (object_storage(f"s3://{server.bucket}/x", **server.storage_options) for _ in range(2))
    for storage in (one, two):
        storage.replace("a", b"")
    models = [each._requests._client().meta.service_model for each in (one, two)]
    assert models[0]._service_description is models[1]._service_description


def test_ranges_of_an_object_need_no_request_but_theirs(server: Server, verified: ObjectStorage) -> None:
    verified.write_bytes("a", b"0123456789")
    before = server.counters()["requests"]
    buffer = bytearray(4)
    with verified.open_ranges("a") as reader:
        reader.read_into(0, memoryview(buffer)[:1])
        assert _more(server, before) == {"get_object": 1}
        reader.read_into(3, memoryview(buffer))
    assert buffer == b"3456"
    assert _more(server, before) == {"get_object": 2}


def test_a_resume_asks_little_of_a_bucket(server: Server) -> None:
    url = f"s3://{server.bucket}/{uuid.uuid4().hex}"
    options = CheckpointOptions(storage_options=dict(server.storage_options), journal=False)
    state = {"model": {str(name): torch.full((300,), float(name)) for name in range(100)}}
    with CheckpointManager(url, options=options) as manager:
        manager.save(1, state).committed.result()
        before = server.counters()["requests"]
        target = {"model": {name: torch.zeros(300) for name in state["model"]}}
        assert manager.resume(target) == 1
        asked = _more(server, before)
    assert all(torch.equal(target["model"][name], value) for name, value in state["model"].items())
    # The owner, the marker twice, marks and pins, five small files, the data: its first byte and its bytes.
    assert asked["get_object"] <= 12
    assert asked["list_objects"] <= 3
    assert set(asked) == {"get_object", "list_objects"}


def test_a_file_that_is_put_again_sends_only_parts_that_have_not_arrived(
    server: Server, verified: ObjectStorage
) -> None:
    content = random.Random(1).randbytes(17 * MIB)
    put = partial(verified.put_file, "step/a", len(content), identity="save:crc32")
    with pytest.raises(ZeroDivisionError):
        put(_File(content, fails_at=10 * MIB))
    assert not verified.exists("step/a")
    # Another file of this name has left parts, too; and the first part was read from a damaged source.
    with pytest.raises(ZeroDivisionError):
        verified.put_file("step/a", len(content), _File(content, fails_at=10 * MIB), identity="save:other")
    content = b"!" + content[1:]
    before, done = server.counters(), list[int]()
    put(_File(content), progress=done.append)
    after = server.counters()
    assert verified.read_bytes("step/a") == content
    assert after["requests"]["upload_part"] - before["requests"]["upload_part"] == 3
    assert after["bytes_in"] - before["bytes_in"] < 13 * MIB
    assert sum(done) == len(content)
    put(_File(content, fails_at=0))
    with pytest.raises(FileExistsError):
        verified.put_file("step/a", len(content), _File(content), identity="save:other")
    assert verified.abandon_uploads(lambda key: key == "step/a") == ["step/a"]


def test_pieces_that_are_put_again_send_only_parts_that_have_not_arrived(
    server: Server, verified: ObjectStorage
) -> None:
    content = random.Random(2).randbytes(17 * MIB)

    def pieces(until: int) -> Iterator[memoryview]:
        for start in range(0, until, MIB):
            yield memoryview(content)[start : start + MIB]
        if until < len(content):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        verified.put_pieces("step/a", partial(pieces, 11 * MIB), identity="save:zstd")
    assert not verified.exists("step/a")
    before = server.counters()
    verified.put_pieces("step/a", partial(pieces, len(content)), identity="save:zstd")
    after = server.counters()
    assert verified.read_bytes("step/a") == content
    assert after["requests"]["upload_part"] - before["requests"]["upload_part"] == 2
    assert after["bytes_in"] - before["bytes_in"] < 8 * MIB
    verified.put_pieces("step/a", partial(pieces, len(content)), identity="save:zstd")
    assert server.counters()["bytes_in"] - after["bytes_in"] < MIB


def test_a_file_whose_parts_were_aborted_meanwhile_makes_no_object(verified: ObjectStorage) -> None:
    def read(offset: int, buffer: memoryview) -> None:
        if offset == 10 * MIB:
            verified.abandon_uploads(lambda key: key == "step/a")

    with pytest.raises(FileNotFoundError):
        verified.put_file("step/a", 12 * MIB, read, identity="save:crc32")
    assert not verified.exists("step/a")
    verified.put_file("step/a", 12 * MIB, _File(bytes(12 * MIB)), identity="save:crc32")
    assert verified.size("step/a") == 12 * MIB


@pytest.mark.parametrize("size", [4, 6 * MIB], ids=["one request", "parts"])
def test_what_changes_on_its_way_is_refused_by_the_service(
    verified: ObjectStorage, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_s3, "crc32_header", lambda checksum: base64.b64encode(b"else").decode())
    with pytest.raises(OSError, match="the object store failed"):
        verified.write_pieces("step/a", [memoryview(bytes(size))])
    assert not verified.exists("step/a")


def test_an_upload_in_parts_takes_no_place_that_was_taken_meanwhile(bucket: _Bucket) -> None:
    def pieces() -> Generator[memoryview]:
        yield memoryview(bytes(6 * MIB))
        bucket.client.put_object(Bucket=bucket.name, Key="run/a", Body=b"newer")

    with pytest.raises(FileExistsError):
        bucket.storage.write_pieces("a", pieces())
    assert bucket.storage.read_bytes("a") == b"newer"
    assert bucket.uploads == []


def test_pieces_are_sent_from_where_they_lie_and_a_failed_one_leaves_nothing(bucket: _Bucket) -> None:
    content = random.Random(2).randbytes(16 * MIB)
    pieces = [memoryview(content)[start : start + 3 * MIB] for start in range(0, len(content), 3 * MIB)]
    with memory_of_python() as most:
        bucket.storage.write_pieces("a", iter(pieces))
        assert most() < 4 * MIB
    assert bucket.storage.read_bytes("a") == content
    bucket.control.set(ServiceFault(action="error", target="*partNumber=2*", code="AccessDenied"))
    with pytest.raises(PermissionError, match="check the credentials"):
        bucket.storage.write_pieces("b", iter(pieces))
    bucket.control.clear()
    assert bucket.uploads == []
    assert not bucket.storage.exists("b")


@pytest.mark.parametrize("size", [4, 6 * MIB], ids=["one request", "parts"])
def test_damage_on_the_way_and_a_conflict_are_tried_again(bucket: _Bucket, size: int) -> None:
    begun = len(bucket.control.log())
    bucket.control.set(
        ServiceFault(action="error", method="PUT", target="*/run/a*", code="BadDigest", count=1)
    )
    bucket.storage.write_bytes("a", bytes(size))
    assert bucket.storage.size("a") == size
    bucket.control.set(
        ServiceFault(
            action="error", method="PUT", target="*/run/b", code="ConditionalRequestConflict", count=1
        )
    )
    bucket.storage.write_bytes("b", b"1")
    assert bucket.storage.read_bytes("b") == b"1"
    assert sum(bool(request.faults) for request in bucket.control.log(begun)) == 2


def test_a_service_without_checksums_is_named_once_and_may_be_told_so(
    bucket: _Bucket, s3_endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in "ab":
        bucket.storage.write_pieces(name, [memoryview(bytes(6 * MIB))])
    (told,) = (record for record in caplog.records if "'checksums': False" in record.getMessage())
    assert told.levelname == "WARNING"
    caplog.clear()
    without = _storage(f"s3://{bucket.name}/run", s3_endpoint, checksums=False)
    without.write_pieces("c", [memoryview(bytes(6 * MIB))])
    assert without.size("c") == 6 * MIB
    assert not caplog.records


def test_an_answer_that_ends_early_is_asked_for_again_from_there(bucket: _Bucket) -> None:
    content = random.Random(3).randbytes(3 * MIB)
    bucket.storage.write_bytes("a", content)
    bucket.control.set(ServiceFault(action="truncate", method="GET", target="*/run/a", count=1))
    assert bucket.storage.read_bytes("a") == content
    bucket.control.set(ServiceFault(action="truncate", method="GET", target="*/run/a"))
    with pytest.raises(OSError, match="end too early") as caught:
        bucket.storage.read_bytes("a")
    assert not isinstance(caught.value, EOFError)


def test_options_without_a_translation_are_refused_by_name(s3_endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"version_aware; leave them out"):
        object_storage("s3://bucket/run", version_aware=True)
    with pytest.raises(ConfigError, match=r"botocore cannot open this .*no_such_thing.*config_kwargs"):
        object_storage("s3://bucket/run", config_kwargs={"no_such_thing": 1}, secret="hidden-away")
    with pytest.raises(ConfigError, match=r"s3_additional_kwargs ChecksumAlgorithm; leave"):
        object_storage("s3://bucket/run", s3_additional_kwargs={"ChecksumAlgorithm": "SHA256"})
    with pytest.raises(ConfigError, match=r"config_kwargs s3 payload_signing_enabled; leave"):
        object_storage("s3://bucket/run", config_kwargs={"s3": {"payload_signing_enabled": True}})
    misspelt = _storage(
        "s3://bucket/run", s3_endpoint, s3_additional_kwargs={"ServerSideEncrypton": "AES256"}
    )
    with pytest.raises(ConfigError, match="s3_additional_kwargs ServerSideEncrypton"):
        misspelt.check_root()


def _storage(url: str, endpoint: str, **options: Any) -> ObjectStorage:
    return object_storage(
        url, key="testing", secret="testing", endpoint_url=endpoint, write_block_bytes=5 * MIB, **options
    )


def _address(storage: Storage, key: str) -> dict[str, str]:
    url = urlsplit(storage.url)
    return {"Bucket": url.netloc, "Key": f"{url.path}/{key}".strip("/")}


@contextmanager
def memory_of_python() -> Generator[Callable[[], int]]:
    """The most bytes that Python had at once beyond those at the start."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _more(server: Server, before: dict[str, int]) -> dict[str, int]:
    """Return the requests since `before`, by operation."""
    after = server.counters()["requests"]
    return {name: more for name in after if (more := after[name] - before.get(name, 0))}
