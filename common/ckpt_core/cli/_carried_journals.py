"""The journals of runs that are copied; they never stop a copy."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_core.commit import Owner
from ckpt_core.disclosure import logger_of
from ckpt_core.journal import JoinedJournal, RunJournal
from ckpt_core.names import WRITER
from ckpt_core.storage import Storage, excludes_others

_logger = logger_of(__name__)


def joined_journal(runs: Sequence[Storage], target: Storage) -> JoinedJournal | None:
    """Join the journals of runs with that of the root they are copied to.

    What cannot be read costs a warning.
    """
    journals: list[RunJournal] = []
    try:
        for source in runs:
            journals.append(RunJournal.of(source, is_alive=_may_be_alive(source)))
            if lines := journals[-1].unreadable:
                _logger.warning(
                    "%d lines of the journal of %s cannot be read, and are not copied", lines, source.url
                )
        joined = JoinedJournal(target, journals) if journals else None
    except OSError as error:
        _logger.warning("the journal cannot be read, and is not copied: %s", error)
        return None
    return joined if joined is not None and joined.has_news else None


def carry_journal(journal: JoinedJournal) -> None:
    """Write a journal to the target, whose lease is held; a failure is a warning."""
    try:
        journal.write()
    except OSError as error:
        _logger.warning("the checkpoints were copied, and their journal was not: %s", error)


def _may_be_alive(storage: Storage) -> bool:
    """Return whether a job may be training in a root."""
    owner = Owner.of(storage)
    if owner is None or owner.has_ended:
        return False
    try:
        lock = storage.try_lock(WRITER)
    except OSError:
        return True  # a root that this user can only read
    if lock is None:
        return True
    lock.release()
    return not excludes_others(lock)
