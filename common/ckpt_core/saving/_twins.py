"""Twins: a second file of the same bytes for every file of a save (`replicas=2`).

Each rank has a *partner* on another host if there is one, which writes the twins of its files. The bytes go
to the partner piece by piece, while the rank writes its own files.
"""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Self, TypeAlias, final

from ckpt_core.coordination import HOST_VARIABLE, Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ConfigError, SaveError, failure_text
from ckpt_core.groups import RemoteDisk, serve_disk
from ckpt_core.names import TWIN_SUFFIX, twin_name
from ckpt_core.options import bytes_text
from ckpt_core.saving._reports import KeptContent, ReportCache
from ckpt_core.storage import Storage
from ckpt_core.types import FileEntry

_logger = logger_of(__name__)

_Pieces: TypeAlias = "SimpleQueue[memoryview | None]"


@final
class Partners:
    """The second writers of one manager's saves.

    Concurrency: `settle` on the main thread, `session` and `log_size` on the save thread.
    """

    def __init__(self, storage: Storage, reports: ReportCache, deadline_seconds: float) -> None:
        self._storage = storage
        self._reports = reports
        # Half, so that the error of a rank reaches the others before their deadline.
        self._patience_seconds = deadline_seconds / 2
        self._partner: tuple[Storage, str] | None = None
        self._told = False

    def settle(self, coordinator: Coordinator) -> None:
        """Choose partners, once. Collective."""
        if self._partner is not None:
            return
        own = self._storage.own
        disks = self._storage.parts
        host = host_name() if len(disks) == 1 else f"disk {disks.index(own)}"
        talks = coordinator.talks() if coordinator.world_size > 1 else None
        if talks is not None:
            serve_disk(own, talks)
        chosen = coordinator.gather_scatter(host, _chosen, what="choosing partners for replicas=2")
        if talks is None:
            self._partner = own, "this process"
        else:
            self._partner = RemoteDisk(talks, chosen, own.url), f"rank {chosen}"

    def session(self, working: str) -> TwinSession:
        assert self._partner is not None
        disk, where = self._partner
        return TwinSession(disk, where, working, self._reports, patience_seconds=self._patience_seconds)

    def log_size(self, size_bytes: int, url: str) -> None:
        """Log once how many bytes the twins of a save take."""
        if not self._told:
            self._told = True
            _logger.info(
                "replicas=2: %s more are written in each save, as second files, to %s",
                bytes_text(size_bytes),
                url,
            )


