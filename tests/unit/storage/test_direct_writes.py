from __future__ import annotations

import errno
import mmap
import os
import random

import pytest

from ckpt_core.storage import LocalStorage, object_storage
from tests.kit.memory import MemoryStorage


def pieces_of(content: bytes, piece_bytes: int):
    memory = mmap.mmap(-1, max(len(content), 1))
    memory[: len(content)] = content
    view = memoryview(memory)[: len(content)]
    return [view[start : start + piece_bytes] for start in range(0, len(content), piece_bytes)]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 300_000])
@pytest.mark.parametrize(
    "make", [LocalStorage, lambda _: MemoryStorage(), lambda _: object_storage("memory://direct")]
)
def test_pieces_become_one_file_on_every_storage(tmp_path, size, make):
    content = random.Random(size).randbytes(size)
    storage = make(tmp_path)
    storage.delete("deep")
    storage.write_pieces("deep/file", pieces_of(content, 64 << 10))
    assert storage.read_bytes("deep/file") == content
    with pytest.raises(FileExistsError):
        storage.write_pieces("deep/file", [])


def test_what_the_filesystem_refuses_directly_goes_through_the_page_cache(tmp_path, monkeypatch):
    real, refused = os.pwrite, []

    def pwrite(file: int, data: memoryview, offset: int) -> int:
        if os.get_blocking(file) and _is_direct(file):
            refused.append(offset)
            raise OSError(errno.EINVAL, "no direct I/O here")
        return real(file, data, offset)

    monkeypatch.setattr(os, "pwrite", pwrite)
    content = random.Random(1).randbytes(200_000)
    LocalStorage(tmp_path).write_pieces("file", pieces_of(content, 64 << 10))
    assert (tmp_path / "file").read_bytes() == content
    if not refused:
        pytest.skip("this filesystem cannot open files directly")


def _is_direct(file: int) -> bool:
    import fcntl

    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))


def test_short_writes_are_continued(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(
        os,
        "pwrite",
        lambda file, data, offset: (
            real(file, data[: max(1, len(data) // 2)], offset)
            if not _is_direct(file)
            else real(file, data, offset)
        ),
    )
    content = random.Random(2).randbytes(70_001)
    LocalStorage(tmp_path).write_pieces("file", pieces_of(content, 64 << 10))
    assert (tmp_path / "file").read_bytes() == content


def test_an_error_in_any_piece_is_raised(tmp_path):
    def broken():
        yield from pieces_of(bytes(128 << 10), 64 << 10)
        raise OSError(errno.EIO, "source broke")

    with pytest.raises(OSError, match="source broke"):
        LocalStorage(tmp_path).write_pieces("file", broken())
