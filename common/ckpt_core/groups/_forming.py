"""The filesystem groups of a job, found by who sees whose file."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, final

from ckpt_core.coordination import Addressee, Coordinator, Greeting, own_addresses
from ckpt_core.errors import ConfigError
from ckpt_core.groups._disk_service import DiskService
from ckpt_core.groups._grouped_storage import GroupedStorage
from ckpt_core.groups._peer_storage import Peer, PeerStorage
from ckpt_core.names import probe_name, probed_by
from ckpt_core.storage import Storage, unwritable

_SCOPE: Final = "groups"
_TOPIC: Final = "files of a group"
_Offer: TypeAlias = tuple[int, list[str], int]
"""The leader of a rank's group, and where the rank is reached if it is the leader."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """The filesystem groups of a job, and this rank's part in them.

    Attributes:
        ranks: of each group, in order; the first of a group is its leader.
        service: of this rank, if it is the leader of one of several groups.
    """

    ranks: Sequence[Sequence[int]]
    service: DiskService | None = None

    def __str__(self) -> str:
        return "; ".join(_ranks_text(ranks) for ranks in self.ranks)


def form_groups(storage: GroupedStorage, coordinator: Coordinator) -> Grouping:
    """Find which ranks see one another's files, and connect the groups. Collective.

    Every rank leaves a file of no content in its root, then looks whose are there.

    Args:
        storage: the root; with several groups it spans their disks after this.
        coordinator: of the ranks.

    Raises:
        ConfigError: a rank cannot write to its root, or what ranks see does not make up groups.
    """
    service, offers = _offers(storage.own, coordinator)
    groups = _groups(offers, storage.url)
    if len(groups) == 1:
        if service is not None:
            service.close(0)
        return Grouping(ranks=groups)
    rank = coordinator.rank
    greeting = Greeting(signer=coordinator.signer(_SCOPE), rank=rank, topic=_TOPIC)

    def peer(leader: int) -> PeerStorage:
        _, addresses, port = offers[leader]
        addressee = Addressee(leader, addresses, port)
        return PeerStorage(Peer(addressee, greeting, storage.patience_seconds), storage.url)

    if service is not None:
        service.start()
    number = next(place for place, ranks in enumerate(groups) if rank in ranks)
    peers = [peer(ranks[0]) for ranks in groups if rank not in ranks]
    storage.join(number, list(map(len, groups)), peers)
    return Grouping(ranks=groups, service=service)


def _offers(own: Storage, coordinator: Coordinator) -> tuple[DiskService | None, list[_Offer]]:
    """Show this disk to the other ranks; return its service, and all offers."""
    rank = coordinator.rank
    token = coordinator.broadcast(secrets.token_hex(4), what="looking for disks of their own")
    probe = probe_name(token, rank)
    problem = ""
    try:
        own.check_root()
        own.write_bytes(probe, b"")
    except OSError as caught:
        problem = str(unwritable(own.url, caught))
    service: DiskService | None = None
    try:
        found = coordinator.gather(problem, what="looking for disks of their own")
        if problems := [f"rank {each}: {text}" for each, text in enumerate(found) if text]:
            raise ConfigError("; ".join(problems))
        leader = _first_seen(own, token, rank)
        offer: _Offer | OSError = leader if isinstance(leader, OSError) else (leader, [], 0)
        if leader == rank:
            service = DiskService(own, rank, coordinator.signer(_SCOPE))
            offer = rank, own_addresses(), service.port
        return service, coordinator.gather(offer, what="forming filesystem groups")
    except BaseException:
        if service is not None:
            service.close(0)
        raise
    finally:
        own.delete(probe)


def _first_seen(own: Storage, token: str, rank: int) -> int | OSError:
    """Return the first rank whose probe is here; the error if this rank cannot look."""
    try:
        entries = own.list("")
    except OSError as error:
        return error
    seen = (probed_by(entry.name, token) for entry in entries)
    return min((other for other in seen if other is not None), default=rank)


def _groups(offers: Sequence[Any], url: str) -> list[list[int]]:
    """Return the ranks of each group, by the leaders that they have found."""
    groups: dict[int, list[int]] = {}
    for rank, (leader, _, _) in enumerate(offers):
        groups.setdefault(leader, []).append(rank)
    strange = [leader for leader, ranks in groups.items() if leader not in ranks]
    if strange:
        raise ConfigError(
            f"the ranks do not see the same files in {url}: {_ranks_text(groups[strange[0]])} see a file of "
            f"rank {strange[0]}, which sees none of theirs. Give all ranks of a node the same directory; "
            "nothing was saved"
        )
    return [groups[leader] for leader in sorted(groups)]


def _ranks_text(ranks: Sequence[int]) -> str:
    consecutive = len(ranks) > 1 and list(ranks) == list(range(ranks[0], ranks[-1] + 1))
    named = f"{ranks[0]} to {ranks[-1]}" if consecutive else ", ".join(map(str, ranks))
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
