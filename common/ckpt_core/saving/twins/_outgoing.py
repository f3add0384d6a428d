"""The files of one rank on their way to its partner, in one save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Protocol, TypeAlias, final

from ckpt_core.coordination import PIECE_BYTES, Addressee, Greeting, Link
from ckpt_core.errors import ConfigError, SaveError
from ckpt_core.formats.checksums import crc32
from ckpt_core.names import TWIN_SUFFIX
from ckpt_core.saving._reports import KeptContent
from ckpt_core.saving.twins._twin_files import TwinFiles

_Pieces: TypeAlias = "SimpleQueue[memoryview | None]"


class Writer(Protocol):
    """Writes twins, here or on the partner."""

    def write(self, path: str, pieces: Iterable[memoryview], /) -> int:
        """Write the twin of a file durably; return its CRC-32."""
        ...

    def abort(self) -> None:
        """End a `write` on another thread, if possible."""
        ...

    def close(self) -> None:
        """Release the connection."""
        ...


@final
class LocalWriter:
    """Writes the twins of the only rank of a job."""

    def __init__(self, files: TwinFiles) -> None:
        self.write = files.write

    def abort(self) -> None:
        pass

    def close(self) -> None:
        pass


@final
class RemoteWriter:
    """Sends files to the partner, which writes their twins.

    Args:
        partner: receives them.
        greeting: of this rank.
        seconds: the longest wait for the partner.
    """

    def __init__(self, partner: Addressee, greeting: Greeting, seconds: float) -> None:
        self._partner = partner
        self._greeting = greeting
        self._seconds = seconds
        self._link: Link | None = None
        self._attempt: Link | None = None
        self._aborted = False

    def write(self, path: str, pieces: Iterable[memoryview]) -> int:
        if self._link is None:
            self._link = self._partner.connect(self._greeting, self._seconds, begun=self._begun)
            self._link.limit(self._seconds)
        try:
            self._link.send(path.encode())
            for piece in pieces:
                for start in range(0, len(piece), PIECE_BYTES):
                    self._link.send(piece[start : start + PIECE_BYTES])
            self._link.send(b"")
            outcome = self._link.receive_fields()
        except TimeoutError as error:
            raise TimeoutError(f"nothing of {path} was taken for {self._seconds:g} s") from error
        if "error" in outcome:
            raise SaveError(
                f"rank {self._partner.rank} could not write the twin of {path}: {outcome['error']}"
            )
        return int(outcome["crc32"])

    def abort(self) -> None:
        self._aborted = True
        if (link := self._attempt) is not None:
            link.abort()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()

    def _begun(self, link: Link) -> None:
        self._attempt = link
        if self._aborted:
            link.close()
            raise ConnectionAbortedError("the save has ended")


@final
class Outgoing:
    """The files of one save for which twins are to be written.

    Concurrency: `run` on a thread of its own, the others on the save thread. Pieces must not change until
    `finish` or `stop` has returned.

    Args:
        writer: writes the twins.
        where: the partner, in words.
    """

    def __init__(self, writer: Writer, where: str) -> None:
        self._writer = writer
        self._where = where
        self._files: SimpleQueue[tuple[str, _Pieces] | None] = SimpleQueue()
        self._events: SimpleQueue[BaseException | str] = SimpleQueue()
        self._begun: list[_Pieces] = []
        self._pending: set[str] = set()
        self._stopped = False
        self._ended = threading.Event()

    def follow(self, path: str, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Pass on the pieces of a file, and have its twin written of them."""
        taken = self._begin(path)
        for piece in pieces:
            taken.put(piece)
            yield piece
        taken.put(None)

    def add(self, path: str, content: bytes) -> None:
        """Have the twin of a small file written."""
        for _ in self.follow(path, KeptContent.of(content).pieces()):
            pass

    def finish(self, progress: Callable[[str], None]) -> None:
        """Wait until the twins of all files so far are durable.

        Raises:
            SaveError: the partner was lost, or could not write.
        """
        while self._pending:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            progress(f"waiting until {self._where} has written the twins")
            self._pending.discard(event)

    def stop(self) -> None:
        """End everything: after it, no memory of a piece is in use."""
        self._stopped = True
        for pieces in self._begun:
            pieces.put(None)
        self._files.put(None)
        self._writer.abort()
        self._ended.wait()

    def run(self) -> None:
        """Have the twins written, file by file, until `stop`."""
        try:
            while (file := self._files.get()) is not None and not self._stopped:
                path, pieces = file
                self._write(path, pieces)
                self._events.put(path)
        except Exception as error:  # noqa: BLE001 - raised on the save thread
            self._events.put(self._failed(error))
        finally:
            self._writer.close()
            self._ended.set()

    def _begin(self, path: str) -> _Pieces:
        if path.endswith(TWIN_SUFFIX):
            raise ConfigError(f"{path}: with replicas=2 no file of a checkpoint may end in {TWIN_SUFFIX}")
        pieces: _Pieces = SimpleQueue()
        self._pending.add(path)
        self._begun.append(pieces)
        self._files.put((path, pieces))
        return pieces

    def _write(self, path: str, pieces: _Pieces) -> None:
        running = 0

        def taken() -> Iterator[memoryview]:
            nonlocal running
            while (piece := pieces.get()) is not None:
                running = crc32(piece, running)
                yield piece
                self._events.put("")
            if self._stopped:
                raise ConnectionAbortedError("the save has ended")

        written = self._writer.write(path, taken())
        if written != running:
            raise SaveError(f"{self._where} got other bytes of {path} than were sent: the network is faulty")

    def _failed(self, error: Exception) -> SaveError:
        if isinstance(error, SaveError):
            return error
        found = SaveError(
            f"the twins of its files, which {self._where} writes because of replicas=2: "
            f"{type(error).__name__}: {error}"
        )
        found.__cause__ = error
        return found
