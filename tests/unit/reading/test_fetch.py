"""Pass 2: every byte arrives where it is wanted, from storage or from what pass 1 kept."""

from __future__ import annotations

import ctypes
import errno
import random
import threading
from array import array
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.reading import REQUEST_BYTES, Engine, Payload, RangeRead
from ckpt_core.storage import LocalStorage, object_storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage
from tests.unit.reading.payloads import MIB, STORAGES, DataFile, TensorTarget, descriptors, make_storage

SIZES = [1, 300, 16_384, 70_000, 3 * MIB, 70_000, 5, 19 * MIB + 3, 9]


class Network(MemoryStorage):
    """Like an object store: nothing is read again from memory, and something may happen on the way."""

    rereads_from_memory = False

    def __init__(self, on_the_way: Callable[[int, memoryview], object]) -> None:
        super().__init__()
        self._on_the_way = on_the_way

    @contextmanager
    def open_ranges(self, key):
        with super().open_ranges(key) as inner:

            def read_into(offset: int, buffer: memoryview) -> None:
                inner.read_into(offset, buffer)
                self._on_the_way(offset, buffer)

            yield SimpleNamespace(size_bytes=inner.size_bytes, read_into=read_into)


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ckpt-read")]


@pytest.fixture(scope="module", params=[0, MIB], ids=["stock", "blocks"])
def file(request) -> DataFile:
    return DataFile("0.distcp", SIZES, block_bytes=request.param)


def ranges(file: DataFile, landing: TensorTarget, seed: str) -> list[RangeRead]:
    """Whole payloads, parts, overlaps and doublets, in any order, delivered in both ways."""
    chance = random.Random(seed)
    found = []
    for payload in file.payloads * 2:
        start = chance.choice([0, chance.randrange(payload.size_bytes)])
        stop = chance.choice([payload.size_bytes, chance.randrange(start, payload.size_bytes + 1)])
        found.append(
            landing.range(payload, start, stop, take=chance.random() < 0.5 and stop - start <= REQUEST_BYTES)
        )
    chance.shuffle(found)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORAGES)
@pytest.mark.parametrize("keep_bytes", [0, 6 * MIB, 256 * MIB])
@pytest.mark.parametrize("verified", [True, False])
def test_every_byte_arrives_where_it_is_wanted(tmp_path, request, file, kind, keep_bytes, verified):
    """In every case other ranges."""
    file.put(storage := make_storage(kind, tmp_path))
    landing = TensorTarget()
    wanted = ranges(file, landing, request.node.name)
    with Engine(storage, "step", threads=3, keep_bytes=keep_bytes) as engine:
        if verified:
            assert engine.verify(wanted) == []
        engine.fetch(wanted)
    for each, found in landing.landed():
        assert found == file.bytes_of(each), f"{each.start} to {each.stop} of {each.payload.key}"


def test_a_range_is_taken_once_on_a_reading_thread(file):
    file.put(storage := MemoryStorage())
    calls = []
    wanted = [
        RangeRead(
            payload=p, start=0, stop=p.size_bytes, take=lambda view, p=p: calls.append((p.key, len(view)))
        )
        for p in file.payloads
        if p.size_bytes <= REQUEST_BYTES
    ]
    with Engine(storage, "step", threads=4) as engine:
        engine.fetch(wanted)
    assert sorted(calls) == sorted((each.payload.key, each.stop) for each in wanted)


def test_an_empty_range_is_taken_without_reading():
    payload = Payload(path="0.distcp", key="w", offset=100, size_bytes=0, crc32=0)
    storage, calls = FaultyStorage(MemoryStorage()), []
    with Engine(storage, "step") as engine:
        engine.fetch(
            [RangeRead(payload=payload, start=0, stop=0, take=lambda view: calls.append(bytes(view)))]
        )
    assert calls == [b""]
    assert storage.operations == ()


def test_bytes_are_aligned_in_memory_as_they_are_in_the_file():
    """So that any dtype can be viewed in what is taken."""
    file = DataFile("0.distcp", [777] * 20, gap=64)
    file.put(storage := MemoryStorage())
    addresses = {}
    wanted = [
        RangeRead(
            payload=p, start=1, stop=700, take=lambda view, p=p: addresses.update({p.offset + 1: _at(view)})
        )
        for p in file.payloads
    ]
    with Engine(storage, "step") as engine:
        engine.fetch(wanted)
    assert len(addresses) == 20
    assert all((address - place) % 4096 == 0 for place, address in addresses.items())


