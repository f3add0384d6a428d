from __future__ import annotations

import hashlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_core.formats.checksums import (
    CRC32,
    SHA256,
    Checksum,
    checksum,
    combine_crc32,
    crc32_text,
    is_checksum,
)


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_pieces_give_the_checksum_of_the_whole(pieces):
    whole = b"".join(pieces)
    crc, sha = Checksum(), Checksum(SHA256)
    for piece in pieces:
        crc.update(piece)
        sha.update(memoryview(piece))
    assert str(crc) == checksum(whole) == crc32_text(zlib.crc32(whole)) == f"crc32:{zlib.crc32(whole):08x}"
    assert str(sha) == checksum(whole, SHA256) == f"sha256:{hashlib.sha256(whole).hexdigest()}"


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_checksums_of_two_runs_combine(first, second):
    assert combine_crc32(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(first + second)


def test_a_checksum_knows_its_algorithm():
    assert Checksum.like(checksum(b"x", SHA256)).algorithm == SHA256
    assert Checksum.like("crc32:00000000").algorithm == CRC32


def test_an_unknown_algorithm_is_named():
    with pytest.raises(ValueError, match=r"'xxh3'.*crc32, sha256.*upgrade"):
        Checksum.like("xxh3:00")


@pytest.mark.parametrize("text", ["", "crc32:", ":00", "crc32:0X", "CRC32:00", "crc32:00\n", "a:b:00"])
def test_what_is_no_checksum_is_told_apart(text):
    assert not is_checksum(text)
    assert is_checksum("crc32:0badcafe")
    assert is_checksum("a-later-one:00")
