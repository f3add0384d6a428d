"""What the storage asks of a client of an object store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import IO, NamedTuple

from ckpt_core.disclosure import Redaction
from ckpt_core.storage._keys import key_parts
from ckpt_core.storage._putting import PutSource


class Found(NamedTuple):
    """One name below a prefix; it may be one that no path can have."""

    name: str
    is_directory: bool
    size_bytes: int


class ObjectClient(ABC):
    """Requests to one object store; `path` is the client's own name of an object.

    Concurrency: any thread.
    Errors: OS errors as in the contract of `Storage`, without secrets; see `translated_errors`.

    Attributes:
        url: of the root, without trailing slash, user, password and query.
        redaction: replaces what is secret in messages.
        base: the path of the root.
        bucket: the name of the bucket, for messages.
        reads_in_place: see `Storage`.
    """

    url: str
    redaction: Redaction
    base: str
    bucket: str
    reads_in_place: bool = False

    def shown(self, text: object) -> str:
        """Remove secrets from a path or an error, for messages."""
        return self.redaction.text(str(text))

    def path(self, key: str) -> str:
        """Return the client's name of the object."""
        return "/".join(filter(None, [self.base, *key_parts(key)]))

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the size of an object in bytes.

        Raises:
            FileNotFoundError: there is none.
        """

    def read_start(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return the size and first bytes of an object, if possible by one request.

        Raises:
            FileNotFoundError: there is none.
        """
        size = self.size(path)
        start = bytearray(min(size, most_bytes))
        count = self.read_into(path, 0, memoryview(start)) if start else 0
        return size, bytes(start[:count])

    @abstractmethod
    def children(self, path: str) -> list[Found]:
        """List the names below a prefix, up to the next slash; [] if there are none."""

    @abstractmethod
    def below(self, path: str) -> list[str]:
        """List the paths of an object of this name and of all that are below it."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Delete an object by its name; no-op if there is none."""

    @abstractmethod
    def replace(self, path: str, content: bytes) -> None:
        """Write a small object, over an existing one."""

    @abstractmethod
    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        """Read a range that is in the object; return how many bytes of it the object has."""

    def read_spread(self, path: str, offset: int, buffers: Sequence[memoryview]) -> int:
        """Read a range into several buffers; the default makes one request for each."""
        done = 0
        for buffer in buffers:
            count = self.read_into(path, offset + done, buffer)
            done += count
            if count < len(buffer):
                break
        return done

    @abstractmethod
    def create(self, path: str) -> AbstractContextManager[IO[bytes]]:
        """Open a stream into a new object, which appears on a clean exit only.

        Raises:
            FileExistsError: there is one already.
        """

    def write_pieces(self, path: str, pieces: Iterable[memoryview]) -> None:
        """Create an object from pieces that do not change; see `Storage.write_pieces`."""
        with self.create(path) as stream:
            for piece in pieces:
                stream.write(piece)

    @abstractmethod
    def put_file(self, path: str, source: PutSource, identity: str) -> None:
        """Create an object from a source; see `Storage.put_file`."""

    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        """Abort uploads that were never completed; see `Storage.abandon_uploads`."""
        del unwanted
        return []

    def interrupt(self) -> None:  # noqa: B027 - most libraries cannot
        """Cancel requests under way; see `Storage.interrupt`."""
