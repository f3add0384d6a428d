"""The Hub as a place, by the client's own filesystem, over a service of this process in place of the Hub."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from ckpt_core.storage import Storage, open_storage
from ckpt_core.testing import StorageTests
from tests.support.services.hub import Hub, running_hub


@pytest.fixture
def hub() -> Generator[Hub]:
    with running_hub() as hub:
        yield hub


def opened(hub: Hub) -> Storage:
    return open_storage("hf://user/repo/weights", {"endpoint": hub.url, "token": False})


def test_each_file_is_a_commit_and_nothing_is_there_of_one_that_is_refused(hub: Hub) -> None:
    storage = opened(hub)
    storage.write_bytes("step/a", b"1")
    storage.replace("step/a", b"2")
    storage.write_bytes("step/b", b"3")
    with hub.guard, pytest.raises(OSError, match="412"):  # of somebody else, at the same time
        storage.write_bytes("step/c", b"4")
    storage.delete("step")
    assert hub.files == {}
    written = ["weights/step/a", "weights/step/a", "weights/step/b"]
    assert hub.commits == [[each] for each in [*written, "-weights/step/a", "-weights/step/b"]]


def test_a_repository_that_is_not_there_is_said(hub: Hub) -> None:
    nowhere = open_storage("hf://nobody/none", {"endpoint": hub.url, "token": False})
    with pytest.raises(FileNotFoundError, match="Make sure the repository"):
        nowhere.write_bytes("a", b"1")


@pytest.mark.slow
class TestHubStorage(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path, hub: Hub) -> Storage:
        del tmp_path
        self.hub = hub
        return opened(hub)

    def test_threads_write_side_by_side(self, storage: Storage) -> None:
        pytest.skip("the Hub takes one commit at a time")

    def raw_read(self, storage: Storage, key: str) -> bytes:
        del storage
        if f"weights/{key}" not in self.hub.files:
            raise FileNotFoundError(key)
        return self.hub.files[f"weights/{key}"]

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        del storage
        self.hub.files[f"weights/{key}"] = content
