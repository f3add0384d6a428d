"""Whether all ranks mean the same directory, where they do not call it by the same name."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core.commit import Owner
from ckpt_core.coordination import Coordinator
from ckpt_core.errors import ConfigError
from ckpt_core.storage import Storage


def require_same_root(storage: Storage, coordinator: Coordinator, owner_id: str, urls: Sequence[str]) -> None:
    """Compare what each rank sees in its root. Collective; costs nothing if all have the same URL.

    Args:
        storage: this rank's root.
        coordinator: of the ranks.
        owner_id: of the claim that the coordinator has just written to its root.
        urls: of every rank's root.

    Raises:
        ConfigError: a rank does not see the claim, so its root is another; the same on every rank.
    """
    if len(set(urls)) == 1:
        return
    owner = Owner.of(storage)
    sees = coordinator.gather(owner is not None and owner.id == owner_id, what="comparing the roots")
    strays = [rank for rank, seen in enumerate(sees) if not seen]
    if strays:
        told = "; ".join(f"rank {rank} to {urls[rank]}" for rank in strays[:4])
        raise ConfigError(
            f"ranks would write to different places: rank 0 to {urls[0]}, {told}. Give every rank the same "
            "root, on storage that all of them reach; nothing was saved"
        )
