"""Stock DCP reads a directory for a host; nothing in it runs, wherever it was planted."""

from __future__ import annotations

import io
import os
import pickle
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from ckpt_core.dcp import check_stock, without_pickle
from ckpt_core.errors import CorruptCheckpointError, UnsafeCheckpointError


class Planted:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return os.makedirs, (str(self.trace),)


def state(offset: float = 0.0):
    return {
        "weight": torch.arange(6.0).reshape(2, 3) + offset,
        "groups": [{"lr": 0.1 + offset, "betas": (0.9, 0.99)}, {"lr": 0.2, "names": ["a"]}],
        "step": 3 + offset,
    }


@pytest.fixture
def folder(tmp_path) -> Path:
    dcp.save(state(), checkpoint_id=tmp_path / "stock", no_dist=True)
    return tmp_path / "stock"


def loaded(folder: Path):
    target = state(100.0)
    dcp.load(target, checkpoint_id=folder, no_dist=True)
    return target


def planted_metadata(folder: Path, trace: Path) -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    metadata.planner_data["trap"] = Planted(trace)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def planted_rank_metadata(folder: Path, trace: Path) -> None:
    (folder / ".metadata").unlink()
    (folder / "__0.metadata").write_bytes(pickle.dumps(Planted(trace)))


def planted_value(folder: Path, trace: Path, key: str = "step") -> None:
    metadata = dcp.FileSystemReader(folder).read_metadata()
    content = io.BytesIO()
    torch.save(Planted(trace), content)
    (folder / "planted.distcp").write_bytes(content.getvalue())
    index = next(each for each in metadata.storage_data if each.fqn == key)
    info = metadata.storage_data.pop(index)
    info.relative_path, info.offset, info.length = "planted.distcp", 0, len(content.getvalue())
    metadata.storage_data[MetadataIndex(key)] = info
    metadata.state_dict_metadata[key] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def tensor_that_is_a_value(folder: Path, trace: Path) -> None:
    """Stock asks `.metadata`, not the target, whether an entry is to be unpickled."""
    planted_value(folder, trace, "weight")


PLANTED = [planted_metadata, planted_rank_metadata, planted_value, tensor_that_is_a_value]


def test_what_stock_wrote_is_loaded_as_ever(folder):
    check_stock(folder)
    with without_pickle():
        target = loaded(folder)
    assert str(target) == str(state())
    assert str(loaded(folder)) == str(state())  # and stock is what it was


@pytest.mark.parametrize("plant", PLANTED, ids=lambda each: each.__name__)
def test_what_is_planted_in_a_stock_directory_is_refused_before_stock_sees_it(tmp_path, folder, plant):
    plant(folder, tmp_path / "trace")
    with pytest.raises((UnsafeCheckpointError, CorruptCheckpointError), match=str(folder)) as caught:
        check_stock(folder)
    assert "allow_pickle=True" in str(caught.value) or plant is planted_rank_metadata
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda each: each.__name__)
def test_what_is_planted_after_the_check_does_not_run_either(tmp_path, folder, plant):
    check_stock(folder)
    plant(folder, tmp_path / "trace")
    # DCP wraps whatever a reader raises in an error of its own.
    with without_pickle(), pytest.raises(CheckpointException):
        loaded(folder)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda each: each.__name__)
def test_stock_alone_would_have_run_it(tmp_path, folder, plant):
    plant(folder, tmp_path / "trace")
    with suppress(CheckpointException, AttributeError):
        loaded(folder)
    assert (tmp_path / "trace").exists()


def test_a_chunk_that_cannot_be_there_is_refused_before_it_is_read(folder):
    (folder / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CorruptCheckpointError, match="cannot be"):
        check_stock(folder)
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(CorruptCheckpointError, match="missing"):
        check_stock(folder)


def test_a_directory_of_links_is_read_as_stock_reads_it(tmp_path, folder):
    links = tmp_path / "links"
    links.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
    check_stock(links)
    shutil.rmtree(folder)
    with pytest.raises(CorruptCheckpointError, match="missing"):
        check_stock(links)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _sparse(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(40 << 30)


@pytest.mark.parametrize("replace", [_pipe, _sparse])
def test_an_index_that_could_hang_or_fill_the_memory_is_refused_unread(folder, replace):
    replace(folder / ".metadata")
    with pytest.raises(CorruptCheckpointError, match="metadata"):
        check_stock(folder)
