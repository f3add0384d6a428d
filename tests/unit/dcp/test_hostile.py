"""Checkpoints made to harm who loads them: nothing runs, and the error says where it was."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_core.dcp import (
    ChunkLocator,
    check_metadata,
    checked_zip,
    entries,
    load_chunk,
    load_metadata,
    load_value,
)
from ckpt_core.dcp._torch_zip import value_entry
from ckpt_core.errors import CorruptCheckpointError, UnsafeCheckpointError
from ckpt_core.formats import legacy

PLACE = "root/step/.metadata"
NAME = "root/step/__0_0.distcp: 'w'"


def pickled(body: bytes, protocol: int = 4) -> bytes:
    return b"\x80" + bytes([protocol]) + body + b"."


class Planted:
    """Makes a directory when unpickled."""

    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self):
        return Path.mkdir, (self.evidence,)


# -- .metadata


@pytest.mark.parametrize(
    "body",
    [
        b"Nr\xff\xff\xff\x7f",
        b"X\xff\xff\xff\x7f",
        b"\x8d" + b"\xff" * 7 + b"\x7f",
        b"\x95" + b"\xff" * 8 + b"N",
        b"\x8b\xff\xff\xff\x7f",
        b"\x96" + b"\xff" * 7 + b"\x7f",
    ],
    ids=["memo", "text", "long text", "frame", "long", "bytearray"],
)
def test_an_absurd_length_is_refused_before_it_is_allocated(body):
    with pytest.raises(CorruptCheckpointError):
        load_metadata(pickled(body), PLACE)


@pytest.mark.parametrize(
    "name",
    ["torch.distributed.checkpoint.metadata Metadata", "torch.distributed.checkpoint.metadata MetadataIndex",
     "torch.distributed.checkpoint.metadata TensorProperties", "torch Size", "collections OrderedDict",
     "torch.distributed.checkpoint.filesystem _StorageInfo", "torch.serialization _get_layout",
     "torch.distributed.checkpoint.metadata _MEM_FORMAT_ENCODING", "torch float32"],
)  # fmt: skip
def test_nothing_that_outlives_the_load_can_be_altered(name):
    module, attribute = name.split()
    state = b"X\6\0\0\0hackedK\1s"
    body = b"c%b\n%b\n" % (module.encode(), attribute.encode()) + b"N}" + state + b"\x86b"
    with pytest.raises((UnsafeCheckpointError, CorruptCheckpointError), match=r"\.metadata"):
        load_metadata(pickled(body), PLACE)
    found: Any = __import__(module, fromlist=[attribute])
    assert not hasattr(getattr(found, attribute), "hacked")


def test_a_member_of_torchs_enumeration_cannot_be_altered():
    encoding = b"ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nK\0\x85R"
    with pytest.raises((UnsafeCheckpointError, CorruptCheckpointError)):
        load_metadata(pickled(encoding + b"}X\7\0\0\0_value_K\5sb"), PLACE)
    assert pickle.loads(pickled(encoding)).value == 0


def tensor(shape: tuple[int, ...], *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        TensorProperties(dtype=torch.float32),
        torch.Size(shape),
        [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in chunks],
    )


def metadata(entry: TensorStorageMetadata, length: int = 4096) -> Metadata:
    infos = {
        MetadataIndex("w", chunk.offsets): _StorageInfo("__0_0.distcp", i * length, length)
        for i, chunk in enumerate(entry.chunks)
    }
    return Metadata({"w": entry}, storage_data=infos)


def read(made: Metadata) -> Metadata:
    return load_metadata(pickle.dumps(made), PLACE)


def check(made: Metadata, size: int = 1 << 40) -> None:
    check_metadata(read(made), PLACE, lambda _: size)


@pytest.mark.parametrize(
    "path",
    ["../x", "/etc/passwd", "a/../../b", "..\\b", "a\\b", "a\0b", "a//b", "./a", "", ".", "a/", "C:\\x",
     "manifest.json", "a\nb", "x" * 5000],
)  # fmt: skip
def test_a_path_that_could_leave_the_directory_is_refused(path):
    made = Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo(path, 0, 1)})
    with pytest.raises(CorruptCheckpointError, match=r"root/step/\.metadata"):
        read(made)


@pytest.mark.parametrize("value", [-1, 2**63, 2**53 + 1, 2**2000, True, 1.0, "1", None, (1,), torch.float32])
@pytest.mark.parametrize("field", ["offset", "length"])
def test_an_offset_or_length_that_is_none_is_refused(field, value):
    info = _StorageInfo("__0_0.distcp", **{"offset": 0, "length": 1, field: value})
    with pytest.raises(CorruptCheckpointError, match=r"root/step/\.metadata"):
        read(Metadata({}, storage_data={MetadataIndex("w"): info}))


@pytest.mark.parametrize(
    "made",
    [
        Metadata({1: BytesStorageMetadata()}, storage_data={}),
        Metadata({"w": 3}, storage_data={}),
        Metadata([], storage_data={}),
        Metadata({"w": TensorStorageMetadata(3, torch.Size([1]), [])}, storage_data={}),
        Metadata({}, storage_data={"w": _StorageInfo("a", 0, 1)}),
        Metadata({}, storage_data={MetadataIndex(7): _StorageInfo("a", 0, 1)}),
        Metadata({}, storage_data={MetadataIndex("w"): _StorageInfo("a", 0, 1, [7])}),
        Metadata({}, storage_data={}, planner_data={"w": ({},)}),
        Metadata({}, storage_data={}, planner_data=[1]),
        Metadata({}, storage_data={}, planner_data={1: ("w",)}),
    ],
    ids=str,
)
def test_metadata_of_wrong_types_is_refused(made):
    with pytest.raises(CorruptCheckpointError, match=r"root/step/\.metadata"):
        read(made)


def test_an_entry_beyond_the_end_of_its_file_is_refused_and_named():
    with pytest.raises(
        CorruptCheckpointError, match=r"'w' ends at byte 4096 of '__0_0.distcp', which has 100"
    ):
        check(metadata(tensor((2,), ((0,), (2,)))), size=100)


def test_a_missing_file_is_named():
    def missing(path: str) -> int:
        raise FileNotFoundError(path)

    with pytest.raises(CorruptCheckpointError, match=r"'__0_0.distcp' is missing"):
        check_metadata(read(metadata(tensor((2,), ((0,), (2,))))), PLACE, missing)


IMPOSSIBLE = {
    "hole": tensor((10,), ((0,), (4,)), ((5,), (5,))),
    "overlap": tensor((10,), ((0,), (6,)), ((4,), (4,))),
    "overlap of the right volume": tensor((4, 4), ((0, 0), (2, 4)), ((1, 0), (2, 4))),
    "irregular overlap": tensor(
        (4, 4), ((0, 0), (3, 3)), ((2, 2), (2, 2)), ((3, 0), (1, 2)), ((0, 3), (1, 1))
    ),
    "outside": tensor((10,), ((5,), (10,))),
    "negative offset": tensor((10,), ((-1,), (10,))),
    "negative size": tensor((10,), ((0,), (-10,))),
    "negative shape": tensor((-10, -1), ((0, 0), (10, 1))),
    "other dimensions": tensor((10,), ((0, 0), (10, 1))),
    "no chunks": tensor((10,)),
    "too large for its place": tensor((100_000,), ((0,), (100_000,))),
    "product overflows": tensor((2**50, 2**50), ((0, 0), (2**50, 2**50))),
    "huge": tensor((2**62,), ((0,), (2**62,))),
    "65 dimensions": tensor((1,) * 64, ((0,) * 64, (1,) * 64)),
}
IMPOSSIBLE["65 dimensions"].size = torch.Size([1] * 65)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_impossible_chunks_are_refused_and_named(name):
    with pytest.raises(CorruptCheckpointError, match=r"root/step/\.metadata") as caught:
        check(metadata(IMPOSSIBLE[name]))
    assert "'w'" in str(caught.value) or name == "65 dimensions"


POSSIBLE = {
    "whole": tensor((10,), ((0,), (10,))),
    "0-d": tensor((), ((), ())),
    "empty": tensor((0, 3), ((0, 0), (0, 3))),
    "rows": tensor((10, 2), ((0, 0), (4, 2)), ((4, 0), (6, 2))),
    "grid": tensor((3, 3), ((0, 0), (2, 2)), ((0, 2), (2, 1)), ((2, 0), (1, 2)), ((2, 2), (1, 1))),
    "irregular": tensor(
        (3, 3), ((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))
    ),
    "a rank without elements": tensor((2,), ((0,), (1,)), ((1,), (1,)), ((2,), (0,))),
    "two ranks without elements": tensor((2,), ((0,), (2,)), ((2,), (0,)), ((2,), (0,))),
}  # fmt: skip


@pytest.mark.parametrize("name", POSSIBLE)
def test_possible_chunks_pass(name):
    check(metadata(POSSIBLE[name]))


def test_a_chunk_without_a_place_and_a_place_without_a_chunk_are_named():
    made = metadata(tensor((2,), ((0,), (1,)), ((1,), (1,))))
    del made.storage_data[MetadataIndex("w", (1,))]
    with pytest.raises(CorruptCheckpointError, match=r"'w' at \(1,\) is nowhere"):
        check(made)
    made = metadata(tensor((2,), ((0,), (2,))))
    made.storage_data[MetadataIndex("x")] = _StorageInfo("__0_0.distcp", 0, 1)
    with pytest.raises(CorruptCheckpointError, match="'x' has a place but is not described"):
        check(made)
    with pytest.raises(CorruptCheckpointError, match="'v' is nowhere"):
        check(Metadata({"v": BytesStorageMetadata()}, storage_data={}))


@pytest.mark.slow
def test_very_many_irregular_overlapping_chunks_end_in_bounded_time():
    count = 20_000
    chunks = [((0, i), (count * (i % 2) + 1, 1)) for i in range(count)]
    shape = (count * 2, count)
    made = tensor(shape, *chunks)
    missing = shape[0] * shape[1] - sum(sizes[0] * sizes[1] for _, sizes in chunks)
    made.chunks.append(ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((1, 1))))
    assert missing > 0
    with pytest.raises(CorruptCheckpointError):
        check(metadata(made, 1 << 20))


# -- entries


def zipped(data_pickle: bytes, *storages: bytes, method: int = zipfile.ZIP_STORED, **more: bytes) -> bytes:
    """A zip as torch lays it out, around any pickle."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        records = {"data.pkl": data_pickle, "version": b"3\n", "byteorder": b"little"}
        for name, content in (records | more).items():
            archive.writestr(f"archive/{name}", content)
        for key, content in enumerate(storages):
            archive.writestr(f"archive/data/{key}", content)
    return buffer.getvalue()


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def place_of(chunk: bytes, shape: tuple[int, ...] = (2,)) -> Any:
    made = read(metadata(tensor(shape, ((0,) * len(shape), shape)), len(chunk)))
    (index,) = made.storage_data
    places = ChunkLocator(
        made, directory="root/step", read_at=lambda _, start, size: chunk[start : start + size]
    )
    return places.find([index])[index]


