"""The small files of a checkpoint."""

from __future__ import annotations

import torch

from ckpt_core import CheckpointManager
from ckpt_core.commit import Manifest
from ckpt_core.loading._committed_files import CommittedFiles
from ckpt_core.names import MANIFEST, chunks_name
from ckpt_core.storage import LocalStorage
from ckpt_core.testing import FaultyStorage


def test_a_chunk_table_is_read_once_however_many_ask(tmp_path):
    with CheckpointManager(tmp_path) as checkpoints:
        name = checkpoints.save(1, {"model": {"w": torch.ones(3)}}).result().name
    storage = FaultyStorage(LocalStorage(tmp_path))
    manifest = Manifest.from_bytes(storage.read_bytes(f"{name}/{MANIFEST}"))
    files = CommittedFiles(storage, name, manifest)
    assert files.table(0) is files.table(0)
    opened = [operation for operation in storage.operations if operation.method == "open"]
    assert [operation.key for operation in opened if chunks_name(0) in operation.key] == [
        f"{name}/{chunks_name(0)}"
    ]