@final
class TwinSession:
    """The twins of one rank's files, while a save is written and committed.

    Concurrency: on the save thread; one thread of its own sends the pieces, which must not change until
    `finish` or `stop` has returned.
    """

    def __init__(
        self, disk: Storage, where: str, working: str, reports: ReportCache, *, patience_seconds: float
    ) -> None:
        self._disk = disk
        self._where = where
        self._working = working
        self._pace = reports.pace
        self._patience_seconds = patience_seconds
        self._files: SimpleQueue[tuple[str, _Pieces] | None] = SimpleQueue()
        self._events: SimpleQueue[BaseException | str] = SimpleQueue()
        self._begun: list[_Pieces] = []
        self._pending: set[str] = set()
        self._changed: set[str] = set()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="ckpt-twins", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def follow(self, path: str, pieces: Iterable[memoryview]) -> Iterator[memoryview]:
        """Pass on the pieces of a file of this rank, whose twin is written meanwhile."""
        if path.endswith(TWIN_SUFFIX):
            raise ConfigError(f"{path}: with replicas=2 no file of a checkpoint may end in {TWIN_SUFFIX}")
        taken: _Pieces = SimpleQueue()
        self._pending.add(path)
        self._begun.append(taken)
        self._files.put((path, taken))
        for piece in pieces:
            taken.put(piece)
            yield piece
        taken.put(None)

    def add(self, path: str, content: bytes) -> None:
        for _ in self.follow(path, KeptContent.of([content]).pieces):
            pass

    def finish(
        self, files: Sequence[FileEntry] = (), progress: Callable[[str], None] = lambda _: None
    ) -> list[FileEntry]:
        """Wait until the twins of all files so far are durable; return those of `files`.

        Raises:
            SaveError: the partner was lost, or could not write.
        """
        while self._pending:
            event = self._events.get()
            if isinstance(event, BaseException):
                raise event
            progress(f"waiting until {self._where} has written the twins")
            self._pending.discard(event)
        return [replace(entry, path=twin_name(entry.path)) for entry in files]

    def stop(self) -> None:
        """Write no more twins: then no memory of a piece is in use."""
        self._stopped = True
        for pieces in self._begun:
            pieces.put(None)
        self._files.put(None)
        self._thread.join()

    def _run(self) -> None:
        path, file = "", None
        try:
            while (file := self._files.get()) is not None and not self._stopped:
                path, pieces = file
                self._write(path, pieces)
                self._events.put(path)
        except Exception as error:  # noqa: BLE001 - raised on the save thread
            self._events.put(self._failed(path, error))
        while file is not None and not self._stopped:  # memory of pieces that are not needed is waited for
            for _ in iter(file[1].get, None):
                pass
            file = self._files.get()

    def _write(self, path: str, pieces: _Pieces) -> None:
        def taken() -> Iterator[memoryview]:
            while (piece := pieces.get()) is not None:
                yield piece
                self._events.put("")
            if self._stopped:
                raise ConnectionAbortedError("the save has ended")

        key = f"{self._working}/{twin_name(path)}"
        self._disk.write_pieces(key, taken() if self._pace is None else self._pace(taken()))
        self._changed.add(key.rpartition("/")[0])
        if self._files.empty():  # the save thread waits for no more of them, for now
            while self._changed:
                self._disk.sync_directory(self._changed.pop())

    def _failed(self, path: str, error: Exception) -> SaveError:
        twins, problem = f"the twins of its files, which {self._where} writes because of replicas=2", ""
        if isinstance(error, TimeoutError):
            problem = f"{twins}: nothing of {path} was taken for {self._patience_seconds:g} s"
        elif isinstance(error, ConnectionError):
            problem = f"{twins}: {failure_text(error)}"
        failed = SaveError(
            problem or f"{self._where} could not write the twin of {path}: {failure_text(error)}"
        )
        failed.__cause__ = error
        return failed


def host_name() -> str:
    """Return the name of this rank's host; ranks with one name may fail together."""
    return os.environ.get(HOST_VARIABLE) or platform.node()


def choose_partners(hosts: Sequence[str]) -> list[int]:
    """Return each rank's partner: on another host if there is one, else the next rank.

    Unless one of the `hosts`, by rank, has more than half of the ranks, every rank is the partner of
    exactly one.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    order = [rank for ranks in ranks_of.values() for rank in ranks]
    # So far along the hosts in turn, every host has ended.
    shift = max(map(len, ranks_of.values())) if len(ranks_of) > 1 else 1
    partners = dict.fromkeys(order, 0)
    for place, rank in enumerate(order):
        partner = order[(place + shift) % len(order)]
        if hosts[partner] == hosts[rank] and len(ranks_of) > 1:
            elsewhere = [each for each in order if hosts[each] != hosts[rank]]
            partner = elsewhere[place % len(elsewhere)]
        partners[rank] = partner
    return [partners[rank] for rank in range(len(hosts))]


def _chosen(hosts: list[str]) -> list[int]:
    """Return each rank's partner; warn if all ranks may fail together."""
    if len(set(hosts)) == 1:
        ranks = "the only rank runs" if len(hosts) == 1 else f"all {len(hosts)} ranks run"
        _logger.warning(
            "replicas=2: %s on one host (%s), so the second files protect against a file that is lost or "
            "damaged, but not against a host that writes wrong bytes; if that is not one host, give each "
            "rank the name of its own in the environment variable %s",
            ranks,
            hosts[0],
            HOST_VARIABLE,
        )
    return choose_partners(hosts)
