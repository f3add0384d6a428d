"""The right to write to a root, taken once, before the first byte, by the coordinator for all ranks."""

from __future__ import annotations

import errno
import secrets
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

from ckpt_core.commit import (
    Catalog,
    Inventory,
    Lease,
    Soundness,
    collect_orphans,
    is_name,
    quarantine,
    refuse_as_root,
    require_free,
)
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    RootBusyError,
)
from ckpt_core.lifecycle._holdings import TAKING, hold, let_go, take_from_earlier_manager
from ckpt_core.lifecycle._line import Line
from ckpt_core.lifecycle._same_root import require_same_root
from ckpt_core.names import run_name
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_MOST_TOLD: Final = 5


@final
class Ownership:
    """Holds the lease of a root, what is known to be in it, and the lineage that saves belong to.

    Attributes:
        line: the lineage of the live state; of use on the coordinator only, as all that follows.
        inventory: what is committed in the root.
        soundness: what of it is known to be whole.

    Args:
        storage: the root.
        coordinator: the ranks of the job.
        job_name: what this job is called in `writer.json`; None for the name of its script.
        until_idle: returns when no save is in flight; must keep nothing large alive.

    Concurrency: `take`, `release` and `note_sound` on the main thread, `take` collective; the others on any
    thread of the coordinator, `note_damaged` on the main thread of every rank, too.
    """

    def __init__(
        self,
        storage: Storage,
        coordinator: Coordinator,
        *,
        job_name: str | None = None,
        until_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._job_name = job_name
        self._until_idle = until_idle
        self._superseded = False
        self._storage = storage
        self._coordinator = coordinator
        self._lease: Lease | None = None
        self._taken = self._given_back = False
        self._damaged: set[str] = set()
        self._occupied: set[str] = set()
        self._prefix = ""
        self.line = Line(storage.url)
        self.inventory = Inventory(storage)
        self.soundness = Soundness(storage, lambda name, problem: self.note_damaged({name: problem}))

    def take(self) -> None:
        """Claim the root, unless it is claimed already, and clear away what crashed saves left.

        Raises:
            ConfigError: the root cannot be written, or is not the same for all ranks.
            RootBusyError: another live job writes to it.
        """
        if self._taken:
            return

        def acquire(urls: list[str]) -> list[tuple[str, str, list[str]]]:
            prefix = self._acquire()
            owner_id = "" if self._lease is None else self._lease.owner.id
            return [(prefix, owner_id, urls)] * len(urls)

        self._prefix, owner_id, urls = self._coordinator.gather_scatter(
            self._storage.url, acquire, what="taking the root"
        )
        try:
            require_same_root(self._storage, self._coordinator, owner_id, urls)
        except ConfigError:
            self.release()
            raise
        self._taken, self._given_back = True, False

    def id_at(self, moment: int) -> str:
        """The id of the save agreed on at a moment, in microseconds: the same on every rank.

        Not a count: a rank that missed the failure of one save would be out of step for good.
        """
        return f"{self._prefix}{moment:016x}"

    def check(self) -> None:
        """Refuse to go on after another job has taken the root.

        Raises:
            RootBusyError: it has, or this job has given it back: what hung then may wake up now.
            ConfigError: a later manager of this process has taken it.
        """
        if self._superseded:
            raise ConfigError(
                f"{self._storage.url} belongs to another CheckpointManager of this process, which was made "
                "later and has taken it over: use that one, or make a new one; this one can only load"
            )
        if self._given_back:
            raise RootBusyError(
                f"{self._storage.url} was given back by this job before its last save had ended; "
                "that save is not committed"
            )
        if self._lease is not None:
            self._lease.check()

    def is_taken(self, name: str, *, replace: bool) -> bool:
        """Whether a save of that name needs a closer look first; from memory, so that it costs nothing.

        The root is this job's alone, so nothing appears there that it does not know of. Should something do,
        the commit refuses to overwrite it.
        """
        makes_way = replace and self._storage.supports_rename
        known = self._damaged if makes_way else self._damaged | self._occupied
        return self._superseded or name in known or not is_name(name)

    def clear_name(self, name: str, step: int, *, replace: bool) -> str:
        """Look closer: give the name that the save may have; a damaged checkpoint may be moved aside for it.

        Args:
            name: what it is to be called.
            step: of the save.
            replace: whether it takes the place of a committed checkpoint of that name; else, where an
                abandoned one or one that nobody can use has the name, it gets one of its lineage.

        Raises:
            CheckpointExistsError: the name is taken.
            ConfigError: it cannot be the name of a checkpoint.
            RootBusyError: see `check`.
        """
        self.check()
        if not replace:
            return self._own_name(name, step)
        if name in self._damaged:
            moved = quarantine(self._storage, name)
            _logger.warning("damaged %s/%s was moved to %s", self._storage.url, name, moved)
            self._damaged.discard(name)
        require_free(self._storage, name, replace=replace)
        self._occupied.discard(name)
        return name

    def note_committed(self, info: CheckpointInfo) -> None:
        """Remember a checkpoint that this job has committed."""
        self._occupied.add(info.name)
        self.inventory.add(info)
        self.line.committed(info)

    def note_damaged(self, damaged: Mapping[str, str]) -> None:
        """Remember checkpoints that did not verify: a later save of the same name takes their place.

        They are marked for people and jobs to come, by the coordinator, if the root is this job's. A mark
        that cannot be written is a warning: training does not depend on it.

        Args:
            damaged: name -> what is wrong, in words.
        """
        self._damaged |= set(damaged)
        if self._lease is None:
            return
        for name, problem in damaged.items():
            self._mark(self._lease, name, problem)

    def note_sound(self, name: str) -> None:
        """Take back what was said of a checkpoint that verifies after all; see `note_damaged`."""
        self._damaged.discard(name)
        if self._lease is None:
            return
        try:
            self._lease.check()
            Catalog(self._storage).unmark(name)
        except (CheckpointError, OSError) as error:
            _logger.warning(
                "%s/%s verifies, but is still marked as damaged: %s", self._storage.url, name, error
            )

    def note_verified(self, info: CheckpointInfo, failures: Sequence[FileFailure]) -> None:
        """A checkpoint was verified on a person's behalf, whoever owns the root: mark it, or take its mark.

        What cannot be written to the root is a warning, and known to this process all the same.
        """
        problem = "; ".join(map(str, failures[:_MOST_TOLD]))
        if failures:
            self._damaged.add(info.name)
        else:
            self._damaged.discard(info.name)
        try:
            self.soundness.learn(info, problem)
        except (CheckpointError, OSError) as error:
            _logger.warning(
                "%s/%s %s, and its mark could not be changed: %s",
                self._storage.url,
                info.name,
                f"is damaged ({problem})" if failures else "is whole",
                error,
            )

    def release(self) -> None:
        """Give the root back."""
        lease = self._lease
        if lease is not None and not self._superseded:
            let_go(lease)
            lease.release()
            self._given_back = True
        self._lease, self._taken = None, False

    def _own_name(self, name: str, step: int) -> str:
        try:
            require_free(self._storage, name)
        except CheckpointExistsError:
            if self._is_made(name, step):
                raise
        else:
            self._occupied.discard(name)
            return name
        other = run_name(name, self.line.lineage_of(step).id)
        require_free(self._storage, other)
        _logger.warning(
            "%s/%s is occupied by a checkpoint that this run does not go on from, or by something else: "
            "step %d is saved as %s",
            self._storage.url,
            name,
            step,
            other,
        )
        return other

    def _is_made(self, name: str, step: int) -> bool:
        """Whether the checkpoint of that name is what a save of `step` would make a second time."""
        try:
            info = Catalog(self._storage).find(name=name)
        except (CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError):
            return False
        return name not in self._damaged and self.line.is_committed(info, step)

    def _mark(self, lease: Lease, name: str, problem: str) -> None:
        try:
            lease.check()
            Catalog(self._storage).mark_damaged(name, problem)
        except CorruptCheckpointError:
            return  # with its marker it has lost the name of checkpoint, and counts for nobody as it is
        except (CheckpointError, OSError) as error:
            _logger.warning(
                "%s/%s is damaged, but could not be marked so: %s", self._storage.url, name, error
            )

    def _acquire(self) -> str:
        try:
            self._storage.check_root()
            refuse_as_root(self._storage)
            if self._lease is None:  # else it was acquired before, and what comes after it failed
                self._lease = _take_lease(self._storage, self._job_name, self._until_idle, _superseding(self))
            self.collect_orphans()
            self._occupied = {entry.name for entry in self._storage.list("")}
            self.inventory = Inventory(self._storage)
            survey = self.inventory.survey()
            self.line.surveyed(survey.everything, survey.lineage)
        except OSError as error:
            raise ConfigError(
                f"checkpoints cannot be written to {self._storage.url}: {error}. {_remedy(error)}"
            ) from error
        return secrets.token_hex(4)

    def collect_orphans(self) -> None:
        """Clear away what crashed saves and prunes left; nothing of this job may be in flight."""
        try:
            orphans = collect_orphans(self._storage, keep=())
        except OSError as error:
            # They only take space; the next job tries again.
            _logger.warning("what crashed saves left in %s was not removed: %s", self._storage.url, error)
            return
        if orphans:
            _logger.warning(
                "removed what crashed saves left in %s: %s", self._storage.url, ", ".join(orphans)
            )


def _take_lease(
    storage: Storage, job_name: str | None, until_idle: Callable[[], None], supersede: Callable[[], None]
) -> Lease:
    with TAKING:
        if take_from_earlier_manager(storage):
            _logger.warning(
                "%s was held by an earlier CheckpointManager of this process, which was not closed: it is "
                "taken over, and the earlier one cannot save any more",
                storage.url,
            )
        job = job_name or Path(next(iter(sys.argv), "")).name or "python"
        lease = Lease.acquire(storage, job, discreet=job_name is not None)
        hold(lease, until_idle=until_idle, supersede=supersede)
    return lease


def _superseding(ownership: Ownership) -> Callable[[], None]:
    """Tell an ownership that it is superseded, without keeping it alive until then."""
    found = weakref.ref(ownership)

    def supersede() -> None:
        alive = found()
        if alive is not None:
            alive._superseded = True

    return supersede


def _remedy(error: OSError) -> str:
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return "Free space there, or choose another directory"
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOENT, None}:
        return "Choose a directory this job may write to"
    return "Remove the cause, then start again"
