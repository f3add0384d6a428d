"""The partner of this rank, and the connections between partners, for one manager."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeAlias, cast, final

from ckpt_core.coordination import Addressee, Coordinator, Greeting, Signer, own_addresses
from ckpt_core.disclosure import logger_of
from ckpt_core.groups import group_number
from ckpt_core.options import bytes_text
from ckpt_core.saving._prepared import Assignment
from ckpt_core.saving._reports import ReportCache
from ckpt_core.saving.twins._hosts import HOST_VARIABLE, choose_partners, host_name
from ckpt_core.saving.twins._incoming import Incoming
from ckpt_core.saving.twins._outgoing import LocalWriter, Outgoing, RemoteWriter, Writer
from ckpt_core.saving.twins._session import TwinSession
from ckpt_core.saving.twins._twin_files import TwinFiles
from ckpt_core.storage import Storage

__all__ = ["HOST_VARIABLE", "Partners"]

_logger = logger_of(__name__)
_CLOSING_SECONDS = 5.0

_Offer: TypeAlias = tuple[str, list[str], int]
"""Host, addresses and port of a rank."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Connected:
    """The connections of this rank."""

    rank: int
    signer: Signer
    partner: Addressee | None
    incoming: Incoming | None


@final
class Partners:
    """The second writers of one manager's saves.

    Concurrency: `settle` and `close` on the main thread, `session` and `log_size` on the save thread.

    Args:
        storage: the root.
        reports: has the limit of the rate of writes.
        deadline_seconds: the longest wait of ranks for one another.
    """

    def __init__(self, storage: Storage, reports: ReportCache, deadline_seconds: float) -> None:
        self._storage = storage
        self._reports = reports
        # Half, so that the error of a rank reaches the others before their deadline.
        self._patience_seconds = deadline_seconds / 2
        self._connected: _Connected | None = None
        self._outgoing: SimpleQueue[Outgoing | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._told = False

    def settle(self, coordinator: Coordinator) -> None:
        """Choose partners and listen, once. Collective.

        Raises:
            CoordinationError: a rank could not listen.
        """
        if self._connected is not None:
            return
        signer = coordinator.signer("twins")
        host = host_name() if self._storage.num_disks == 1 else f"disk {group_number(self._storage)}"
        offer, incoming = _listen(coordinator, signer, host)
        try:
            partner, addresses, port, sources = coordinator.gather_scatter(
                offer, self._placed, what="choosing partners for replicas=2"
            )
        except BaseException:
            if incoming is not None:
                incoming.close(0)
            raise
        if incoming is not None:
            incoming.start(sources)
        self._connected = _Connected(
            rank=coordinator.rank,
            signer=signer,
            partner=None if incoming is None else Addressee(partner, addresses, port),
            incoming=incoming,
        )
        self._thread = threading.Thread(target=self._send, name="ckpt-twin-out", daemon=True)
        self._thread.start()

    def session(self, assignment: Assignment) -> TwinSession:
        """Begin the twins of a save."""
        connected, save_id = self._connected, assignment.save_id
        assert connected is not None
        files = TwinFiles(self._storage.own, assignment.working, self._reports)
        writer, where = cast("Writer", LocalWriter(files)), "this process"
        if connected.incoming is not None and connected.partner is not None:
            connected.incoming.begin(save_id, files)
            greeting = Greeting(signer=connected.signer, rank=connected.rank, topic=save_id)
            writer = RemoteWriter(connected.partner, greeting, self._patience_seconds)
            where = f"rank {connected.partner.rank}"
        outgoing = Outgoing(writer, where)
        self._outgoing.put(outgoing)
        return TwinSession(save_id, outgoing, connected.incoming)

    def log_size(self, size_bytes: int, url: str) -> None:
        """Log once how many bytes the twins of a save take."""
        if not self._told:
            self._told = True
            _logger.info(
                "replicas=2: %s more are written in each save, as second files, to %s",
                bytes_text(size_bytes),
                url,
            )

    def close(self) -> None:
        """End the threads and close the port."""
        self._outgoing.put(None)
        if self._thread is not None:
            self._thread.join(_CLOSING_SECONDS)
        if self._connected is not None and self._connected.incoming is not None:
            self._connected.incoming.close(_CLOSING_SECONDS)

    def _send(self) -> None:
        while (outgoing := self._outgoing.get()) is not None:
            outgoing.run()

    def _placed(self, offers: Sequence[_Offer]) -> list[Any]:
        """Return each rank's partner, with addresses and port, and its number of sources."""
        hosts = [host for host, _, _ in offers]
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
        partners = choose_partners(hosts)
        sources = Counter(partners)
        return [(partner, *offers[partner][1:], sources[rank]) for rank, partner in enumerate(partners)]


def _listen(
    coordinator: Coordinator, signer: Signer, host: str
) -> tuple[_Offer | BaseException, Incoming | None]:
    """Open the port of this rank, if there are others."""
    if coordinator.world_size == 1:
        return (host, [], 0), None
    try:
        incoming = Incoming(coordinator.rank, signer)
    except OSError as error:
        return error, None
    return (host, own_addresses(), incoming.port), incoming
