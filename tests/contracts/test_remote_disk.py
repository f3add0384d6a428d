"""The contract of a storage for a disk that another rank serves."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_core.coordination import Talks
from ckpt_core.groups import RemoteDisk
from ckpt_core.groups._remote_disk import PIECE_BYTES, DiskService, PieceMemory
from ckpt_core.storage import ForeignFileError, LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage, StorageTests
from tests.kit.talks import talks_of


@pytest.fixture(scope="module")
def pair() -> Iterator[list[Talks]]:
    made = talks_of(2)
    yield made
    for each in made:
        each.close()


def remote(pair: list[Talks], disk: Storage) -> RemoteDisk:
    pair[1].answer_with(DiskService(disk, 1).answer)
    return RemoteDisk(pair[0], 1, disk.url)


class TestRemoteDisk(StorageTests):
    @pytest.fixture
    def storage(self, tmp_path: Path, pair: list[Talks]) -> Storage:
        return remote(pair, LocalStorage(tmp_path))

    def raw_read(self, storage: Storage, key: str) -> bytes:
        return Path(storage.url, key).read_bytes()

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        path = Path(storage.url, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES, 2 * PIECE_BYTES, 3 * PIECE_BYTES + 4097])
def test_large_files_are_written_and_read_by_several_threads_at_once(pair, tmp_path, size):
    content = bytes(range(251)) * (size // 251 + 1)
    content = content[:size]
    disk = remote(pair, LocalStorage(tmp_path))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: disk.write_bytes(f"f{number}", content), range(4)))
        for number in range(4):
            with disk.open_ranges(f"f{number}") as reader:
                parts = [bytearray(size // 4) for _ in range(4)]
                found = pool.map(
                    lambda place, parts=parts, reader=reader: reader.read_into(
                        place * (size // 4), memoryview(parts[place])
                    ),
                    range(4),
                )
                list(found)
                assert b"".join(parts) == content[: 4 * (size // 4)]


@pytest.mark.parametrize("method", ["write", "close", "create"])
def test_a_write_that_fails_says_why_and_on_which_node_and_the_next_one_works(pair, tmp_path, method):
    full = OSError(errno.ENOSPC, "No space left on device")
    disk = remote(pair, FaultyStorage(LocalStorage(tmp_path), [Fault(method=method, key="x*", error=full)]))
    with pytest.raises(OSError, match=r"No space left on device.*on the node of rank 1") as caught:
        disk.write_bytes("x", bytes(3 * PIECE_BYTES))
    assert caught.value.errno == errno.ENOSPC
    disk.write_bytes("y", b"1")
    assert disk.read_bytes("y") == b"1"


def test_a_link_out_of_the_root_is_refused_as_on_the_own_disk(pair, tmp_path):
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_bytes(b"1")
    (tmp_path / "root" / "link").symlink_to(tmp_path / "secret")
    disk = remote(pair, LocalStorage(tmp_path / "root"))
    with pytest.raises(ForeignFileError, match="on the node of rank 1"):
        disk.read_bytes("link")
    with pytest.raises(ForeignFileError, match="on the node of rank 1"):
        disk.crc32("link", 0, 1)


def test_pieces_that_fail_on_the_way_leave_no_file_that_looks_whole(pair, tmp_path):
    disk = remote(pair, LocalStorage(tmp_path))

    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(PIECE_BYTES))
        yield memoryview(bytes(PIECE_BYTES))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        disk.write_pieces("x", pieces())
    disk.write_bytes("y", b"1")


def test_a_rank_that_is_gone_is_named(pair):
    alone = talks_of(2, 0.2)
    alone[1].close()
    disk = RemoteDisk(alone[0], 1, "/root")
    with pytest.raises(TimeoutError, match=r"rank 1 did not answer for 0.2 s"):
        disk.list("")
    alone[0].close()


def test_memory_of_a_piece_is_used_again_only_when_nothing_refers_to_it():
    memory = PieceMemory()
    first = memory.take(8192)
    part = first[100:200]
    part[:] = b"1" * 100
    del first
    second = memory.take(8192)
    second[:] = b"2" * 8192
    assert bytes(part) == b"1" * 100
    del part, second
    assert len(memory._free) == 2
    third, fourth = memory.take(8192), memory.take(5)
    assert len(memory._free) == 0
    assert (len(third), len(fourth)) == (8192, 5)
