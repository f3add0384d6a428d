"""The files that other ranks send to this one: their twins are written here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from typing import Any, Final, final

from ckpt_core.coordination import PIECE_BYTES, Doorway, Link, Signer, answer
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CoordinationError, failure_text
from ckpt_core.formats.codec import relative_paths
from ckpt_core.names import twin_name
from ckpt_core.saving.twins._twin_files import PieceMemory, TwinFiles

_logger = logger_of(__name__)
_LOOK_SECONDS: Final = 0.5


@final
class Incoming:
    """The threads that write the twins of other ranks' files, from save to save.

    Concurrency: `begin`, `end` and `close` on any thread.

    Args:
        rank: of this process.
        signer: proves ranks of this job to one another.
    """

    def __init__(self, rank: int, signer: Signer) -> None:
        self._rank = rank
        self._signer = signer
        self._doorway = Doorway()
        self._memory = PieceMemory(PIECE_BYTES)
        self._changed = threading.Condition()
        self._save: tuple[str, TwinFiles] | None = None
        self._links: set[Link] = set()
        self._over: list[str] = []
        self._closed = False
        self._threads: list[threading.Thread] = []

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return self._doorway.port

    def start(self, count: int) -> None:
        """Start to listen to that number of ranks."""
        for number in range(count):
            thread = threading.Thread(target=self._serve, name=f"ckpt-twin-in-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def begin(self, save_id: str, files: TwinFiles) -> None:
        """Accept files of that save."""
        with self._changed:
            self._save = save_id, files
            self._changed.notify_all()

    def end(self, save_id: str) -> None:
        """End the connections of that save; late ones are refused."""
        with self._changed:
            self._save = None
            self._over = [*self._over[-7:], save_id]
            links = list(self._links)
            self._changed.notify_all()
        for link in links:
            link.abort()

    def close(self, seconds: float) -> None:
        """End the threads, unless one hangs in storage."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._doorway.close()
        for thread in self._threads:
            thread.join(seconds)
        if not any(thread.is_alive() for thread in self._threads):
            self._doorway.release()

    def _serve(self) -> None:
        while not self._closed:
            try:
                found = self._doorway.welcome(self._signer, self._rank)
                if found is None:
                    return
                with closing(found[0]) as link:
                    self._receive(link, found[1])
            except (OSError, EOFError, ValueError, LookupError, CoordinationError) as error:
                # The rank that sends reports it; a stranger at the port is of no consequence.
                _logger.debug("rank %d: a connection to its port for twins ended: %s", self._rank, error)

    def _receive(self, link: Link, greeting: Mapping[str, Any]) -> None:
        """Write the twins of the files of one rank in one save."""
        files = self._admit(link, greeting["topic"])
        if files is None:
            return
        try:
            answer(link, self._signer, greeting, self._rank)
            while True:
                path = link.receive().decode()
                self._write(link, path, files)
        finally:
            with self._changed:
                self._links.discard(link)

    def _admit(self, link: Link, save_id: str) -> TwinFiles | None:
        """Wait until this rank has begun the save; None if it is over, or the link is."""
        with self._changed:
            while not (self._closed or save_id in self._over):
                if self._save is not None and self._save[0] == save_id:
                    self._links.add(link)
                    return self._save[1]
                self._changed.wait(_LOOK_SECONDS)
                if link.is_ended():
                    return None
        return None

    def _write(self, link: Link, path: str, files: TwinFiles) -> None:
        pieces = self._pieces(link)
        try:
            relative_paths([twin_name(path)])
            written = files.write(path, pieces)
        except Exception as error:  # noqa: BLE001 - told to the rank that sends
            with suppress(OSError):
                for _ in pieces:  # else the answer would be lost
                    pass
                link.send_fields(error=failure_text(error))
            return
        link.send_fields(crc32=written)

    def _pieces(self, link: Link) -> Iterator[memoryview]:
        while True:
            memory = self._memory.take()
            size = link.receive_into(memory)
            if not size:
                return
            yield memory[:size]
