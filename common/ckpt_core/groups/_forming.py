"""The filesystem groups of a job, found by who sees whose file."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from ckpt_core.coordination import Coordinator
from ckpt_core.errors import ConfigError
from ckpt_core.groups._disk_service import serve_disk
from ckpt_core.groups._grouped_storage import GroupedStorage
from ckpt_core.groups._remote_disk import RemoteDisk
from ckpt_core.names import probe_name, probed_by
from ckpt_core.storage import Storage, unwritable


def form_groups(storage: GroupedStorage, coordinator: Coordinator) -> str:
    """Find which ranks see one another's files, and connect the groups. Collective.

    Every rank leaves a file of no content in its root, then looks whose are there.

    Args:
        storage: the root; with several groups it spans their disks after this.
        coordinator: of the ranks.

    Returns:
        The ranks of each group, in words.

    Raises:
        ConfigError: a rank cannot write to its root, or what ranks see does not make up groups.
    """
    rank = coordinator.rank
    groups = _groups(_leaders(storage.own, coordinator), storage.url)
    if len(groups) > 1:
        talks = coordinator.talks()
        number = next(place for place, ranks in enumerate(groups) if rank in ranks)
        if groups[number][0] == rank:
            serve_disk(storage.own, talks)
        peers = [RemoteDisk(talks, ranks[0], storage.url) for ranks in groups if rank not in ranks]
        storage.join(number, list(map(len, groups)), peers)
    return "; ".join(map(_ranks_text, groups))


def _leaders(own: Storage, coordinator: Coordinator) -> Sequence[int]:
    """Return for each rank the lowest rank whose file it sees. Collective."""
    token = coordinator.broadcast(secrets.token_hex(4), what="looking for disks of their own")
    probe, problem = probe_name(token, coordinator.rank), ""
    try:
        own.check_root()
        own.write_bytes(probe, b"")
    except OSError as caught:
        problem = str(unwritable(own.url, caught))
    try:
        found = coordinator.gather(problem, what="looking for disks of their own")
        if problems := [f"rank {each}: {text}" for each, text in enumerate(found) if text]:
            raise ConfigError("; ".join(problems))
        return coordinator.gather(_first_seen(own, token, coordinator.rank), what="forming filesystem groups")
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


def _groups(leaders: Sequence[int], url: str) -> list[list[int]]:
    """Return the ranks of each group, by the leaders that they have found."""
    groups: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
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
