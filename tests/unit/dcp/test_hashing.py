"""Files hashed behind whoever writes them."""

from __future__ import annotations

import hashlib
import threading

import pytest

from ckpt_core.saving._files import RankFiles
from ckpt_core.saving._reports import ReportCache
from tests.kit.memory import MemoryStorage


def pieces_of(*contents: bytes) -> list[memoryview]:
    return [memoryview(content) for content in contents]


def hashing_of(algorithm: str = "sha256") -> RankFiles:
    return RankFiles(MemoryStorage(), "d", reports=ReportCache(algorithm=algorithm))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ckpt-hash")]


@pytest.mark.parametrize("contents", [(), (b"",), (b"one",), (b"a" * 5000, b"b" * 5000, b"c")])
def test_a_file_has_the_hash_of_its_pieces_in_order(contents):
    with hashing_of() as hashing:
        assert list(hashing.follow("f", pieces_of(*contents))) == list(contents)
        assert hashing.hashes() == {"f": f"sha256:{hashlib.sha256(b''.join(contents)).hexdigest()}"}
    assert threads() == []


def test_of_crc32_nothing_is_computed_twice():
    with hashing_of("crc32") as hashing:
        pieces = pieces_of(b"x")
        assert hashing.follow("f", pieces) is pieces
        assert hashing.hashes() == {}


def test_files_are_hashed_side_by_side_and_told_apart():
    with hashing_of() as hashing:
        for name in ("a", "b", "c"):
            list(hashing.follow(name, pieces_of(name.encode() * 3000)))
        found = hashing.hashes()
    assert found == {
        name: f"sha256:{hashlib.sha256(name.encode() * 3000).hexdigest()}" for name in ("a", "b", "c")
    }


def test_a_writing_that_fails_leaves_no_thread():
    with hashing_of() as hashing:
        followed = iter(hashing.follow("f", pieces_of(b"x", b"y", b"z")))
        assert next(followed) == b"x"  # and then the disk is full
        assert len(threads()) == 1
    assert threads() == []


def test_what_cannot_be_hashed_fails_the_write():
    with hashing_of() as hashing, pytest.raises(BufferError):
        list(hashing.follow("f", [memoryview(b"xyxy")[::2]]))  # not contiguous
    assert threads() == []


def test_while_the_interpreter_ends_the_writer_hashes_itself(monkeypatch):
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with hashing_of() as hashing:
        assert list(hashing.follow("f", pieces_of(b"x", b"y"))) == [b"x", b"y"]
        assert hashing.hashes() == {"f": f"sha256:{hashlib.sha256(b'xy').hexdigest()}"}