def test_a_planted_call_in_a_chunk_or_byte_entry_is_not_executed(tmp_path):
    evidence = tmp_path / "evidence"
    chunk = saved(Planted(evidence))
    assert not evidence.exists()
    with pytest.raises(CorruptCheckpointError, match=r"'w'.*no 'data/0'"):
        place_of(chunk)
    with_data = zipped(pickle.dumps(Planted(evidence), protocol=2), bytes(8))
    assert place_of(with_data).payload is None
    for content in (chunk, with_data):
        with pytest.raises(UnsafeCheckpointError, match=r"__0_0.distcp: 'w'.*none of its code was executed"):
            load_chunk(content, NAME)
    assert not evidence.exists()


@pytest.mark.parametrize("level", [1, 9])
def test_a_zip_bomb_is_refused_before_it_is_unpacked(level):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(1, protocol=2))
        archive.writestr("archive/data/0", bytes(50 << 20))
    bomb = buffer.getvalue()
    assert len(bomb) < 1 << 20
    for act in (checked_zip, load_chunk):
        with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp: 'w'.*compressed"):
            act(bomb, NAME)
    with pytest.raises(CorruptCheckpointError, match="compressed"):
        place_of(bomb)


def test_records_over_one_another_are_refused():
    """One payload that many records share: each is stored, and yet they add up to more than the zip."""
    content = bytearray(zipped(pickle.dumps(1, protocol=2), bytes(1000), bytes(1000)))
    first, second = (content.rfind(b"archive/data/%d" % key) for key in (0, 1))
    offset_field = slice(first - 4, first), slice(second - 4, second)
    content[offset_field[1]] = content[offset_field[0]]
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp: 'w'"):
        checked_zip(bytes(content), NAME)


