"""Commits and prunes that a crash left half done between the disks of nodes."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core.commit import Marker
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError
from ckpt_core.names import incomplete_name, is_incomplete, is_trash, original_name
from ckpt_core.storage import Storage

_logger = logger_of(__name__)


def settle_parts(parts: Sequence[Storage]) -> None:
    """Finish what the disks of some nodes have done and those of others have not.

    - A checkpoint that has its name on one disk was complete on all of them before. Where it is still under
      the name of a save in flight, it gets its name now.
    - A checkpoint that is being deleted on one disk gets its name taken away on the others.

    What no disk has finished is left to `collect_orphans`. The caller owns the root; with one disk there is
    nothing to do.

    Raises:
        OSError: storage failed.
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