def _at(view: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def test_memory_of_any_format_is_filled():
    file = DataFile("0.distcp", [8_000])
    file.put(storage := MemoryStorage())
    place = array("d", bytes(8_000))
    with Engine(storage, "step") as engine:
        engine.fetch([RangeRead(payload=file.payloads[0], start=0, stop=8_000, into=memoryview(place))])
        view = memoryview(bytearray(8_000)).cast("B").cast("d", (10, 100))
        engine.fetch([RangeRead(payload=file.payloads[0], start=0, stop=8_000, into=view)])
    assert place.tobytes() == view.tobytes() == file.content[100:8_100]


def test_only_what_is_wanted_is_read(tmp_path):
    file = DataFile("0.distcp", [12 * MIB] * 2, block_bytes=MIB)
    file.put(storage := LocalStorage(tmp_path))
    landing = TensorTarget()
    with Engine(storage, "step") as engine:
        engine.fetch([landing.range(file.payloads[0], 5, 3 * MIB), landing.range(file.payloads[1], 0, 7)])
        assert engine.bytes_read == 3 * MIB - 5 + 7


def test_neighbours_share_a_request():
    file = DataFile("0.distcp", [16_384] * 100, gap=5_000)
    file.put(inner := MemoryStorage())
    storage, landing = FaultyStorage(inner), TensorTarget()
    with Engine(storage, "step") as engine:
        engine.fetch([landing.whole(payload) for payload in file.payloads])
    assert [op.method for op in storage.operations] == ["open_ranges", "read_into"]
    assert all(found == file.bytes_of(wanted) for wanted, found in landing.landed())


@pytest.mark.parametrize("take", [False, True])
def test_a_network_is_used_once_for_what_is_kept(file, take):
    file.put(storage := object_storage("memory://once"))
    landing = TensorTarget()
    wanted = [landing.whole(p, take=take and p.size_bytes <= REQUEST_BYTES) for p in file.payloads]
    with Engine(storage, "step") as engine:
        assert engine.verify(wanted) == []
        read = engine.bytes_read
        assert read <= len(file.content)
        engine.fetch(wanted)
        assert engine.bytes_read == read
    assert all(found == file.bytes_of(each) for each, found in landing.landed())


def test_no_more_is_kept_than_allowed(file):
    file.put(storage := object_storage("memory://some"))
    landing = TensorTarget()
    wanted = [landing.whole(payload) for payload in file.payloads]
    with Engine(storage, "step", keep_bytes=10 * MIB) as engine:
        assert engine.verify(wanted) == []
        read = engine.bytes_read
        engine.fetch(wanted)
        assert read + len(file.content) - 10 * MIB - 1_000 <= engine.bytes_read
        assert engine.bytes_read <= read + len(file.content) - 5 * MIB


def test_a_page_cache_is_trusted_with_the_bytes(tmp_path, file):
    """Nothing is kept in our own memory where the system keeps it."""
    file.put(storage := LocalStorage(tmp_path))
    wanted = [TensorTarget().whole(payload) for payload in file.payloads]
    with Engine(storage, "step") as engine:
        engine.verify(wanted)
        read = engine.bytes_read
        engine.fetch(wanted)
        assert engine.bytes_read >= read + sum(payload.size_bytes for payload in file.payloads)


@pytest.mark.parametrize("take", [False, True])
@pytest.mark.parametrize("place", [3, 4, 7], ids=["small", "medium", "large"])
def test_what_is_read_again_is_verified_again_before_it_is_delivered(file, take, place):
    payload = file.payloads[place]
    file.put(storage := object_storage("memory://again"))
    landing = TensorTarget()
    wanted = [landing.range(payload, 5, min(payload.size_bytes - 5, 2 * MIB), take=take)]
    with Engine(storage, "step", keep_bytes=0) as engine:
        assert engine.verify(wanted) == []
        file.put(storage, file.flipped(payload.offset + 50))
        with pytest.raises(CorruptCheckpointError, match="read 2 times") as caught:
            engine.fetch(wanted)
    assert caught.value.failures[0].path == "0.distcp"
    _, found = landing.landed()[0]
    # Of a large range other pieces may have arrived; the changed one has not.
    assert found[:1_000] == (b"" if take else b"\xaa" * len(found[:1_000]))


def test_what_is_compared_on_arrival_crosses_the_network_once(file):
    """In any piece: into place, through buffers, and where only the whole payload has a checksum."""
    file.put(storage := object_storage("memory://arrival"))
    landing = TensorTarget()
    wanted = ranges(file, landing, "arrival")
    whole = [landing.whole(payload) for payload in file.payloads]
    with Engine(storage, "step") as engine:
        assert engine.verify(whole, on_arrival=True) == []
        engine.fetch(whole)
        assert engine.bytes_read <= len(file.content)
        engine.fetch(wanted)
    assert all(found == file.bytes_of(each) for each, found in landing.landed())


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("place", [3, 4, 7], ids=["small", "medium", "large"])
def test_what_differs_on_arrival_is_asked_for_once_more(place, lasting):
    file = DataFile("0.distcp", SIZES, block_bytes=MIB)
    payload = file.payloads[place]
    failed = []

    def alter(start: int, buffer: memoryview) -> None:
        if len(buffer) > 1 and (lasting or not failed):
            failed.append(start)
            buffer[payload.offset + 50 - start] ^= 1

    file.put(storage := Network(alter))
    landing = TensorTarget()
    with Engine(storage, "step", threads=1) as engine:
        assert engine.verify([landing.whole(payload)], on_arrival=True) == []
        assert engine.bytes_read == 1
        if lasting:
            with pytest.raises(CorruptCheckpointError, match="read 2 times"):
                engine.fetch([landing.whole(payload)])
        else:
            engine.fetch([landing.whole(payload)])
            assert landing.landed()[1][1] == file.bytes_of(landing.landed()[1][0])
            assert len(failed) == 1


def test_a_page_cache_is_verified_before_anything_arrives(tmp_path, file):
    file.put(storage := LocalStorage(tmp_path), file.flipped(file.payloads[3].offset))
    with Engine(storage, "step") as engine:
        found = engine.verify([TensorTarget().whole(file.payloads[3])], on_arrival=True)
    assert [failure.path for failure in found] == ["0.distcp"]


def test_a_range_that_is_too_long_to_be_taken_is_refused_before_anything_is_read():
    size = REQUEST_BYTES + 1
    payload = Payload(path="0.distcp", key="w", offset=0, size_bytes=size, crc32=None)
    storage, landing = FaultyStorage(MemoryStorage()), TensorTarget()
    with Engine(storage, "step") as engine, pytest.raises(ValueError, match="take them in parts of 4194304"):
        engine.fetch([landing.range(payload, 0, 5), landing.whole(payload, take=True)])
    assert storage.operations == ()


@pytest.mark.slow
def test_the_longest_range_that_may_be_taken_arrives(tmp_path):
    file = DataFile("0.distcp", [REQUEST_BYTES + 9], block_bytes=MIB)
    for kind in ("local", "object"):
        file.put(storage := make_storage(kind, tmp_path))
        landing = TensorTarget()
        wanted = [
            landing.range(file.payloads[0], start, start + REQUEST_BYTES, take=True) for start in (3, 9)
        ]
        with Engine(storage, "step", keep_bytes=0, threads=2) as engine:
            assert engine.verify(wanted) == []
            engine.fetch(wanted)
        assert all(found == file.bytes_of(each) for each, found in landing.landed())


@pytest.mark.parametrize("where", [{}, {"into": memoryview(bytearray(5)), "take": print}])
def test_a_range_has_exactly_one_place_to_go_to(file, where):
    wanted = RangeRead(payload=file.payloads[1], start=0, stop=5, **where)
    with (
        Engine(MemoryStorage(), "step") as engine,
        pytest.raises(ValueError, match="either `into` or `take`"),
    ):
        engine.fetch([wanted])


@pytest.mark.parametrize(
    ("start", "stop", "into"),
    [
        (-1, 5, None),
        (5, 4, None),
        (0, 301, None),
        (0, 5, memoryview(bytearray(4))),
        (0, 5, memoryview(b"01234")),
        (0, 5, memoryview(bytearray(10))[::2]),
    ],
)
def test_ranges_and_memory_that_do_not_fit_are_refused(file, start, stop, into):
    with pytest.raises(ValueError, match=r"payload of|must be writable"):
        RangeRead(payload=file.payloads[1], start=start, stop=stop, into=into)


def test_block_checksums_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="1 block checksums"):
        Payload(path="a", key="w", offset=0, size_bytes=MIB + 1, crc32=0, block_crcs=[1])


