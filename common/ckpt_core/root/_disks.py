"""The disks that make up the root of a job: one, or one of each node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from ckpt_core.commit import Marker, Owner
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, CoordinationError
from ckpt_core.groups import GroupedStorage, form_groups
from ckpt_core.names import incomplete_name, is_incomplete, is_trash, original_name
from ckpt_core.storage import Storage

_logger = logger_of(__name__)


def find_disks(
    storage: Storage,
    coordinator: Coordinator,
    owner_id: str,
    urls: Sequence[str],
    *,
    claim: Callable[[Storage], None],
    survey: Callable[[], str],
) -> str:
    """Find the disks of a root, and claim those of other nodes. Collective.

    With one shared disk that is one exchange. The storage spans all disks afterwards.

    Args:
        storage: this rank's root.
        coordinator: the ranks of the job.
        owner_id: of the claim that the coordinator has just written to its root.
        urls: of every rank's root.
        claim: called on the coordinator with each further disk.
        survey: called on the coordinator in the end; reads the root.

    """

    def decide(sees: list[bool]) -> list[str]:
        strays = [rank for rank, seen in enumerate(sees) if not seen]
        if strays and len(set(urls)) > 1:
            named = "; ".join(f"rank {rank} to {urls[rank]}" for rank in strays[:4])
            raise ConfigError(
                f"ranks would write to different places: rank 0 to {urls[0]}, {named}. Give every rank the "
                "same root: one that all of them reach, or the same path on a disk of each node; nothing was "
                "saved"
            )
        return [survey() if not strays else ""] * len(sees)

    # A bucket is the same everywhere.
    sees = coordinator.rank == 0 or (len(set(urls)) == 1 and not storage.supports_rename)
    if not sees:
        with suppress(OSError):  # `form_groups` writes there, and tells all ranks why it cannot
            owner = Owner.of(storage)
            sees = owner is not None and owner.id == owner_id
    found = coordinator.gather_scatter(sees, decide, what="comparing the roots")
    if found:
        return found
    assert isinstance(storage, GroupedStorage)
    groups = form_groups(storage, coordinator)
    if coordinator.is_coordinator:
        _logger.info("%s is a disk of its own for each of: %s", storage.url, groups)

    def claim_all() -> str:
        for part in storage.parts[1:]:
            claim(part)
        return survey()

    return coordinator.run_on_coordinator(claim_all, what="taking the disks of all nodes")


def leave_disks(storage: Storage, coordinator: Coordinator, owner_id: str) -> None:
    """Let go of the disks of other nodes; the coordinator has released the root.

    Until it has, the other ranks wait: the lock on each disk is released there.
    """
    if not isinstance(storage, GroupedStorage) or storage.num_disks == 1:
        return
    with suppress(CoordinationError):
        topic = f"leaving the disks of nodes ({owner_id})"
        channel = coordinator.commit_channel()
        channel.broadcast(topic, lambda: None, deadline_seconds=storage.patience_seconds)
    storage.leave()


def settle_parts(parts: Sequence[Storage]) -> None:
    """Finish what the disks of some nodes have done and those of others have not.

    - A checkpoint that has its name on one disk was complete on all of them before. Where it is still under
      the name of a save in flight, it gets its name now.
    - A checkpoint that is being deleted on one disk gets its name taken away on the others.

    What no disk has finished is left to `collect_orphans`. The caller owns the root; with one disk there is
    nothing to do.
    """
    for part in parts if len(parts) > 1 else ():
        others = [other for other in parts if other is not part]
        for name in sorted(part.directories("")):
            if is_incomplete(name):
                _finish_commit(part, name, others)
            elif is_trash(name):
                _finish_prune(part, name, others)


def _finish_commit(part: Storage, working: str, others: Sequence[Storage]) -> None:
    name = original_name(working)
    save_id = _save_id(part, working)
    if save_id is None or working != incomplete_name(name, save_id):
        return  # not complete, or the old checkpoint of a finished replacement
    if not any(_save_id(other, name) == save_id for other in others):
        return
    if part.entry(name) is None:
        part.rename(working, name)
    else:
        part.exchange(working, name)  # what was replaced is an orphan now
    part.sync_directory("")
    _logger.warning(
        "%s/%s: a crash interrupted its commit between two nodes, which is finished now", part.url, name
    )


def _finish_prune(part: Storage, trash: str, others: Sequence[Storage]) -> None:
    name, save_id = original_name(trash), _save_id(part, trash)
    for other in others if save_id is not None else ():
        if _save_id(other, name) == save_id:
            other.rename(name, trash)
            other.sync_directory("")


def _save_id(storage: Storage, directory: str) -> str | None:
    """Return the id of the complete save in a directory; None without one."""
    try:
        return Marker.read(storage, directory).save_id
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None
