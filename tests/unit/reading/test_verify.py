"""Pass 1: everything that will be used is compared, nothing else is read, and what is wrong is named."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from ckpt_core.reading import Engine, Payload, RangeRead
from ckpt_core.storage import LocalStorage
from ckpt_core.storage.local import _paths
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage
from tests.unit.reading.payloads import MIB, STORAGES, DataFile, descriptors, make_storage, whole

LAYOUTS = {
    "small payloads": ([1, 300, 16_384, 70_000], 0),
    "payloads in blocks": ([MIB + 1, 3 * MIB, 9 * MIB + 77], MIB),
    "stock payloads": ([5, 2 * MIB, 9 * MIB + 77], 0),
    "blocks larger than a request": ([11 * MIB], 5 * MIB),
}


def problems(storage, wanted, **options) -> list[str]:
    with Engine(storage, "step", **options) as engine:
        return [str(failure) for failure in engine.verify(wanted)]


@pytest.fixture(scope="module", params=LAYOUTS)
def file(request) -> DataFile:
    sizes, block_bytes = LAYOUTS[request.param]
    return DataFile("0.distcp", sizes, block_bytes=block_bytes)


@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("threads", [1, 3, None])
def test_what_was_saved_is_found_whole(tmp_path, kind, threads, file):
    file.put(storage := make_storage(kind, tmp_path))
    assert problems(storage, map(whole, file.payloads), threads=threads) == []


@pytest.mark.parametrize("damaged", [False, True])
def test_a_page_cache_is_verified_without_a_copy(tmp_path, monkeypatch, damaged):
    """What differs is copied, to be compared once more; the names are those of any storage."""
    file = DataFile("0.distcp", [9 * MIB + 77, 20 * MIB], block_bytes=MIB)
    file.put(storage := LocalStorage(tmp_path), file.flipped(200) if damaged else None)
    real, copied = os.preadv, []

    def preadv(descriptor, buffers, offset):
        copied.append(offset)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    found = problems(storage, map(whole, file.payloads))
    assert bool(copied) == bool(found) == damaged
    assert all(f"'0.distcp@100': bytes 100 to {100 + MIB} of the file differ" in each for each in found)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.77, 1.0])
def test_one_flipped_bit_is_found_wherever_it_is(file, where):
    for payload in file.payloads:
        at = payload.offset + int(where * (payload.size_bytes - 1))
        file.put(storage := MemoryStorage(), file.flipped(at))
        (problem,) = problems(storage, map(whole, file.payloads))
        assert problem.startswith(f"0.distcp: tensor {payload.key!r}: bytes ")
        assert "differ from those that were saved: CRC-32 is " in problem
        start, _, stop = problem.partition(": bytes ")[2].split()[:3]
        assert int(start) <= at < int(stop)


def test_zeros_and_swapped_payloads_are_found(tmp_path):
    file = DataFile("0.distcp", [3 * MIB, 3 * MIB], block_bytes=MIB)
    one, other = (
        file.content[payload.offset : payload.offset + payload.size_bytes] for payload in file.payloads
    )
    for changed in (
        file.content.replace(one, other),
        file.content.replace(one, bytes(len(one))),
    ):
        file.put(storage := MemoryStorage(), changed)
        (problem,) = problems(storage, map(whole, file.payloads))
        first = file.payloads[0].offset
        assert f"tensor '0.distcp@100': bytes {first} to {first + 3 * MIB} of the file" in problem


def test_neighbouring_blocks_are_told_as_one_and_long_lists_end():
    file = DataFile("0.distcp", [12 * MIB], block_bytes=MIB)
    content = bytearray(file.content)
    for block in (0, 1, 4, 6, 8, 10):
        content[100 + block * MIB] ^= 1
    file.put(storage := MemoryStorage(), bytes(content))
    (problem,) = problems(storage, [whole(file.payloads[0])])
    runs = f"100 to {100 + 2 * MIB}, {100 + 4 * MIB} to {100 + 5 * MIB}, {100 + 6 * MIB} to {100 + 7 * MIB}"
    assert f"bytes {runs} and 2 more of the file" in problem


def test_only_the_blocks_that_are_used_are_read():
    file = DataFile("0.distcp", [12 * MIB], block_bytes=MIB)
    (payload,) = file.payloads
    file.put(storage := MemoryStorage(), file.flipped(100 + 5 * MIB))
    with Engine(storage, "step") as engine:
        ranges = [(0, 1), (2 * MIB - 1, 2 * MIB + 1), (11 * MIB + 5, 12 * MIB), (7, 9)]
        assert engine.verify([RangeRead(payload=payload, start=a, stop=b) for a, b in ranges]) == []
        assert engine.bytes_read == 4 * MIB
    with Engine(storage, "step") as engine:
        assert engine.verify([RangeRead(payload=payload, start=5 * MIB + 7, stop=5 * MIB + 8)]) != []


def test_a_part_of_a_payload_without_blocks_is_verified_by_the_whole():
    file = DataFile("0.distcp", [9 * MIB])
    (payload,) = file.payloads
    file.put(storage := MemoryStorage(), file.flipped(100 + 8 * MIB))
    with Engine(storage, "step") as engine:
        assert len(engine.verify([RangeRead(payload=payload, start=0, stop=5)])) == 1
        assert engine.bytes_read == 9 * MIB


def test_what_is_wanted_twice_is_read_once(file):
    file.put(storage := MemoryStorage())
    with Engine(storage, "step") as once, Engine(storage, "step") as often:
        once.verify([whole(payload) for payload in file.payloads])
        often.verify([whole(payload) for payload in (*file.payloads, *reversed(file.payloads))])
        assert often.bytes_read == once.bytes_read


def test_neighbours_are_one_request():
    file = DataFile("0.distcp", [16_384] * 100, gap=5_000)
    file.put(inner := MemoryStorage())
    storage = FaultyStorage(inner)
    assert problems(storage, map(whole, file.payloads)) == []
    assert [op.method for op in storage.operations] == ["open_ranges", "read_into"]


def test_small_payloads_of_others_are_not_read_along():
    """Where ranks share the small tensors among them, nearly nothing is read by two of them."""
    file = DataFile("0.distcp", [100_000] * 40, gap=5_000)
    file.put(storage := MemoryStorage())
    with Engine(storage, "step") as engine:
        engine.verify(map(whole, file.payloads[::4]))
        assert engine.bytes_read == 10 * 100_000


def test_a_payload_without_a_checksum_cannot_be_verified(file):
    file.put(storage := MemoryStorage())
    bare = Payload(path="0.distcp", key="w", offset=100, size_bytes=1, crc32=None)
    assert problems(storage, [whole(bare)]) == [
        "0.distcp: cannot be verified: tensor 'w' has no checksum",
    ]


def test_a_missing_file_is_told_once(tmp_path):
    files = [DataFile(f"{number}.distcp", [9 * MIB, 5, 5], block_bytes=MIB) for number in range(3)]
    for storage in (make_storage(kind, tmp_path) for kind in STORAGES):
        for file in files[::2]:
            file.put(storage)
        wanted = [whole(payload) for file in files for payload in file.payloads]
        assert problems(storage, wanted) == ["1.distcp: missing"]


@pytest.mark.parametrize("kind", STORAGES)
def test_a_truncated_file_is_told_with_what_it_lost(tmp_path, kind):
    file = DataFile("0.distcp", [2 * MIB, 1000, 10_000], block_bytes=MIB)
    file.put(storage := make_storage(kind, tmp_path), file.content[: file.payloads[1].offset + 10])
    first, second, third = file.payloads
    assert problems(storage, map(whole, file.payloads)) == [
        f"0.distcp: ends 11090 bytes too early: of {second.key!r}, {third.key!r} not everything is there"
    ]
    assert problems(storage, [whole(first)]) == []


def test_a_block_that_cannot_be_read_is_told_and_its_neighbours_are_not(tmp_path, monkeypatch):
    file = DataFile("0.distcp", [3 * MIB, 1000, 1000], block_bytes=MIB)
    file.put(storage := LocalStorage(tmp_path))
    bad, real = file.payloads[0].offset + MIB + 7, os.preadv

    def preadv(descriptor, buffers, offset):
        if offset <= bad < offset + len(buffers[0]):
            raise OSError(errno.EIO, "Input/output error")
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    # A page of a bad block cannot be mapped; the kernel says no more than that.
    monkeypatch.setattr(_paths._libc, "madvise", lambda *_: -1)
    (problem,) = problems(storage, map(whole, file.payloads))
    assert problem.startswith(
        f"0.distcp: tensor '0.distcp@100': bytes {100 + MIB} to {100 + 2 * MIB} of the file cannot be read: "
        "[Errno 5] Input/output error: "
    )


def test_storage_that_is_unwell_is_no_damage(file):
    file.put(inner := MemoryStorage())
    for method in ("open_ranges", "read_into"):
        storage = FaultyStorage(inner, [Fault(method=method, error=OSError(errno.ESTALE, "Stale handle"))])
        with pytest.raises(OSError, match=r"Stale handle.*step/0\.distcp") as caught:
            problems(storage, map(whole, file.payloads))
        assert caught.value.errno == errno.ESTALE


def test_failures_come_in_the_order_of_the_files():
    files = [DataFile(f"{number}.distcp", [1000, 2 * MIB, 1000], block_bytes=MIB) for number in range(3)]
    storage = MemoryStorage()
    for file in files:
        content = bytearray(file.content)
        for payload in file.payloads:
            content[payload.offset] ^= 1
        file.put(storage, bytes(content))
    wanted = [whole(payload) for file in reversed(files) for payload in reversed(file.payloads)]
    found = problems(storage, wanted)
    expected = [f"{payload.path}: tensor {payload.key!r}" for file in files for payload in file.payloads]
    assert [problem.partition(": bytes")[0] for problem in found] == expected


def test_no_thread_outlives_a_pass(file):
    file.put(inner := MemoryStorage())
    other = DataFile("1.distcp", [100])
    other.put(inner)
    storage = FaultyStorage(inner, [Fault(method="read_into", nth=1, error=OSError(errno.ENXIO, "gone"))])
    problems(inner, map(whole, file.payloads), threads=8)
    with pytest.raises(OSError, match="gone"):
        problems(storage, map(whole, [*file.payloads, *other.payloads]), threads=8)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-read")]


def test_many_files_do_not_exhaust_descriptors(tmp_path):
    storage = LocalStorage(tmp_path)
    files = [DataFile(f"{number:03}.distcp", [100]) for number in range(300)]
    for file in files:
        (tmp_path / "step").mkdir(exist_ok=True)
        (tmp_path / "step" / file.path).write_bytes(file.content)
    before = descriptors()
    with Engine(storage, "step", threads=3) as engine:
        assert engine.verify(whole(file.payloads[0]) for file in files) == []
        assert descriptors() <= before + 3
    assert descriptors() == before


def test_payloads_that_overlap_are_each_verified():
    """No honest table says so; a hostile one must not hide a payload behind another."""
    file = DataFile("0.distcp", [6 * MIB], block_bytes=MIB)
    inner = Payload(path="0.distcp", key="inner", offset=5000, size_bytes=100, crc32=1)
    file.put(storage := MemoryStorage())
    (problem,) = problems(storage, [whole(file.payloads[0]), whole(inner)])
    assert "tensor 'inner': bytes 5000 to 5100" in problem


def test_nothing_wanted_is_nothing_read(file):
    storage = FaultyStorage(MemoryStorage())
    empty = RangeRead(payload=file.payloads[0], start=0, stop=0)
    assert problems(storage, []) == problems(storage, [empty]) == []
    assert storage.operations == ()
