from __future__ import annotations

import gc
import uuid
from typing import Any
from urllib.parse import urlsplit

import pytest

from ckpt_core.storage import ObjectStorage, Storage
from ckpt_core.testing import StorageTests

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
        return _storage(f"s3://{bucket}/runs/llama", s3_endpoint)

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
        storage = _storage("s3://no-such-bucket/runs", s3_endpoint)
        with pytest.raises(FileNotFoundError, match="'no-such-bucket' does not exist"):
            storage.check_root()

    def test_a_bucket_as_root_survives_the_deletion_of_all_it_holds(
        self, s3_endpoint: str, client: Any
    ) -> None:
        bucket = f"bucket-{uuid.uuid4().hex}"
        client.create_bucket(Bucket=bucket)
        storage = _storage(f"s3://{bucket}", s3_endpoint)
        storage.check_root()
        storage.write_bytes("step/a", b"x")
        storage.delete("step")
        assert storage.list("") == []
        assert bucket in {found["Name"] for found in client.list_buckets()["Buckets"]}

    def _uploads(self, storage: Storage) -> list[Any]:
        bucket = _address(storage, "")["Bucket"]
        return self.client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])


def _storage(url: str, endpoint: str) -> ObjectStorage:
    return ObjectStorage(
        url, key="testing", secret="testing", endpoint_url=endpoint, write_block_bytes=5 * MIB
    )


def _address(storage: Storage, key: str) -> dict[str, str]:
    url = urlsplit(storage.url)
    return {"Bucket": url.netloc, "Key": f"{url.path}/{key}".strip("/")}