@pytest.mark.parametrize("name", ["constants.pkl", "code/x.py", "../x", "data.pkl.debug_pkl"])
def test_a_record_that_torch_does_not_write_is_refused(name):
    with pytest.raises(CorruptCheckpointError, match=r"which torch\.save does not write"):
        checked_zip(zipped(pickle.dumps(1, protocol=2), **{name: b"x"}), NAME)


def test_two_records_of_one_name_are_refused():
    with pytest.raises(CorruptCheckpointError, match="directory is damaged"):
        checked_zip(zipped(pickle.dumps(1, protocol=2), **{"DATA.PKL": b"x"}), NAME)


def storage_pickle(numel: int, shape: int) -> bytes:
    return (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\n"
        b"X\1\0\0\x000X\3\0\0\0cpuJ%btQK\0J%b\x85K\1\x85\x89ccollections\nOrderedDict\n)RtR."
        % (struct.pack("<i", numel), struct.pack("<i", shape))
    )


def test_the_hand_made_pickle_is_one_that_torch_loads():
    assert load_chunk(zipped(storage_pickle(2, 2), bytes(8)), NAME).tolist() == [0, 0]


@pytest.mark.parametrize("numel", [3, 1 << 30, 0, -1])
def test_a_storage_larger_than_its_record_is_refused(numel):
    """Torch would make a tensor over memory that is not its own."""
    chunk = zipped(storage_pickle(numel, 2), bytes(8))
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp: 'w'.*storage '0' should have"):
        load_chunk(chunk, NAME)
    assert place_of(chunk).payload is None


