"""What a load would refuse: refused by the save, found by `verify`, or found before anything changes."""

from __future__ import annotations

import json
import logging
import pickle
import zlib
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.fsdp import fully_shard

from ckpt_core import CheckpointManager, TrainState
from ckpt_core.cli import main
from ckpt_core.commit import Catalog, begin, commit, verify
from ckpt_core.coordination import Solo
from ckpt_core.dcp import check_metadata, load_metadata
from ckpt_core.errors import ConfigError, CorruptCheckpointError, IncompatibleCheckpointError, SaveError
from ckpt_core.formats.chunks import ChunkTable
from ckpt_core.state import Counters
from ckpt_core.storage import LocalStorage
from tests.kit.ranks import run_ranks
from tests.unit.commit.checkpoints import manifest_of, write_files


def each_for_itself(root: str) -> str:
    """A rank that takes itself for the whole job, with half of a sharded model."""
    model = nn.Linear(8, 8)
    fully_shard(model)
    with CheckpointManager(Path(root) / str(torch.distributed.get_rank()), coordinator=Solo()) as checkpoints:
        with pytest.raises(SaveError) as caught:
            checkpoints.save(1, TrainState(model=model))
        assert checkpoints.checkpoints() == []
    return str(caught.value)


@pytest.mark.distributed
def test_half_of_a_sharded_tensor_is_refused_at_the_save(tmp_path):
    for told in run_ranks(each_for_itself, 2, str(tmp_path), timeout_seconds=60):
        assert "the chunks of 'model.weight' have 32 of its 64 elements" in told


# -- verify and load agree


def index_of(*, chunks: list[tuple[int, int]], length: int = 4096, file: str = "__0_0.distcp") -> Metadata:
    """Of a tensor of 64 elements, in chunks given by (offset, size)."""
    boxes = [ChunkStorageMetadata(torch.Size([offset]), torch.Size([size])) for offset, size in chunks]
    tensor = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([64]), boxes)
    places = {
        MetadataIndex("w", box.offsets): _StorageInfo(file, place * length, length)
        for place, box in enumerate(boxes)
    }
    places[MetadataIndex("n")] = _StorageInfo(file, len(boxes) * length, 100)
    return Metadata({"w": tensor, "n": BytesStorageMetadata()}, storage_data=places)


def without(metadata: Metadata, fqn: str) -> Metadata:
    metadata.storage_data = {key: place for key, place in metadata.storage_data.items() if key.fqn != fqn}
    return metadata


INDICES: dict[str, tuple[Callable[[], Metadata], str]] = {
    "whole": (lambda: index_of(chunks=[(0, 64)]), ""),
    "in two": (lambda: index_of(chunks=[(0, 32), (32, 32)]), ""),
    "half": (lambda: index_of(chunks=[(0, 32)]), "32 of its 64 elements"),
    "overlapping": (lambda: index_of(chunks=[(0, 40), (24, 24)]), "overlap"),
    "outside": (lambda: index_of(chunks=[(32, 64)]), "not inside"),
    "too small a place": (lambda: index_of(chunks=[(0, 64)], length=7), "its place"),
    "beyond the file": (lambda: index_of(chunks=[(0, 64)], length=1 << 20), "ends at byte"),
    "another file": (lambda: index_of(chunks=[(0, 64)], file="__7_0.distcp"), "missing"),
    "nowhere": (lambda: without(index_of(chunks=[(0, 64)]), "n"), "is nowhere"),
}


def table_of(metadata: Metadata) -> bytes:
    """The chunk table that goes with it; checksums do not matter here."""
    rows = list(metadata.storage_data.items())
    columns = {
        "key": [key.fqn for key, _ in rows],
        "shard_offsets": [None if key.offset is None else list(key.offset) for key, _ in rows],
        "offset": [place.offset for _, place in rows],
        "size_bytes": [place.length for _, place in rows],
        "payload_offset": [None for _ in rows],
        "payload_bytes": [None for _ in rows],
        "dtype": [None for _ in rows],
    }
    file = {
        "path": "__0_0.distcp",
        "size_bytes": 1 << 30,
        "chunks": columns,
        "crc32": "00000000" * len(rows),
        "block_crc32": "",
    }
    table = json.dumps({"format_version": 1, "block_bytes": 1 << 20, "files": [file]})
    content = zlib.compress(table.encode())
    assert ChunkTable.from_bytes(content, source="a table").files
    return content


def committed(root: Path, metadata: Metadata, table: bytes | None = None) -> LocalStorage:
    """A checkpoint of which every file is as its manifest says."""
    storage = LocalStorage(root)
    files = {
        ".metadata": pickle.dumps(metadata),
        "__0_0.distcp": bytes(20_000),
        "chunks-00000.json.z": table_of(metadata) if table is None else table,
    }
    working = begin(storage, "step-000000001", "00000001")
    write_files(storage, working, files)
    commit(storage, working, "step-000000001", manifest_of(1, files))
    return storage


