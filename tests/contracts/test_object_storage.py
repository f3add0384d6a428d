"""`ObjectStorage` over fsspec's own in-memory filesystem: the adapter, without a network."""

from __future__ import annotations

import uuid
from pathlib import Path
from urllib.parse import urlsplit

import fsspec

from ckpt_core.storage import Storage, object_storage
from ckpt_core.testing import StorageTests


class TestObjectStorage(StorageTests):
    def make_storage(self, directory: Path) -> Storage:
        return object_storage(f"memory://bucket-{uuid.uuid4().hex}/run/")

    def raw_read(self, storage: Storage, key: str) -> bytes:
        return fsspec.filesystem("memory").cat_file(_path(storage, key))

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        fsspec.filesystem("memory").pipe_file(_path(storage, key), content)


def _path(storage: Storage, key: str) -> str:
    url = urlsplit(storage.url)
    return f"/{url.netloc}{url.path}/{key}"
