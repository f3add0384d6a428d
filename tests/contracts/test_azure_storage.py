from __future__ import annotations

import pytest

from ckpt_core.storage import Storage
from ckpt_core.testing import StorageTests
from tests.support.clouds import Cloud

pytestmark = pytest.mark.emulator

MIB = 2**20


class TestAzureStorage(StorageTests):
    @pytest.fixture
    def storage(self, azure_endpoint: str) -> Storage:
        self.cloud = Cloud.fresh("azure", azure_endpoint)
        return self.cloud.storage("runs/llama", write_block_bytes=MIB // 4)

    def raw_read(self, storage: Storage, key: str) -> bytes:
        return self.cloud.read(f"runs/llama/{key}")

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        self.cloud.write(f"runs/llama/{key}", content)

    def test_an_upload_of_many_blocks_is_whole(self, storage: Storage) -> None:
        content = bytes(range(256)) * 4096 + b"the end"
        with storage.create("large") as stream:
            for start in range(0, len(content), 100_000):
                stream.write(content[start : start + 100_000])
        assert self.raw_read(storage, "large") == content

    def test_a_failed_upload_of_many_blocks_never_shows_a_blob(self, storage: Storage) -> None:
        def write_and_fail() -> None:
            with storage.create("large") as stream:
                stream.write(bytes(MIB))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            write_and_fail()
        assert self.cloud.names() == []

    def test_a_container_that_does_not_exist_is_named(self, azure_endpoint: str) -> None:
        nowhere = Cloud(kind="azure", endpoint=azure_endpoint, bucket="no-such-container")
        with pytest.raises(FileNotFoundError, match="'no-such-container' does not exist"):
            nowhere.storage(
                "runs",
            ).check_root()


def test_a_url_may_name_container_and_account(azure_endpoint: str) -> None:
    cloud = Cloud.fresh("azure", azure_endpoint)
    cloud.storage("run").write_bytes("a", b"x")
    for url in (f"abfs://{cloud.bucket}/run", f"abfss://{cloud.bucket}@account.dfs.core.windows.net/run"):
        assert cloud.storage("", url=url).read_bytes("a") == b"x"


def test_blocks_of_an_upload_that_never_ended_are_in_nobodys_way(azure_endpoint: str) -> None:
    cloud = Cloud.fresh("azure", azure_endpoint)
    storage = cloud.storage("run", write_block_bytes=MIB // 4)
    cloud.fault("error", "PUT", "*comp=blocklist", code="AccessDenied")
    with pytest.raises(PermissionError):
        storage.write_bytes("a", bytes(MIB))
    cloud.control.clear()
    storage.write_bytes("a", b"small")
    assert cloud.read("run/a") == b"small"
    with pytest.raises(FileExistsError):
        storage.write_bytes("a", b"again")