@pytest.mark.parametrize("verified", [False, True])
def test_an_object_store_is_asked_by_all_threads_at_once(verified):
    file = DataFile("0.distcp", [2 * MIB] * 8, block_bytes=MIB, gap=100_000)
    meeting = threading.Barrier(4, timeout=60)
    file.put(storage := Network(lambda start, buffer: meeting.wait()))
    landing = TensorTarget()
    wanted = [landing.whole(payload) for payload in file.payloads]
    with Engine(storage, "step", threads=4) as engine:
        if verified:
            # Four requests, none of which is answered before all have been made.
            assert engine.verify(wanted[::2]) == []
        else:
            engine.fetch(wanted)
            assert all(found == file.bytes_of(each) for each, found in landing.landed())


def test_nothing_that_was_found_changed_is_kept():
    file = DataFile("0.distcp", [1000])
    file.put(storage := object_storage("memory://changed"), file.flipped(500))
    with Engine(storage, "step") as engine:
        wanted = TensorTarget()
        assert len(engine.verify([wanted.whole(file.payloads[0])])) == 1
        file.put(storage)
        engine.fetch([wanted.whole(file.payloads[0])])
    assert wanted.landed()[1][1] == file.bytes_of(wanted.landed()[1][0])


# --- errors


@pytest.mark.parametrize("nth", [0, 1])
def test_an_error_is_raised_with_its_file_when_all_threads_have_stopped(file, nth):
    file.put(inner := MemoryStorage())
    fault = Fault(method="read_into", nth=nth, error=OSError(errno.EIO, "Input/output error"))
    landing = TensorTarget()
    with (
        Engine(FaultyStorage(inner, [fault]), "step", threads=3) as engine,
        pytest.raises(OSError, match=r"Input/output error.*step/0\.distcp"),
    ):
        engine.fetch([landing.whole(payload) for payload in file.payloads])
    assert engine_threads() == []