@pytest.mark.parametrize("body", [b"Nr\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f"], ids=["memo", "text"])
def test_an_absurd_length_in_an_entry_is_refused_before_it_is_allocated(body):
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp: 'w'"):
        checked_zip(zipped(pickled(body, 2)), NAME)


@pytest.mark.parametrize(
    "value",
    [
        3, None, "text", b"bytes" * 1000, bytearray(b"x" * 100), 2**100, 1.5, True, {1, 2, 3}, complex(1, 2),
        {"betas": (0.9, 0.99), (1, (2, 3)): [{"x": ()}]},
        OrderedDict([("a", 1), ((1, 2), 3)]),
        {"t": torch.arange(5), "p": torch.nn.Parameter(torch.ones(2)), "h": torch.ones(3).half()[1:]},
        (3, tuple(range(625)), None),
        [(i, (i, "x")) for i in range(2000)],
        torch.Size((2, 3)), torch.float32, torch.device("cpu"), torch.ones(3, dtype=torch.float8_e5m2),
        torch.eye(3).to_sparse(),
    ],
    ids=lambda value: f"{type(value).__name__} {value!s:.20}",
)  # fmt: skip
def test_what_people_save_passes_the_check(value):
    content = saved(value)
    torch.load(io.BytesIO(content), weights_only=True)
    checked_zip(content, NAME)


def test_nested_lists_and_dictionaries_of_any_honest_depth_pass():
    value: Any = 1
    for _ in range(100):
        value = {"x": [value], "y": (value,)} if isinstance(value, int) else {"x": [value]}
    checked_zip(saved(value), NAME)


def test_a_trusted_entrys_pickle_is_left_alone_but_its_bytes_are_checked(tmp_path):
    content = saved(Planted(tmp_path / "x"))
    checked_zip(content, NAME, trusted=True)
    damaged = content.replace(b"mkdir", b"rmdir")
    with pytest.raises(CorruptCheckpointError, match="Bad CRC-32"):
        checked_zip(damaged, NAME, trusted=True)


