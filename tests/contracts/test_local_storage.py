from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import StorageTests

pytestmark = pytest.mark.usefixtures("disk_syncs")


class TestLocalStorage(StorageTests):
    def make_storage(self, directory: Path) -> Storage:
        return LocalStorage(directory / "runs" / "llama")

    def raw_read(self, storage: Storage, key: str) -> bytes:
        return Path(storage.url, key).read_bytes()

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        path = Path(storage.url, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
