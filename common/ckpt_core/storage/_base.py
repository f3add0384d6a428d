"""The contract between the core and a place that holds bytes.

A `Storage` knows nothing of checkpoints. Keys are POSIX-relative strings ("step-000001000/.metadata"),
"" is the root itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import IO, Final, NamedTuple, Protocol

from ckpt_core.storage._keys import StreamRanges

ALIGNMENT: Final = 4096
"""Direct writes need memory, offsets and lengths that are multiples of this, and so do fast direct reads."""


class StorageEntry(NamedTuple):
    """One child of a directory.

    Attributes:
        name: of the child.
        is_directory: whether it is a directory, or a link to one.
        size_bytes: 0 for directories, and for links that lead nowhere.
        is_link: whether it is a symbolic link.
    """

    name: str
    is_directory: bool
    size_bytes: int
    is_link: bool = False


class Lock(Protocol):
    """An exclusive claim that lasts until `release` or the death of the process."""

    def release(self) -> None:
        """Give the claim up; harmless when repeated."""


class RangeReader(Protocol):
    """A file that is open for reading by ranges.

    Concurrency: `read_into` may be called from several threads at once, and is worth calling so.
    """

    @property
    def size_bytes(self) -> int:
        """Size of the file when it was opened."""
        ...

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the whole of `buffer` (writable, contiguous, of bytes) with what follows `offset`.

        Raises:
            EOFError: the file ends before; the message names it. What the buffer then holds is undefined.
            OSError: storage is unwell.
        """


class Storage(ABC):
    """A place that holds bytes.

    Who calls what, in the order of a save:

    1. (coordinator) `check_root` once, then `try_lock`.
    2. (coordinator) `make_directory` for the working directory.
    3. (all ranks, background thread) `write_pieces` or `create` for each of the rank's files, then
       `sync_directory`.
    4. (coordinator, background thread) `create` for metadata, manifest and marker; `sync_directory`;
       where `supports_rename`, `rename` onto the final name, or of each file into a directory that has it,
       and `sync_directory` of the parent.
    5. (coordinator) `rename` to a trash name or `delete` of the marker, then `delete` of the rest, to prune.

    Concurrency: every method may be called from any thread of any process at the same time.
    Errors: OS errors pass through unchanged (`FileNotFoundError`, `FileExistsError`, `PermissionError`,
    `OSError(ENOSPC)`…); remote backends translate theirs into the nearest of these.
    """

    supports_rename: bool
    """Whether `rename` exists and is atomic. Without it a commit is the creation of the marker object."""

    rereads_from_memory: bool = False
    """Whether bytes that were just read are read again at the speed of memory, as from a page cache.

    If not, whoever needs them twice keeps them; object stores are asked for every byte once.
    """

    @property
    @abstractmethod
    def url(self) -> str:
        """Where this is, for people: an absolute path or a URL."""

    @abstractmethod
    def check_root(self) -> None:
        """Make the root usable: create it if need be and prove that a file can be written there.

        Raises:
            NotADirectoryError: the root is a file.
            PermissionError: nothing can be created there.
            OSError: anything else, with the path in the message.
        """

    @abstractmethod
    def create(self, key: str) -> AbstractContextManager[IO[bytes]]:
        """Open a new file for streaming writes; parents are created.

        When the context exits without an error the content is durable under `key` (fsync, or a completed
        upload). When it exits with an error nothing that looks complete may remain: a partial local file is
        allowed (its directory is uncommitted), a partial object is not.

        Raises:
            FileExistsError: `key` exists already (checked where that is possible without a race).
        """

    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        """Create a large file from pieces that follow each other, durable on return; same errors as `create`.

        Every piece starts on a page boundary of memory, is a multiple of 4 KiB long except the last, and is
        left alone until this returns. Pieces are taken one by one, so that a generator can prepare the next
        while the ones before are being written.
        """
        with self.create(key) as stream:
            for piece in pieces:
                stream.write(piece)

    @abstractmethod
    def open(self, key: str) -> AbstractContextManager[IO[bytes]]:
        """Open a file for reading; the stream is seekable.

        Raises:
            FileNotFoundError: no such file.
        """

    @contextmanager
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        """Open a file for reading by ranges, on several threads; same errors as `open`.

        The default reads through one stream of `open`, so that threads wait for one another.
        """
        with self.open(key) as stream:
            yield StreamRanges(stream, f"{self.url}/{key}")

    @abstractmethod
    def replace(self, key: str, content: bytes) -> None:
        """Write a small file atomically, durable on return, replacing what was there."""

    @abstractmethod
    def list(self, key: str) -> list[StorageEntry]:
        """Children of a directory, sorted by name; [] if it does not exist."""

    def entry(self, key: str) -> StorageEntry | None:
        """What `list` of its directory says of one child; None if there is no such child."""
        directory, _, name = key.rpartition("/")
        return next((entry for entry in self.list(directory) if entry.name == name), None)

    @abstractmethod
    def size(self, key: str) -> int:
        """Size of a file in bytes.

        Raises:
            FileNotFoundError: no such file.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Delete a file, or a directory with all it holds; nothing happens if there is none."""

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        """Give up uploads that were begun and never completed, where storage keeps such things out of sight.

        Args:
            unwanted: whether the upload to that key may go.

        Returns:
            The keys of those that went; by default none.
        """
        del unwanted
        return []

    @abstractmethod
    def make_directory(self, key: str) -> None:
        """Create a directory and its parents durably; no-op where directories do not exist as such.

        Raises:
            FileExistsError: it exists already.
        """

    @abstractmethod
    def sync_directory(self, key: str) -> None:
        """Make the entries of a directory durable (fsync); no-op where that has no meaning."""

    @abstractmethod
    def rename(self, source: str, target: str) -> None:
        """Rename a directory, a file or a link atomically, onto unoccupied space only.

        Links are renamed as such; `target` may be in another directory.

        Raises:
            FileExistsError: `target` exists.
            NotImplementedError: not `supports_rename`.
        """

    @abstractmethod
    def exchange(self, first: str, second: str) -> None:
        """Exchange two directories in one step: at every instant each name leads to one of them.

        Raises:
            FileNotFoundError: one of them does not exist.
            NotImplementedError: not `supports_rename`.
        """

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Free space for this user, or None where the question has no answer."""

    def total_bytes(self) -> int | None:
        """Size of the filesystem, or None where the question has no answer."""
        return None

    def free_files(self) -> int | None:
        """How many files and directories can still be made, or None where the question has no answer."""
        return None

    @abstractmethod
    def try_lock(self, key: str) -> Lock | None:
        """Claim `key` exclusively among live processes; None if another live process holds it.

        The file's content is left alone. Backends that cannot lock return a lock that excludes nobody;
        callers must fence by other means (see `commit.Lease`).
        """

    def lock_holder(self, key: str) -> int | None:
        """Process id of who holds the lock of `key`, for people; None if nobody does, or nobody can tell."""
        del key
        return None

    def other_owner(self, key: str) -> str | None:
        """Who else owns what is at `key`, in words; None if this user does, or nothing has an owner."""
        del key
        return None

    def read_bytes(self, key: str) -> bytes:
        """Content of a small file.

        Raises:
            FileNotFoundError: no such file.
        """
        with self.open(key) as stream:
            return stream.read()

    def write_bytes(self, key: str, content: bytes) -> None:
        """Create a small file, durable on return; same errors as `create`."""
        with self.create(key) as stream:
            stream.write(content)

    def exists(self, key: str) -> bool:
        """Whether a file exists at `key`."""
        try:
            self.size(key)
        except FileNotFoundError:
            return False
        return True
