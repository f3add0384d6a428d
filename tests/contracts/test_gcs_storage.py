from __future__ import annotations

import pytest

from ckpt_core.storage import Storage
from ckpt_core.testing import StorageTests
from tests.support.clouds import Cloud

pytestmark = pytest.mark.emulator

MIB = 2**20


class TestGcsStorage(StorageTests):
    @pytest.fixture
    def storage(self, gcs_endpoint: str) -> Storage:
        self.cloud = Cloud.fresh("gcs", gcs_endpoint)
        return self.cloud.storage("runs/llama", write_block_bytes=MIB // 4)

    def raw_read(self, storage: Storage, key: str) -> bytes:
        return self.cloud.read(f"runs/llama/{key}")

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        self.cloud.write(f"runs/llama/{key}", content)

    def test_an_upload_of_many_parts_is_whole(self, storage: Storage) -> None:
        content = bytes(range(256)) * 4096 + b"the end"
        with storage.create("large") as stream:
            for start in range(0, len(content), 100_000):
                stream.write(content[start : start + 100_000])
        assert self.raw_read(storage, "large") == content
        assert self.cloud.names() == ["runs/llama/large"]

    def test_a_failed_upload_of_many_parts_leaves_nothing(self, storage: Storage) -> None:
        def write_and_fail() -> None:
            with storage.create("large") as stream:
                stream.write(bytes(MIB))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_and_fail()
        assert self.cloud.names() == []

    def test_a_bucket_that_does_not_exist_is_named(self, gcs_endpoint: str) -> None:
        nowhere = Cloud(kind="gcs", endpoint=gcs_endpoint, bucket="no-such-bucket")
        with pytest.raises(FileNotFoundError, match="'no-such-bucket' does not exist"):
            nowhere.storage(
                "runs",
            ).check_root()


def test_parts_of_uploads_that_never_ended_are_seen_by_nobody_and_are_deleted(gcs_endpoint: str) -> None:
    cloud = Cloud.fresh("gcs", gcs_endpoint)
    cloud.write("run/.ckpt-uploads/token/step-000000003/__0_0.distcp/00000-00000000", b"part")
    storage = cloud.storage("run")
    assert storage.list("") == []
    assert storage.abandon_uploads(lambda key: key.startswith("other/")) == []
    assert storage.abandon_uploads(lambda key: key == "step-000000003/__0_0.distcp") == [
        "step-000000003/__0_0.distcp"
    ]
    assert cloud.names() == []


def test_names_that_only_a_bucket_takes_are_kept(gcs_endpoint: str) -> None:
    storage = Cloud.fresh("gcs", gcs_endpoint).storage("run")
    for key in ("a b/ü%20#", "a b/[x]+~"):
        storage.write_bytes(key, key.encode())
    assert [entry.name for entry in storage.list("a b")] == ["[x]+~", "ü%20#"]
    assert storage.read_bytes("a b/ü%20#") == "a b/ü%20#".encode()
