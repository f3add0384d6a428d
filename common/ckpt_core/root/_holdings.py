"""The check that ranks share one root."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core.commit import Owner
from ckpt_core.errors import ConfigError
from ckpt_core.storage import Storage


def sees_claim(storage: Storage, owner_id: str, urls: Sequence[str], *, rank: int) -> bool:
    """Return whether this rank's root is the coordinator's.

    Args:
        storage: this rank's root.
        owner_id: of the claim that the coordinator has just written to its root.
        urls: of every rank's root.
        rank: of this process.
    """
    if rank == 0 or (len(set(urls)) == 1 and not storage.supports_rename):
        return True  # a bucket is the same everywhere
    try:
        owner = Owner.of(storage)
    except OSError:
        return False  # the other ranks wait; `form_groups` writes there, and tells all of them why it cannot
    return owner is not None and owner.id == owner_id


def refuse_other_roots(sees: Sequence[bool], urls: Sequence[str]) -> None:
    """Refuse roots of different names that are not the same place.

    Raises:
        ConfigError: there are such.
    """
    strays = [rank for rank, seen in enumerate(sees) if not seen]
    if strays and len(set(urls)) > 1:
        named = "; ".join(f"rank {rank} to {urls[rank]}" for rank in strays[:4])
        raise ConfigError(
            f"ranks would write to different places: rank 0 to {urls[0]}, {named}. Give every rank the same "
            "root: one that all of them reach, or the same path on a disk of each node; nothing was saved"
        )
