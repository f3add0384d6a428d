from __future__ import annotations

import json
import urllib.error
import urllib.request
import uuid
from urllib.parse import quote, urlsplit

import pytest

from ckpt_core.storage import ObjectStorage, Storage
from ckpt_core.testing import StorageTests

pytestmark = pytest.mark.emulator

MIB = 2**20


class TestGcsStorage(StorageTests):
    @pytest.fixture
    def storage(self, gcs_endpoint: str) -> Storage:
        self.endpoint = gcs_endpoint
        bucket = f"bucket-{uuid.uuid4().hex}"
        _post(
            f"{gcs_endpoint}/storage/v1/b?project=test",
            json.dumps({"name": bucket}).encode(),
            "application/json",
        )
        return _storage(f"gs://{bucket}/runs/llama", gcs_endpoint)

    def raw_read(self, storage: Storage, key: str) -> bytes:
        bucket, name = _address(storage, key)
        try:
            with urllib.request.urlopen(
                f"{self.endpoint}/storage/v1/b/{bucket}/o/{name}?alt=media"
            ) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            error.close()
            raise FileNotFoundError(key) from error

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        bucket, name = _address(storage, key)
        _post(
            f"{self.endpoint}/upload/storage/v1/b/{bucket}/o?uploadType=media&name={name}",
            content,
            "application/octet-stream",
        )

    def test_an_upload_of_many_parts_is_whole(self, storage: Storage) -> None:
        content = bytes(range(256)) * 4096 + b"the end"
        with storage.create("large") as stream:
            for start in range(0, len(content), 100_000):
                stream.write(content[start : start + 100_000])
        assert self.raw_read(storage, "large") == content

    def test_a_failed_upload_of_many_parts_leaves_nothing(self, storage: Storage) -> None:
        def write_and_fail() -> None:
            with storage.create("large") as stream:
                stream.write(bytes(MIB))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_and_fail()
        assert not storage.exists("large")

    def test_a_bucket_that_does_not_exist_is_named(self, gcs_endpoint: str) -> None:
        storage = _storage("gs://no-such-bucket/runs", gcs_endpoint)
        with pytest.raises(FileNotFoundError, match="'no-such-bucket' does not exist"):
            storage.check_root()


def _storage(url: str, endpoint: str) -> ObjectStorage:
    return ObjectStorage(url, token="anon", project="test", endpoint_url=endpoint, write_block_bytes=MIB // 4)


def _address(storage: Storage, key: str) -> tuple[str, str]:
    url = urlsplit(storage.url)
    return url.netloc, quote(f"{url.path}/{key}".strip("/"), safe="")


def _post(url: str, body: bytes, content_type: str) -> None:
    request = urllib.request.Request(url, data=body, headers={"Content-Type": content_type})
    with urllib.request.urlopen(request) as answer:
        answer.read()