def test_after_an_error_no_request_begins(file):
    storage = FaultyStorage(MemoryStorage(), [Fault(method="open_ranges", error=OSError(errno.EIO, "x"))])
    landing = TensorTarget()
    with Engine(storage, "step", threads=1) as engine, pytest.raises(OSError, match="x"):
        engine.fetch([landing.whole(payload) for payload in file.payloads])
    assert len(storage.operations) == 1
    assert landing.untouched()


@pytest.mark.parametrize("kind", STORAGES)
def test_a_file_that_became_shorter_is_named(tmp_path, kind, file):
    file.put(storage := make_storage(kind, tmp_path), file.content[:-105])
    with Engine(storage, "step") as engine, pytest.raises(EOFError, match=r"step/0\.distcp: ends at byte"):
        engine.fetch([TensorTarget().whole(payload) for payload in file.payloads])


def test_an_error_of_the_taker_is_raised(file):
    file.put(storage := MemoryStorage())

    def refuse(view: memoryview) -> None:
        raise ZeroDivisionError

    with Engine(storage, "step") as engine, pytest.raises(ZeroDivisionError):
        engine.fetch([RangeRead(payload=file.payloads[0], start=0, stop=1, take=refuse)])


def test_descriptors_are_closed_at_the_end(tmp_path, file):
    file.put(storage := LocalStorage(tmp_path))
    before = descriptors()
    with Engine(storage, "step") as engine:
        engine.fetch([TensorTarget().whole(payload) for payload in file.payloads])
        assert descriptors() == before + 1
    assert descriptors() == before


@pytest.mark.parametrize(("count", "told"), [(3, False), (140, True)])
def test_files_that_are_replaced_between_the_passes_are_read_as_verified_or_not_at_all(tmp_path, count, told):
    """As by a save that takes a checkpoint's name meanwhile; more than so many files are not kept open."""
    storage = LocalStorage(tmp_path)
    files = [DataFile(f"__{rank}_0.distcp", [300, 40]) for rank in range(count)]
    landing = TensorTarget()
    with Engine(storage, "step") as engine:
        for file in files:
            file.put(storage)
        wanted = [landing.whole(payload) for file in files for payload in file.payloads]
        assert engine.verify(wanted) == []
        for file in files:
            file.put(storage, bytes(len(file.content)))
        if told:
            with pytest.raises(CorruptCheckpointError):
                engine.fetch(wanted)
            assert landing.untouched()
        else:
            engine.fetch(wanted)
            by_path = {file.path: file for file in files}
            for each, content in landing.landed():
                assert content == by_path[each.payload.path].bytes_of(each)
