"""A chunk of more than 4 GiB, and one that lies behind it, for real: takes 5 GiB of memory and of disk."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from isal import isal_zlib
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

from ckpt_core.storage import LocalStorage
from tests.unit.dcp.saved_entries import stored_crc
from tests.unit.dcp.writing import written

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

ROW_BYTES = 4093
ROWS = (1 << 32) // ROW_BYTES + 25_000
NEEDED_BYTES = 6 << 30


@pytest.mark.skipif(psutil.virtual_memory().available < NEEDED_BYTES, reason="needs 6 GiB of free memory")
def test_a_chunk_of_more_than_4_gib_and_what_follows_it_are_read_by_torch_and_zipfile(tmp_path: Path):
    row = torch.randint(256, (ROW_BYTES,), dtype=torch.uint8)
    small = torch.arange(1000.0)
    tree = {"large": row.expand(ROWS, ROW_BYTES), "small": small}
    written(LocalStorage(tmp_path), "large", tree)

    infos = FileSystemReader(tmp_path / "large").read_metadata().storage_data
    large, behind = infos[MetadataIndex("large", (0, 0))], infos[MetadataIndex("small", (0,))]
    assert large.offset == 0
    assert large.length > 1 << 32
    assert behind.offset > 1 << 32
    target = {"small": torch.zeros(1000)}
    dcp.load(target, checkpoint_id=tmp_path / "large", no_dist=True)
    assert torch.equal(target["small"], small)

    file = tmp_path / "large" / large.relative_path
    with file.open("rb") as stream:
        stream.seek(behind.offset)
        stored_crc(stream.read(behind.length), small.nbytes)
    os.truncate(file, large.length)  # what is left is the first
    rows = row.expand(10_000, ROW_BYTES).contiguous()
    loaded = torch.load(file, weights_only=True)
    assert loaded.shape == (ROWS, ROW_BYTES)
    crc = 0
    for part in loaded.split(len(rows)):
        assert torch.equal(part, rows[: len(part)])
        crc = isal_zlib.crc32(part.numpy(), crc)
    with zipfile.ZipFile(file) as archive:  # which would read all of it to compare what is compared here
        record = max(archive.infolist(), key=lambda each: each.file_size)
        assert (record.file_size, record.CRC) == (ROWS * ROW_BYTES, crc)
        assert archive.open(record).read(ROW_BYTES) == row.numpy().tobytes()
    file.unlink()  # pytest keeps the folders of the last runs