@pytest.mark.parametrize(("make", "told"), INDICES.values(), ids=INDICES)
def test_verify_fails_on_what_a_load_would_refuse_and_on_nothing_else(tmp_path, make, told, capsys):
    storage = committed(tmp_path, make())
    sizes = {"__0_0.distcp": 20_000}

    def size(path: str) -> int:
        if path not in sizes:
            raise FileNotFoundError(path)
        return sizes[path]

    def load() -> None:
        check_metadata(load_metadata(pickle.dumps(make()), ".metadata"), ".metadata", size)

    failures = verify(storage, "step-000000001")
    code = main(["verify", str(tmp_path)])
    capsys.readouterr()
    if not told:
        load()
        assert (failures, code) == ([], 0)
        return
    with pytest.raises(CorruptCheckpointError, match=told):
        load()
    assert [failure.path for failure in failures] == [".metadata"]
    assert told in failures[0].problem
    assert code == 1


def test_verify_compares_the_index_with_the_chunk_tables(tmp_path):
    table = table_of(without(index_of(chunks=[(0, 64)]), "n"))
    storage = committed(tmp_path, index_of(chunks=[(0, 64)]), table)
    assert "'n' is at another place than chunks-00000.json.z says" in str(verify(storage, "step-000000001"))
    with CheckpointManager(tmp_path) as checkpoints:
        assert checkpoints.verify()


def test_what_our_saves_write_is_verified_to_the_index(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(model=nn.Linear(3, 3), progress=Counters(when=timedelta(1))))
        checkpoints.wait()
        assert checkpoints.verify() == []
    assert Catalog(LocalStorage(tmp_path)).latest() is not None


# -- found before anything live changes


class Rope(nn.Module):
    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("rope", buffer)


@pytest.mark.parametrize(
    "live",
    [
        lambda: torch.zeros(1, 4).expand(3, 4),
        lambda: torch.zeros(3, 1).expand(3, 4),
        lambda: torch.zeros(12).as_strided((3, 4), (4, 0)),
    ],
    ids=["rows", "columns", "as_strided"],
)
def test_a_load_into_an_expanded_tensor_is_refused_before_anything_changes(tmp_path, live):
    with CheckpointManager(tmp_path) as checkpoints:
        checkpoints.save(1, TrainState(model=Rope(torch.randn(3, 4))))
    model = Rope(live())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with CheckpointManager(tmp_path) as checkpoints, pytest.raises(IncompatibleCheckpointError) as caught:
        checkpoints.resume(TrainState(model=model))
    assert "model.rope: expanded here" in str(caught.value)
    assert "nothing was loaded" in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# -- said once


def test_what_needs_pickle_is_said_once_in_the_life_of_a_manager(tmp_path, caplog):
    item, other = Counters(share=Fraction(1, 3)), Counters(share=1)
    with caplog.at_level(logging.WARNING, "ckpt_core"), CheckpointManager(tmp_path) as checkpoints:
        for step in range(3):
            checkpoints.save(step, TrainState(model=nn.Linear(2, 2), first=item, second=other))
        other.share = Fraction(2, 3)
        for step in range(3, 6):
            checkpoints.save(step, TrainState(model=nn.Linear(2, 2), first=item, second=other))
    said = [record.getMessage() for record in caplog.records if "allow_pickle=True" in record.getMessage()]
    assert ["'first'" in line for line in said] == [True, False]
    assert ["'second'" in line for line in said] == [False, True]


def test_who_has_allowed_pickle_is_not_told_of_it(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "ckpt_core"):
        with CheckpointManager(tmp_path, allow_pickle=True) as checkpoints:
            checkpoints.save(1, TrainState(model=nn.Linear(2, 2), first=Counters(share=Fraction(1, 3))))
        with CheckpointManager(tmp_path, allow_pickle=True) as checkpoints:
            back = Counters(share=None)
            checkpoints.resume(TrainState(model=nn.Linear(2, 2), first=back))
    assert back.share == Fraction(1, 3)
    assert caplog.records == []


def test_what_is_said_after_prewarm_is_said_at_the_first_save(tmp_path, caplog):
    state = TrainState(model=nn.Linear(2, 2), first=Counters(share=Fraction(1, 3)))
    with caplog.at_level(logging.WARNING, "ckpt_core"), CheckpointManager(tmp_path) as checkpoints:
        checkpoints.prewarm(state)
        checkpoints.save(1, state)
    assert len([record for record in caplog.records if "'first'" in record.getMessage()]) == 1


class Tagged(dict[str, Any]):
    """A dict that a checkpoint cannot know."""


def test_types_that_change_are_said_once(tmp_path, caplog):
    state = TrainState(model=nn.Linear(2, 2), first=Counters(settings=Tagged(a=1)))
    with caplog.at_level(logging.WARNING, "ckpt_core"), CheckpointManager(tmp_path) as checkpoints:
        for step in range(3):
            checkpoints.save(step, state)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "first.settings from Tagged to dict" in line


@pytest.mark.parametrize("mapping", [{1: 0, "1": 1}, {"a": {None: 0, "None": 1}}, {True: 0, "True": 1}])
def test_keys_that_would_become_one_are_refused(tmp_path, mapping):
    with CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises((ConfigError, SaveError), match="several keys of one mapping are called"):
            checkpoints.save(1, {"fine": torch.ones(1), **mapping})
        assert checkpoints.checkpoints() == []
