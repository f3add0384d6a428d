"""Small files of a root on several disks are read from a disk where they are whole."""

from __future__ import annotations

import errno
from collections.abc import Callable
from itertools import count

import pytest

from ckpt_core.errors import CorruptCheckpointError
from ckpt_core.groups import GroupedStorage
from ckpt_core.storage import Storage, read_intact, read_small
from ckpt_core.testing import Fault, FaultyStorage
from tests.kit.memory import MemoryStorage

KEY = "step/manifest.json"
WHOLE = b"whole"
NUMBERS = count()


def root(*contents: bytes | OSError | None) -> tuple[Storage, list[FaultyStorage]]:
    """A root on as many disks; each has the file, lacks it, or cannot read it."""
    disks, name = [], f"root-{next(NUMBERS)}"  # each is told of once in a process
    for content in contents:
        faults = [Fault(method="read", error=content)] if isinstance(content, OSError) else []
        inner = MemoryStorage(name)
        if content is not None:
            inner.write_bytes(KEY, WHOLE if isinstance(content, OSError) else content)
        disks.append(FaultyStorage(inner, faults))
    storage = GroupedStorage(disks[0])
    storage.join(0, [1] * len(disks), disks[1:])
    return storage, disks


def read(storage: Storage, look: Callable[[Storage], bytes] | None = None) -> tuple[bytes, str]:
    def small(disk: Storage) -> bytes:
        return read_small(disk, KEY, committed_bytes=len(WHOLE))

    return read_intact(storage, KEY, look or small, lambda content: "" if content == WHOLE else "other bytes")


BAD = [b"wrong", b"short"[:3], b"", None, OSError(errno.EIO, "no such block"), PermissionError("denied")]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_it_is_read_from_a_disk_where_it_is_whole(bad, place):
    contents = [WHOLE] * 3
    contents[place] = bad
    storage, _ = root(*contents)
    assert read(storage) == (WHOLE, "")


@pytest.mark.parametrize("bad", BAD)
def test_one_whole_copy_is_enough_and_the_log_says_where_it_was_not(bad, caplog):
    storage, _ = root(bad, b"wrong", WHOLE)
    assert read(storage) == (WHOLE, "")
    assert f"{storage.url}/{KEY} is not whole on the disk of one node" in caplog.text
    caplog.clear()
    assert read(storage) == (WHOLE, "")
    assert caplog.text == ""


def test_other_disks_are_not_asked_while_it_is_whole_here(caplog):
    storage, disks = root(WHOLE, WHOLE)
    before = len(disks[1].operations)
    assert read(storage) == (WHOLE, "")
    assert len(disks[1].operations) == before
    assert caplog.text == ""


def test_without_a_whole_copy_the_first_problem_is_told():
    assert read(root(b"wrong", None)[0]) == (b"wrong", "other bytes")
    with pytest.raises(CorruptCheckpointError, match="has 3 bytes, 5 were committed"):
        read(root(b"cut", None)[0])
    with pytest.raises(FileNotFoundError):
        read(root(None, None)[0])


def test_one_disk_is_asked_twice_and_an_error_is_raised_at_once():
    answers = [b"wrong", WHOLE, b"wrong", b"wrong"]
    storage, _ = root(WHOLE)
    assert read(storage, lambda _: answers.pop(0)) == (WHOLE, "")
    assert read(storage, lambda _: answers.pop(0)) == (b"wrong", "other bytes")
    assert answers == []
    failing, (disk,) = root(OSError(errno.EIO, "no such block"))
    with pytest.raises(OSError, match="no such block"):
        read(failing)
    assert sum(each.method == "read" for each in disk.operations) == 1
