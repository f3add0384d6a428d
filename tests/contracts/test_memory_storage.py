from __future__ import annotations

from pathlib import Path

from ckpt_core.storage import MemoryStorage, Storage
from ckpt_core.testing import StorageTests


class TestMemoryStorage(StorageTests):
    def make_storage(self, directory: Path) -> Storage:
        return MemoryStorage(directory.name)

    def raw_read(self, storage: Storage, key: str) -> bytes:
        assert isinstance(storage, MemoryStorage)
        return storage._tree.get(key)

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        assert isinstance(storage, MemoryStorage)
        storage._tree.put(key, content)