def test_an_entry_written_without_checksums_is_said_to_be_unverified():
    torch.serialization.set_crc32_options(False)
    try:
        content = saved(torch.ones(2))
    finally:
        torch.serialization.set_crc32_options(True)
    checked_zip(content, NAME)


@pytest.mark.parametrize("content", [b"", b"PK", bytes(5000), b"PK\5\6" + bytes(18), pickle.dumps(1)])
def test_what_is_no_zip_is_corrupt_and_named(content):
    for act in (checked_zip, load_chunk):
        with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp: 'w'"):
            act(content, NAME)


def test_a_chunk_that_holds_no_tensor_is_corrupt():
    with pytest.raises(CorruptCheckpointError, match="holds a dict, not a tensor"):
        load_chunk(saved({"a": 1}), NAME)


@pytest.mark.parametrize("place", ["payload", "pickle"])
def test_a_flipped_bit_in_a_whole_chunk_is_found(place):
    content = bytearray(saved(torch.arange(100.0)))
    content[content.rfind(b"PK\1\2") // 2 if place == "payload" else content.find(b"FloatStorage")] ^= 1
    with pytest.raises(CorruptCheckpointError, match="Bad CRC-32"):
        load_chunk(bytes(content), NAME)


def outcome(act: Callable[[], Any], *expected: type[Exception]) -> Any:
    """What it gives; None if it raises one of the expected errors, any other passes on."""
    try:
        return act()
    except expected:
        return None


@pytest.mark.parametrize(
    ("value", "make"),
    [
        ({"lr": 0.1, "betas": (0.9, 0.99), "t": [1, 2], "name": "adam"}, saved),
        ([0.1, "adam", (1, None)], value_entry),
        ("x" * 300, value_entry),
        (2**80, value_entry),
    ],
    ids=["zip", "list", "text", "number"],
)
def test_no_flipped_bit_of_a_byte_entry_changes_what_is_loaded(value, make):
    intact = make(value)
    passed = 0
    for position in range(len(intact)):
        content = bytearray(intact)
        content[position] ^= 1 << position % 8
        whole = bytes(content)
        if outcome(lambda whole=whole: checked_zip(whole, NAME) is None, CorruptCheckpointError):
            passed += 1
            assert torch.load(io.BytesIO(content), weights_only=True) == value
    assert (0 < passed < len(intact) // 2) if make is saved else passed == 0


def test_what_is_planted_as_a_plain_value_is_not_executed(tmp_path):
    content = legacy.plain_value(pickle.dumps(Planted(tmp_path / "x"), protocol=2))
    checked_zip(content, NAME)
    with pytest.raises(UnsafeCheckpointError, match="only pickle can rebuild"):
        load_value(content, NAME, allow_pickle=False)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    "body",
    [b"Nr\xff\xff\xff\x7f", b"X\xff\xff\xff\x7f", storage_pickle(2, 2)],
    ids=["memo", "text", "tensor"],
)
def test_what_is_no_plain_value_is_refused_as_one(body):
    pickled_body = body if body[:1] == b"\x80" else pickled(body, 2)
    with pytest.raises(CorruptCheckpointError, match=r"__0_0.distcp: 'w'"):
        checked_zip(legacy.plain_value(pickled_body), NAME)


@pytest.mark.parametrize("seed", range(20))
def test_metadata_changed_at_random_is_read_or_refused(seed):
    chance = random.Random(seed)
    made = metadata(tensor((6, 2), ((0, 0), (4, 2)), ((4, 0), (2, 2))))
    made.planner_data = {"w": ("model", 0, "w")}
    intact = pickle.dumps(made, protocol=2 + seed % 4)
    refused = 0
    for _ in range(200):
        content = bytearray(intact)
        for _ in range(chance.randint(1, 4)):
            content[chance.randrange(len(content))] = chance.choice(
                [chance.randrange(256), *b"h)R.ub}]t\x85\x94Q0"]
            )
        errors = UnsafeCheckpointError, CorruptCheckpointError
        found = outcome(lambda content=bytes(content): load_metadata(content, PLACE), *errors)
        if found is None:
            refused += 1
        else:
            outcome(lambda found=found: check_metadata(found, PLACE, lambda _: 1 << 20), *errors)
            entries(found)
    assert refused > 100
