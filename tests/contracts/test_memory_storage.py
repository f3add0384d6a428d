from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ckpt_core.storage import Storage
from ckpt_core.testing import StorageTests
from tests.kit.memory import MemoryStorage


class TestMemoryStorage(StorageTests):
    def make_storage(self, directory: Path) -> Storage:
        return MemoryStorage(directory.name)

    def raw_read(self, storage: Storage, key: str) -> bytes:
        assert isinstance(storage, MemoryStorage)
        return storage._content(key)

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        assert isinstance(storage, MemoryStorage)
        storage._put(key, content)


@pytest.mark.parametrize("limit", [{"capacity_bytes": 10}, {"capacity_files": 2}])
def test_a_full_memory_storage_says_so_as_a_disk_does(limit):
    storage = MemoryStorage(**limit)
    storage.write_bytes("a/b", b"12345678")
    with pytest.raises(OSError, match="No space left") as caught:
        storage.write_bytes("c", b"123")
    assert caught.value.errno == errno.ENOSPC
    storage.replace("a/b", b"87654321")
    assert storage.read_bytes("a/b") == b"87654321"
    storage.delete("a")
    storage.delete("c")
    storage.write_bytes("c", b"123")
    assert storage.space() in {(7, 10, None), (None, None, 1)}
