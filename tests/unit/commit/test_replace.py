"""Replacing a checkpoint that keeps its name, such as a host framework's `last.ckpt`."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from ckpt_core.commit import Catalog, Manifest, begin, commit, verify
from ckpt_core.errors import CheckpointExistsError, SaveError
from ckpt_core.formats.checksums import checksum
from ckpt_core.storage import LocalStorage, Storage, object_storage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.types import FileEntry
from tests.kit.memory import MemoryStorage


def _save(storage: Storage, step: int, save_id: str, *, replace: bool) -> None:
    working = begin(storage, "last.ckpt", save_id, replace=replace)
    content = f"step {step}".encode()
    storage.write_bytes(f"{working}/data", content)
    entry = FileEntry(path="data", size_bytes=len(content), checksum=checksum(content))
    manifest = Manifest(save_id=save_id, step=step, created=float(step), world_size=1, files=(entry,))
    commit(storage, working, "last.ckpt", manifest, replace=replace)


def _steps(storage: Storage) -> list[int]:
    assert all(verify(storage, info.name) == [] for info in Catalog(storage).committed())
    return [info.step for info in Catalog(storage).committed()]


def test_the_new_checkpoint_takes_the_name_of_the_old(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    _save(storage, 1, "00000001", replace=True)
    _save(storage, 2, "00000002", replace=True)
    assert _steps(storage) == [2]
    assert [entry.name for entry in storage.list("")] == ["last.ckpt"]


def test_without_replace_the_old_one_stays() -> None:
    storage = MemoryStorage()
    _save(storage, 1, "00000001", replace=False)
    with pytest.raises(CheckpointExistsError):
        _save(storage, 2, "00000002", replace=False)
    assert _steps(storage) == [1]


def test_an_object_store_refuses_to_replace() -> None:
    storage = object_storage("memory://replace-refused")
    _save(storage, 1, "00000001", replace=True)
    with pytest.raises(CheckpointExistsError):
        _save(storage, 2, "00000002", replace=True)
    assert _steps(storage) == [1]


def test_at_every_crash_point_one_of_the_two_has_the_name() -> None:
    plain = FaultyStorage(MemoryStorage())
    _save(plain, 1, "00000001", replace=True)
    first = len(plain.operations)
    _save(plain, 2, "00000002", replace=True)
    for number in range(first, len(plain.operations)):
        inner = MemoryStorage()
        _save(inner, 1, "00000001", replace=True)
        faulty = FaultyStorage(inner, [Fault(nth=number - first, error=OSError("crash"))])
        with suppress(OSError, SaveError):
            _save(faulty, 2, "00000002", replace=True)
        assert _steps(inner) in ([1], [2])
