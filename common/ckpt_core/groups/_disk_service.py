"""The disk of this rank's group, served to the ranks of other groups."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from typing import Any, Final, final

from ckpt_core.coordination import PIECE_BYTES, Doorway, Link, Signer, answer
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CoordinationError
from ckpt_core.groups._wire import entry_row, error_row
from ckpt_core.storage import Lock, RangeReader, Storage

_logger = logger_of(__name__)

_WELCOMING_THREADS: Final = 2
"""A stranger at the port may keep one of them waiting."""
_MOST_OPEN: Final = 8
_COORDINATOR: Final = 0


@final
class DiskService:
    """Serves one disk: reads to all ranks, changes to the coordinator alone.

    Concurrency: `start` and `close` on the main thread; each connection has a thread of its own.

    Args:
        storage: of this rank's group.
        rank: of this process.
        signer: proves ranks of this job to one another.
    """

    def __init__(self, storage: Storage, rank: int, signer: Signer) -> None:
        self._storage = storage
        self._rank = rank
        self._signer = signer
        self._doorway = Doorway()
        self._changed = threading.Condition()
        self._links: dict[Link, int] = {}
        self._locks: dict[str, Lock] = {}
        self._threads: list[threading.Thread] = []
        self._closed = False

    @property
    def port(self) -> int:
        """The port at which it listens."""
        return self._doorway.port

    def start(self) -> None:
        """Start to listen."""
        for number in range(_WELCOMING_THREADS):
            thread = threading.Thread(target=self._welcome, name=f"ckpt-group-door-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def close(self, seconds: float) -> None:
        """End the service once the coordinator has left, or after `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: _COORDINATOR not in self._links.values(), seconds)
            self._closed = True
            links = list(self._links)
        self._doorway.close()
        for link in links:
            link.abort()
        for thread in self._threads:
            thread.join(seconds)
        if not any(thread.is_alive() for thread in self._threads):
            self._doorway.release()
        for lock in self._locks.values():
            lock.release()

    def _welcome(self) -> None:
        while not self._closed:
            try:
                found = self._doorway.welcome(self._signer, self._rank)
            except (OSError, EOFError, ValueError, LookupError, CoordinationError) as error:
                # A stranger at the port is of no consequence; a rank that was refused says so itself.
                _logger.debug("rank %d: a connection to its disk was refused: %s", self._rank, error)
                continue
            if found is None:
                return
            threading.Thread(target=self._attend, args=found, name="ckpt-group-serve", daemon=True).start()

    def _attend(self, link: Link, greeting: Mapping[str, Any]) -> None:
        caller = int(greeting["rank"])
        with closing(link):
            with self._changed:
                if self._closed:
                    return
                self._links[link] = caller
            try:
                answer(link, self._signer, greeting, self._rank)
                with ExitStack() as stack:
                    desk = _Desk(self._storage, link, self._locks, stack)
                    while True:
                        desk.serve(link.receive_fields(), may_change=caller == _COORDINATOR)
            except (OSError, EOFError, ValueError, LookupError, TypeError) as error:
                _logger.debug("rank %d: the connection of rank %d ended: %s", self._rank, caller, error)
            finally:
                with self._changed:
                    del self._links[link]
                    self._changed.notify_all()


@final
class _Desk:
    """Carries out the requests of one connection."""

    def __init__(self, storage: Storage, link: Link, locks: dict[str, Lock], stack: ExitStack) -> None:
        self._storage = storage
        self._link = link
        self._locks = locks
        self._stack = stack
        self._readers: dict[tuple[str, int], tuple[ExitStack, RangeReader]] = {}
        self._memory = bytearray()
        self._reads: Mapping[str, Callable[..., Any]] = {
            "list": lambda key: [entry_row(entry) for entry in storage.list(key)],
            "directories": lambda key: sorted(storage.directories(key)),
            "entry": lambda key: None if (found := storage.entry(key)) is None else entry_row(found),
            "size": storage.size,
            "crc32": storage.crc32,
            "open": lambda key, opening: self._reader(key, opening).size_bytes,
            "free": lambda: list(storage.space()),
            "other_owner": storage.other_owner,
            "lock_holder": storage.lock_holder,
        }
        self._changes: Mapping[str, Callable[..., Any]] = {
            "check_root": storage.check_root,
            "delete": storage.delete,
            "make_directory": storage.make_directory,
            "sync_directory": storage.sync_directory,
            "rename": storage.rename,
            "exchange": storage.exchange,
            "lock": self._lock,
            "unlock": self._unlock,
        }

    def serve(self, request: Mapping[str, Any], *, may_change: bool) -> None:
        """Answer one request.

        Raises:
            OSError: the connection was lost.
            LookupError: there is no such operation, or not for this rank; the connection ends.
        """
        operation, arguments = request["do"], request["with"]
        if operation == "read":
            self._read(*arguments)
        elif operation in {"write", "replace"} and may_change:
            self._write(operation, *arguments)
        else:
            known = {**self._reads, **self._changes} if may_change else self._reads
            self._say(lambda: known[operation](*arguments))

    def _say(self, carry_out: Callable[[], Any]) -> bool:
        try:
            value = carry_out()
        except (KeyError, TypeError):
            raise  # not of a rank of this version
        except Exception as error:  # noqa: BLE001 - raised on the rank that asked
            self._link.send_fields(error=error_row(error))
            return False
        self._link.send_fields(value=value)
        return True

    def _read(self, key: str, opening: int, offset: int, size: int) -> None:
        if not 0 < size <= PIECE_BYTES:
            raise ValueError(f"{size} bytes in one read")
        if len(self._memory) < size:
            self._memory = bytearray(size)
        view = memoryview(self._memory)[:size]
        if self._say(lambda: self._reader(key, opening).read_into(offset, view)):
            self._link.send(view)

    def _reader(self, key: str, opening: int) -> RangeReader:
        """Return the reader of an opened file.

        Openings have numbers, because a name may get another file.
        """
        place = key, opening
        if place not in self._readers:
            if len(self._readers) >= _MOST_OPEN:
                oldest = next(iter(self._readers))
                self._readers.pop(oldest)[0].close()
            stack = self._stack.enter_context(ExitStack())
            self._readers[place] = stack, stack.enter_context(self._storage.open_ranges(key))
        return self._readers[place][1]

    def _write(self, operation: str, key: str) -> None:
        pieces = self._pieces()

        def write() -> None:
            if operation == "replace":
                self._storage.replace(key, b"".join(map(bytes, pieces)))
                return
            with self._storage.create(key) as stream:
                for piece in pieces:
                    stream.write(piece)

        try:
            write()
        except Exception as error:  # noqa: BLE001 - raised on the rank that asked
            for _ in pieces:  # else the answer would be lost; raises if the connection is
                pass
            self._link.send_fields(error=error_row(error))
        else:
            self._link.send_fields(value=None)

    def _pieces(self) -> Iterator[memoryview]:
        memory = memoryview(bytearray(PIECE_BYTES))
        while size := self._link.receive_into(memory):
            yield memory[:size]

    def _lock(self, key: str) -> bool:
        if key in self._locks:
            return False
        lock = self._storage.try_lock(key)
        if lock is None:
            return False
        self._locks[key] = lock
        return True

    def _unlock(self, key: str) -> None:
        with suppress(KeyError):
            self._locks.pop(key).release()
