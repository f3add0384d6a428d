"""The files of a compressed checkpoint as if it were plain."""

from __future__ import annotations

import errno
import io
from bisect import bisect_right
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import IO, Final, cast, final

from typing_extensions import override

from ckpt_core.formats.frames import Frames, decompress
from ckpt_core.storage._base import RangeReader, RangeStream, Storage, StorageEntry
from ckpt_core.storage._layered import ReadOnlyStorage

_TRIES: Final = 2
_RUN_BYTES: Final = 8 << 20


@final
class FramedStorage(ReadOnlyStorage):
    """A storage in which the compressed files of one directory are plain.

    Everything else is as in `storage`. Reads of a range read the frames around it, and hold at most 8 MiB of
    them for each thread; what cannot be decompressed is an `EIO`, as a block that a device has lost.

    By their paths in the directory there are whole small files, and the frames of data files. The checkpoint
    is there as long as its first small file is in `storage`. `twin_suffix` is of second files, which are the
    same as the first; "" if there are none.
    """

    def __init__(
        self,
        storage: Storage,
        directory: str,
        *,
        small: Mapping[str, bytes],
        files: Mapping[str, Frames],
        twin_suffix: str = "",
    ) -> None:
        self._storage = storage
        self._small = {f"{directory}/{path}": content for path, content in small.items()}
        self._first = next(iter(self._small), "")
        self._files = {f"{directory}/{path}": frames for path, frames in files.items()}
        self._twin_suffix = twin_suffix
        self.supports_rename = storage.supports_rename

    @property
    @override
    def url(self) -> str:
        return self._storage.url

    @contextmanager
    @override
    def open(self, key: str) -> Generator[IO[bytes]]:
        key = self._original(key)
        if key in self._small:
            self._require(key)
            yield io.BytesIO(self._small[key])
        elif key in self._files:
            with self.open_ranges(key) as reader:

                def read(offset: int, buffer: memoryview) -> int:
                    reader.read_into(offset, buffer)
                    return len(buffer)

                yield cast("IO[bytes]", RangeStream(reader.size_bytes, read, f"{self.url}/{key}"))
        else:
            with self._storage.open(key) as stream:
                yield stream

    @contextmanager
    @override
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        key = self._original(key)
        if key in self._small:
            with super().open_ranges(key) as reader:
                yield reader
        else:
            with self._storage.open_ranges(key) as reader:
                frames = self._files.get(key)
                yield reader if frames is None else _FramedRanges(reader, frames)

    @override
    def size(self, key: str) -> int:
        key = self._original(key)
        if key in self._small:
            self._require(key)
            return len(self._small[key])
        size = self._storage.size(key)
        return _size(size, self._files[key]) if key in self._files else size

    @override
    def list(self, key: str) -> list[StorageEntry]:
        children = ((f"{key}/{entry.name}", entry) for entry in self._storage.list(key))
        return [
            entry._replace(size_bytes=len(self._small[child]))
            if child in self._small
            else entry._replace(size_bytes=_size(entry.size_bytes, self._files[child]))
            if child in self._files
            else entry
            for child, entry in children
        ]

    def _original(self, key: str) -> str:
        original = key.removesuffix(self._twin_suffix)
        return original if original in self._small or original in self._files else key

    def _require(self, key: str) -> None:
        """Raise FileNotFoundError if the checkpoint was removed meanwhile."""
        if key == self._first:
            self._storage.size(key)


def _size(size_bytes: int, frames: Frames) -> int:
    """Return the plain size of a file, as much wrong as the stored one is."""
    return max(0, size_bytes + frames.plain_starts[-1] - frames.stored_starts[-1])


@final
class _FramedRanges:
    """Ranges of a plain file, made of the frames that are stored."""

    def __init__(self, reader: RangeReader, frames: Frames) -> None:
        self._reader = reader
        self._codec = frames.codec
        self._there, self._here = frames.stored_starts, frames.plain_starts
        self.size_bytes = _size(reader.size_bytes, frames)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        end, buffer = offset + len(buffer), buffer.cast("B")
        if end > self._here[-1]:
            raise EOFError(f"ends at byte {self._here[-1]}, but bytes up to {end} are needed")
        first, last = bisect_right(self._here, offset) - 1, bisect_right(self._here, end - 1)
        begin = self._there[first]
        runs = [
            list(run)
            for _, run in groupby(range(first, last), lambda at: (self._there[at] - begin) // _RUN_BYTES)
        ]
        for run in runs if buffer else ():
            self._read_run(run, offset, buffer)

    def _read_run(self, run: list[int], offset: int, buffer: memoryview) -> None:
        """Read neighbouring frames by one request, once more if they are damaged."""
        start = self._there[run[0]]
        content = memoryview(bytearray(self._there[run[-1] + 1] - start))
        for left in reversed(range(_TRIES)):
            self._reader.read_into(start, content)
            try:
                for at in run:
                    frame = content[self._there[at] - start : self._there[at + 1] - start]
                    self._unpack(at, frame, offset, buffer)
            except ValueError as error:
                if not left:
                    raise OSError(errno.EIO, str(error)) from error
            else:
                return

    def _unpack(self, at: int, frame: memoryview, offset: int, buffer: memoryview) -> None:
        """Put what a frame has of the range in its place."""
        first, last = self._here[at] - offset, self._here[at + 1] - offset
        place = buffer[max(0, first) : last]
        whole = place if len(place) == last - first else memoryview(bytearray(last - first))
        decompress(self._codec[at], frame, whole)
        if whole is not place:
            place[:] = whole[max(0, -first) :][: len(place)]
