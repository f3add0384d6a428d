"""The guarantees every `Storage` gives, as tests to inherit.

class TestMyStorage(StorageTests):
    def make_storage(self, directory: Path) -> Storage: ...
    def raw_read(self, storage: Storage, key: str) -> bytes: ...
    def raw_write(self, storage: Storage, key: str, content: bytes) -> None: ...
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckpt_core.storage import RangeReader, Storage


class StorageTests:
    """Inherit, fill in the three hooks, and name the subclass `Test…`.

    `raw_read` and `raw_write` go around the storage, so that it cannot vouch for itself. A backend that
    needs other fixtures overrides the fixture `storage` instead of `make_storage`.
    """

    def make_storage(self, directory: Path) -> Storage:
        """Make an empty storage; `directory` is for those who need one."""
        raise NotImplementedError

    def raw_read(self, storage: Storage, key: str) -> bytes:
        """Read the bytes at `key` past the storage; `FileNotFoundError` if there are none."""
        raise NotImplementedError

    def raw_write(self, storage: Storage, key: str, content: bytes) -> None:
        """Put bytes at `key`, parents included, without the storage."""
        raise NotImplementedError

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return self.make_storage(tmp_path)

    # --- the root

    def test_check_root_leaves_nothing_behind(self, storage: Storage) -> None:
        storage.check_root()
        storage.check_root()
        assert storage.list("") == []

    def test_the_url_is_text_without_a_trailing_slash(self, storage: Storage) -> None:
        assert storage.url
        assert not storage.url.endswith("/")

    def test_free_space_is_a_number_or_unknown(self, storage: Storage) -> None:
        storage.check_root()
        free, total, files = storage.space()
        assert free is None or free > 0
        assert total is None or free is None or total >= free
        assert files is None or files > 0

    @pytest.mark.parametrize("key", ["../a", "/a", "a/../../b", "a//b", "a/", "./a", "a/."])
    @pytest.mark.parametrize(
        "method", ["create", "open", "open_ranges", "replace", "list", "size", "delete", "try_lock"]
    )
    def test_keys_that_leave_the_root_are_refused(self, storage: Storage, method: str, key: str) -> None:
        arguments = (key, b"") if method == "replace" else (key,)
        with pytest.raises(ValueError, match="key"):
            _enter(getattr(storage, method)(*arguments))

    def test_the_root_itself_is_never_deleted(self, storage: Storage) -> None:
        storage.write_bytes("a", b"kept")
        with pytest.raises(ValueError, match="root"):
            storage.delete("")
        assert storage.read_bytes("a") == b"kept"

    # --- writing

    @pytest.mark.parametrize("content", [b"", b"x", bytes(range(256)) * 5000], ids=["empty", "one", "large"])
    def test_created_content_is_what_was_written(self, storage: Storage, content: bytes) -> None:
        with storage.create("a/b/c") as stream:
            for start in range(0, len(content), 300_000):
                stream.write(content[start : start + 300_000])
        assert self.raw_read(storage, "a/b/c") == content
        assert storage.size("a/b/c") == len(content)

    def test_create_takes_any_buffer(self, storage: Storage) -> None:
        with storage.create("a") as stream:
            stream.write(memoryview(b"01234567")[2:4])
            stream.write(bytearray(b"89"))
        assert self.raw_read(storage, "a") == b"2389"

    def test_create_never_overwrites(self, storage: Storage) -> None:
        self.raw_write(storage, "step/a", b"first")
        with pytest.raises(FileExistsError):
            storage.write_bytes("step/a", b"second")
        assert self.raw_read(storage, "step/a") == b"first"

    def test_an_error_while_writing_reaches_the_writer(self, storage: Storage) -> None:
        with pytest.raises(ZeroDivisionError), storage.create("step/a") as stream:
            stream.write(b"half")
            raise ZeroDivisionError
        if not storage.supports_rename:
            assert not storage.exists("step/a"), (
                "without a rename to hide it, a partial object looks complete"
            )
            assert storage.list("step") == []

    def test_a_failed_create_can_be_deleted_and_repeated(self, storage: Storage) -> None:
        with pytest.raises(ZeroDivisionError), storage.create("step/a") as stream:
            stream.write(b"half")
            raise ZeroDivisionError
        storage.delete("step/a")
        storage.write_bytes("step/a", b"whole")
        assert self.raw_read(storage, "step/a") == b"whole"

    def test_replace_creates_and_replaces(self, storage: Storage) -> None:
        storage.replace("dir/pins.json", b"a longer first version")
        assert self.raw_read(storage, "dir/pins.json") == b"a longer first version"
        storage.replace("dir/pins.json", b"second")
        assert self.raw_read(storage, "dir/pins.json") == b"second"
        assert [entry.name for entry in storage.list("dir")] == ["pins.json"]

    def test_what_is_appended_follows_what_is_there(self, storage: Storage) -> None:
        if not storage.supports_append:
            with pytest.raises(NotImplementedError):
                storage.append("events.jsonl", b"1\n")
            return
        storage.replace("pins.json", b"")  # the root exists
        storage.append("events.jsonl", b"1\n")
        storage.append("events.jsonl", b"2\n")
        assert self.raw_read(storage, "events.jsonl") == b"1\n2\n"
        with pytest.raises(OSError, match="missing"):
            storage.append("missing/events.jsonl", b"1\n")
        assert storage.list("missing") == []

    def test_threads_write_side_by_side(self, storage: Storage) -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda i: storage.write_bytes(f"step/deep/{i}", b"%d" % i * 1000), range(12)))
        assert {entry.name for entry in storage.list("step/deep")} == {str(i) for i in range(12)}
        assert all(self.raw_read(storage, f"step/deep/{i}") == b"%d" % i * 1000 for i in range(12))

    def test_a_put_file_is_what_was_read_and_is_put_once(self, storage: Storage) -> None:
        for size in (0, 10, 100_000):
            content, done = _varied(size), list[int]()
            for _ in range(2):
                storage.put_file(f"step/{size}", size, _Source(content), identity="a:1", progress=done.append)
                assert self.raw_read(storage, f"step/{size}") == content
            assert sum(done) == 2 * size
        assert [entry.name for entry in storage.list("step")] == ["0", "10", "100000"]

    def test_a_put_file_is_never_complete_when_its_source_fails(self, storage: Storage) -> None:
        content = _varied(100_000)
        with pytest.raises(ZeroDivisionError):
            storage.put_file("step/a", 100_000, _Source(content, fails=True), identity="a:1")
        if not storage.supports_rename:
            assert not storage.exists("step/a")
        storage.put_file("step/a", 100_000, _Source(content), identity="a:1")
        assert self.raw_read(storage, "step/a") == content

    def test_a_put_file_replaces_leftovers_on_a_disk_and_nothing_in_a_bucket(self, storage: Storage) -> None:
        self.raw_write(storage, "step/a", b"0123456789")
        if not storage.supports_rename:
            with pytest.raises(FileExistsError):
                storage.put_file("step/a", 10, _Source(bytes(10)), identity="a:1")
            assert self.raw_read(storage, "step/a") == b"0123456789"
            return
        for size in (10, 4):
            storage.put_file("step/a", size, _Source(bytes(size)), identity="a:1")
            assert self.raw_read(storage, "step/a") == bytes(size)

    def test_pieces_are_put_whole_and_over_what_an_earlier_call_has_left(self, storage: Storage) -> None:
        content = _varied(100_000)

        def pieces(*, fails: bool = False) -> Iterator[memoryview]:
            for start in range(0, len(content), 30_000):
                yield memoryview(content)[start : start + 30_000]
            if fails:
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            storage.put_pieces("step/a", partial(pieces, fails=True), identity="a:1")
        if not storage.supports_rename:
            assert not storage.exists("step/a")
        for identity in ("a:1", "a:1", "a:2"):
            content = content if identity == "a:1" else content[::-1]
            storage.put_pieces("step/a", pieces, identity=identity)
            assert self.raw_read(storage, "step/a") == content
        assert [entry.name for entry in storage.list("step")] == ["a"]

    # --- reading

    def test_what_others_wrote_is_seen_at_once(self, storage: Storage) -> None:
        assert not storage.exists("step/a")
        assert storage.list("step") == []
        self.raw_write(storage, "step/a", b"from elsewhere")
        assert storage.exists("step/a")
        assert [entry.name for entry in storage.list("step")] == ["a"]
        assert storage.read_bytes("step/a") == b"from elsewhere"

    def test_open_streams_are_seekable(self, storage: Storage) -> None:
        content = bytes(range(256)) * 40
        self.raw_write(storage, "a", content)
        with storage.open("a") as stream:
            stream.seek(1000)
            assert stream.read(24) == content[1000:1024]
            assert stream.tell() == 1024
            stream.seek(-10, 2)
            assert stream.read() == content[-10:]
            assert stream.read(1) == b""
            stream.seek(0)
            assert stream.read() == content

    @pytest.mark.parametrize("size", [0, 1, 2**20, 2**20 + 1, 3 * 2**20])
    def test_a_file_of_any_size_is_read_whole(self, storage: Storage, size: int) -> None:
        content = _varied(size)
        self.raw_write(storage, "step/a", content)
        assert storage.read_bytes("step/a") == content
        with storage.open("step/a") as stream:
            assert stream.seek(0, 2) == size
            stream.seek(size // 2)
            assert stream.read() == content[size // 2 :]
        with storage.open_ranges("step/a") as reader:
            assert reader.size_bytes == size
            assert _range(reader, 0, size) == content
            assert _range(reader, 0, min(size, 1)) == content[:1]

    def test_readers_of_one_file_do_not_disturb_each_other(self, storage: Storage) -> None:
        self.raw_write(storage, "a", b"0123456789")
        with storage.open("a") as one, storage.open("a") as other:
            assert one.read(3) == b"012"
            assert other.read(5) == b"01234"
            assert one.read() == b"3456789"

    def test_what_is_missing_is_not_found(self, storage: Storage) -> None:
        storage.write_bytes("step/a", b"")
        for key in ("nothing", "step/nothing", "step"):
            assert not storage.exists(key)
            with pytest.raises(FileNotFoundError):
                storage.size(key)
        for key in ("nothing", "step/nothing"):
            with pytest.raises(FileNotFoundError):
                storage.read_bytes(key)
            with pytest.raises(FileNotFoundError):
                _enter(storage.open_ranges(key))

    def test_ranges_are_what_lies_there(self, storage: Storage) -> None:
        content = _varied(100_000)
        self.raw_write(storage, "step/a", content)
        with storage.open_ranges("step/a") as reader:
            assert reader.size_bytes == len(content)
            for start, stop in [(0, 100_000), (0, 1), (99_999, 100_000), (4095, 70_001), (500, 500)]:
                assert _range(reader, start, stop) == content[start:stop]
                assert storage.crc32("step/a", start, stop - start) == zlib.crc32(content[start:stop])

    def test_a_range_fills_the_middle_of_a_buffer_and_nothing_else(self, storage: Storage) -> None:
        self.raw_write(storage, "a", b"0123456789")
        buffer = bytearray(b"----------")
        with storage.open_ranges("a") as reader:
            reader.read_into(4, memoryview(buffer)[2:5])
        assert buffer == b"--456-----"

    @pytest.mark.parametrize("start", [5, 10, 11, 1000])
    def test_a_file_that_ends_early_is_named(self, storage: Storage, start: int) -> None:
        self.raw_write(storage, "step/short", b"0123456789")
        with (
            storage.open_ranges("step/short") as reader,
            pytest.raises(EOFError, match="step/short: ends at byte 10,"),
        ):
            _range(reader, start, start + 6)

    def test_threads_read_ranges_side_by_side(self, storage: Storage) -> None:
        content = _varied(200_000)
        self.raw_write(storage, "a", content)
        starts = range(0, 200_000, 7_000)
        with storage.open_ranges("a") as reader, ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda start: _range(reader, start, min(start + 7_000, 200_000)), starts))
        assert b"".join(found) == content

    def test_list_is_sorted_and_tells_files_from_directories(self, storage: Storage) -> None:
        self.raw_write(storage, "step/b/inner", b"12")
        self.raw_write(storage, "step/a.json", b"12345")
        self.raw_write(storage, "step/.metadata", b"1")
        self.raw_write(storage, "step-other", b"x")
        found = [(entry.name, entry.is_directory, entry.size_bytes) for entry in storage.list("step")]
        assert found == [(".metadata", False, 1), ("a.json", False, 5), ("b", True, 0)]
        assert [entry.name for entry in storage.list("")] == ["step", "step-other"]
        assert [storage.directories(key) for key in ("", "step", "nothing")] == [{"step"}, {"b"}, set()]
        assert [storage.entry(f"step/{entry.name}") for entry in storage.list("step")] == storage.list("step")
        assert [storage.entry(key) for key in ("nothing", "step/nothing")] == [None, None]

    # --- deleting

    def test_delete_takes_a_directory_with_all_it_holds(self, storage: Storage) -> None:
        for key in ("step-1/a", "step-1/deep/er/b", "step-10/a", "step-1.json"):
            self.raw_write(storage, key, b"x")
        storage.delete("step-1")
        assert storage.list("step-1") == []
        with pytest.raises(FileNotFoundError):
            self.raw_read(storage, "step-1/deep/er/b")
        assert [entry.name for entry in storage.list("")] == ["step-1.json", "step-10"]

    def test_delete_takes_one_file(self, storage: Storage) -> None:
        self.raw_write(storage, "step/a", b"x")
        self.raw_write(storage, "step/ab", b"x")
        storage.delete("step/a")
        assert [entry.name for entry in storage.list("step")] == ["ab"]

    def test_delete_of_nothing_is_harmless(self, storage: Storage) -> None:
        storage.check_root()
        storage.delete("nothing")
        storage.delete("nothing/at/all")

    def test_wildcards_in_keys_are_plain_characters(self, storage: Storage) -> None:
        for key in ("step[1]/a*", "step1/ab", "step[1]/ab"):
            self.raw_write(storage, key, b"x")
        assert storage.exists("step[1]/a*")
        storage.delete("step[1]/a*")
        assert [entry.name for entry in storage.list("step[1]")] == ["ab"]
        storage.delete("step[1]")
        assert [entry.name for entry in storage.list("")] == ["step1"]

    # --- directories

    def test_make_directory_prepares_for_files(self, storage: Storage) -> None:
        storage.make_directory("run/.incomplete-1-step")
        storage.write_bytes("run/.incomplete-1-step/a", b"x")
        storage.sync_directory("run/.incomplete-1-step")
        storage.sync_directory("")
        assert self.raw_read(storage, "run/.incomplete-1-step/a") == b"x"
        if storage.supports_rename:
            with pytest.raises(FileExistsError):
                storage.make_directory("run/.incomplete-1-step")

    def test_rename_moves_a_directory_whole(self, storage: Storage) -> None:
        self.raw_write(storage, ".incomplete-1-step/deep/a", b"x")
        if not storage.supports_rename:
            with pytest.raises(NotImplementedError):
                storage.rename(".incomplete-1-step", "step")
            return
        with pytest.raises(FileNotFoundError):
            storage.rename("nothing", "step")
        storage.rename(".incomplete-1-step", "step")
        assert self.raw_read(storage, "step/deep/a") == b"x"
        assert [entry.name for entry in storage.list("")] == ["step"]

    def test_rename_moves_a_file_into_another_directory(self, storage: Storage) -> None:
        if not storage.supports_rename:
            pytest.skip("no rename")
        self.raw_write(storage, "new/a", b"x")
        self.raw_write(storage, "step/b", b"y")
        storage.rename("new/a", "step/a")
        with pytest.raises(FileExistsError):
            storage.rename("step/a", "step/b")
        assert (self.raw_read(storage, "step/a"), self.raw_read(storage, "step/b")) == (b"x", b"y")
        assert storage.list("new") == []
        with pytest.raises(FileNotFoundError):
            storage.rename("step/a", "nowhere/a")

    @pytest.mark.parametrize("occupant", ["file", "empty directory", "full directory"])
    def test_rename_never_replaces(self, storage: Storage, occupant: str) -> None:
        if not storage.supports_rename:
            pytest.skip("no rename")
        self.raw_write(storage, "new/a", b"new")
        if occupant == "file":
            self.raw_write(storage, "step", b"old")
        elif occupant == "empty directory":
            storage.make_directory("step")
        else:
            self.raw_write(storage, "step/a", b"old")
        with pytest.raises(FileExistsError):
            storage.rename("new", "step")
        assert self.raw_read(storage, "new/a") == b"new"

    def test_exchange_swaps_two_directories(self, storage: Storage) -> None:
        """Check that each name leads to the other's target."""
        storage.write_bytes("old/file", b"old")
        storage.write_bytes("new/file", b"new")
        if not storage.supports_rename:
            with pytest.raises(NotImplementedError):
                storage.exchange("new", "old")
            return
        storage.exchange("new", "old")
        assert self.raw_read(storage, "old/file") == b"new"
        assert self.raw_read(storage, "new/file") == b"old"
        with pytest.raises(FileNotFoundError):
            storage.exchange("old", "nothing")

    # --- locks

    def test_a_lock_can_be_taken_released_and_taken_again(self, storage: Storage) -> None:
        storage.write_bytes("writer.json", b"content")
        first = storage.try_lock("writer.json")
        assert first is not None
        first.release()
        first.release()
        second = storage.try_lock("writer.json")
        assert second is not None
        second.release()
        assert storage.read_bytes("writer.json") == b"content"

    def test_what_this_user_made_belongs_to_nobody_else(self, storage: Storage) -> None:
        storage.write_bytes("step/a", b"")
        assert [storage.other_owner(key) for key in ("step", "step/a", "nothing", "no/thing")] == [None] * 4

    def test_a_lock_that_nobody_holds_has_no_holder(self, storage: Storage) -> None:
        assert storage.lock_holder("writer.json") is None
        lock = storage.try_lock("writer.json")
        assert lock is not None
        assert storage.lock_holder("writer.json") in {os.getpid(), None}
        lock.release()
        assert storage.lock_holder("writer.json") is None


class _Source:
    """The content of a file to put; fails at its end if a test wants that."""

    def __init__(self, content: bytes, *, fails: bool = False) -> None:
        self._content = content
        self._fails = fails

    def __call__(self, offset: int, buffer: memoryview) -> None:
        end = offset + len(buffer)
        if self._fails and end == len(self._content):
            raise ZeroDivisionError
        buffer[:] = self._content[offset:end]


def _varied(size_bytes: int) -> bytes:
    """Bytes in which no range looks like another."""
    return random.Random(size_bytes).randbytes(size_bytes)


def _range(reader: RangeReader, start: int, stop: int) -> bytes:
    buffer = bytearray(stop - start)
    reader.read_into(start, memoryview(buffer))
    return bytes(buffer)


def _enter(result: Any) -> None:
    """Make a context manager do its work; other results have done theirs."""
    if hasattr(result, "__enter__"):
        with result:
            pass
