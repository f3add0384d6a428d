from __future__ import annotations

import uuid
from urllib.parse import urlsplit

import pytest

from ckpt_core.storage import ObjectStorage, Storage
from ckpt_core.testing import StorageTests
from tests.support.emulators import AZURE_ACCOUNT, AZURE_KEY

pytestmark = pytest.mark.emulator

MIB = 2**20


class TestAzureStorage(StorageTests):
    @pytest.fixture
    def storage(self, azure_endpoint: str) -> Storage:
        from azure.storage.blob import BlobServiceClient

        self.client = BlobServiceClient(azure_endpoint, credential=AZURE_KEY)
        container = f"container-{uuid.uuid4().hex}"
        self.client.create_container(container)
        return _storage(f"az://{container}/runs/llama", azure_endpoint)

    def raw_read(self, storage: Storage, key: str) -> bytes:
        from azure.core.exceptions import ResourceNotFoundError

        try:
            return self.client.get_blob_client(*_address(storage, key)).download_blob().readall()
        except ResourceNotFoundError:
            raise FileNotFoundError(key) from None

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        self.client.get_blob_client(*_address(storage, key)).upload_blob(content, overwrite=True)


def _storage(url: str, endpoint: str) -> ObjectStorage:
    told = {"AccountName": AZURE_ACCOUNT, "AccountKey": AZURE_KEY, "BlobEndpoint": endpoint}
    connection = ";".join(f"{key}={value}" for key, value in told.items())
    return ObjectStorage(url, connection_string=connection, write_block_bytes=MIB // 4)


def _address(storage: Storage, key: str) -> tuple[str, str]:
    url = urlsplit(storage.url)
    return url.netloc, f"{url.path}/{key}".strip("/")
