"""The right to write to a root, taken by the coordinator before the first byte."""

from __future__ import annotations

import secrets
import sys
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias, final

from ckpt_core.commit import (
    Catalog,
    Inventory,
    Lease,
    Soundness,
    Survey,
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
    PartialCheckpointError,
    RootBusyError,
    lost,
)
from ckpt_core.journal import Journal
from ckpt_core.names import run_name
from ckpt_core.provenance import code_version
from ckpt_core.root._ancestry import Ancestry
from ckpt_core.root._disks import Disks
from ckpt_core.root._holdings import TAKING, hold, let_go, take_from_earlier_manager
from ckpt_core.root._settling import settle_parts
from ckpt_core.storage import Storage, unwritable
from ckpt_core.types import CheckpointInfo, Lineage

_logger = logger_of(__name__)

_MOST_LISTED: Final = 5

Elsewhere: TypeAlias = Callable[[Survey], tuple[Sequence[CheckpointInfo], Lineage]]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerHooks:
    """The demands of uploads on the owner of a root, and its journal.

    Attributes:
        taken: called on every rank, on the main thread, when the root has been taken.
        held: returns the names of checkpoints that must not be removed for now.
        spared: returns the names of torn checkpoints that will be completed.
        journal: is written for as long as the root is held; None for none.
    """

    taken: Callable[[], None] = lambda: None
    held: Callable[[], Collection[str]] = tuple
    spared: Callable[[], Collection[str]] = tuple
    journal: Journal | None = None


@final
class Ownership:
    """The lease of a root, its known content, and the lineage of saves.

    Attributes:
        line: the lineage of the live state; valid on the coordinator only, like the following ones.
        inventory: the committed checkpoints in the root.
        soundness: those known to be whole.

    Args:
        storage: the root.
        coordinator: the ranks of the job.
        job_name: name of this job in `writer.json`; None for the name of its script.
        until_idle: blocks until no save is in flight; must keep nothing large alive.
        hooks: the demands of uploads.
        elsewhere: returns, for a survey of the root, the checkpoints that only further tiers hold, and the
            present lineage of all tiers.

    Concurrency: `take` and `release` on the main thread, `take` collective; the others on any
    thread of the coordinator, `note_damaged` on the main thread of every rank, too.
    """

    def __init__(
        self,
        storage: Storage,
        coordinator: Coordinator,
        *,
        job_name: str | None = None,
        until_idle: Callable[[], None] = lambda: None,
        hooks: OwnerHooks | None = None,
        elsewhere: Elsewhere = lambda survey: ((), survey.lineage),
    ) -> None:
        self._hooks = hooks or OwnerHooks()
        self._elsewhere = elsewhere
        self._further: dict[str, CheckpointInfo] = {}
        self._job_name = job_name
        self._until_idle = until_idle
        self._disks = Disks(storage, coordinator)
        self._superseded = False
        self._storage = storage
        self._coordinator = coordinator
        self._lease: Lease | None = None
        self._taken = self._given_back = False
        self._damaged: set[str] = set()
        self._occupied: set[str] = set()
        self._prefix = ""
        self.line = Ancestry(storage.url)
        self.inventory = Inventory(storage, self._hooks.held)
        self.soundness = Soundness(storage, lambda name, problem: self.note_damaged({name: problem}))

    def take(self) -> None:
        """Claim the root, unless claimed already, and remove the remains of crashed saves.

        Raises:
            ConfigError: the root cannot be written, or is not the same for all ranks.
            RootBusyError: another live job writes to it.
        """
        if self._taken:
            return

        def acquire(urls: list[str]) -> list[tuple[str, list[str]]]:
            self._acquire()
            owner_id = "" if self._lease is None else self._lease.owner.id
            return [(owner_id, urls)] * len(urls)

        owner_id, urls = self._coordinator.gather_scatter(self._storage.url, acquire, what="taking the root")
        try:
            lease = self._lease
            self._prefix = self._disks.find(
                owner_id,
                urls,
                claim=lambda part: None if lease is None else lease.extend(part),
                survey=self._open,
            )
            self._hooks.taken()
            if self._hooks.journal is not None:
                check = None if lease is None else lease.check
                self._hooks.journal.open(self._prefix, self._coordinator.world_size, check)
        except (CheckpointError, OSError):
            self.release()
            raise
        self._taken, self._given_back = True, False

    @property
    def held(self) -> Collection[str]:
        """The names of checkpoints that must not be removed for now."""
        return self._hooks.held()

    @property
    def run_id(self) -> str:
        """The id of this start of the job: of the time for which it holds the root."""
        return self._prefix

    def id_at(self, moment: int) -> str:
        """Return the id of the save agreed on at a moment, in microseconds, on every rank.

        It is not a count: a rank that missed the failure of one save would be out of step forever.
        """
        return f"{self._prefix}{moment:016x}"

    def check(self, *, reclaim: bool = False) -> None:
        """Refuse to continue after another job has taken the root.

        With `reclaim`, a claim that somebody has removed is made again.

        Raises:
            RootBusyError: it has, or this job has released the root, and a save that hung wakes up now.
            ConfigError: a later manager of this process has taken it.
        """
        if self._superseded:
            raise ConfigError(
                f"{self._storage.url} belongs to another CheckpointManager of this process, which was made "
                "later and has taken it over: use that one, or make a new one; this one can only load"
            )
        if self._given_back:
            raise RootBusyError(
                f"{self._storage.url} was released by this job before its last save had ended; "
                "that save is not committed"
            )
        if self._lease is not None:
            self._lease.check(reclaim=reclaim)

    def is_taken(self, name: str, *, replace: bool) -> bool:
        """Return whether a save of that name needs `clear_name`; from memory, without I/O.

        The root is this job's alone, so no unknown names appear in it. If one does, the commit refuses to
        overwrite it.
        """
        replaceable = replace and self._storage.supports_rename
        known = self._damaged if replaceable else self._damaged | self._occupied | self._further.keys()
        return self._superseded or name in known or not is_name(name)

    def clear_name(self, name: str, step: int, *, replace: bool) -> str:
        """Return the name for a save; a damaged checkpoint with it may be moved aside.

        Args:
            name: the requested name.
            step: of the save.
            replace: whether it replaces a committed checkpoint of that name; else, where an abandoned or
                unusable one has the name, it gets one of its lineage.

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
        self.inventory.note_written(info)
        self.line.record_commit(info)

    def note_damaged(self, damaged: Mapping[str, str]) -> None:
        """Remember damaged checkpoints: a later save of the same name replaces them.

        The coordinator marks them for users and later jobs, if the root is this job's. A mark that cannot be
        written is a warning: training does not depend on it.

        Args:
            damaged: name -> problem, in words.
        """
        self._damaged |= set(damaged)
        if self._lease is None:
            return
        for name, problem in damaged.items():
            _mark(self._storage, self._lease, name, problem)

    def note_sound(self, name: str) -> None:
        """Undo `note_damaged` for a checkpoint that verifies after all."""
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
        """Set or remove the mark of a checkpoint that a user verified, in any job's root.

        A mark that cannot be written is a warning, and still known to this process.
        """
        failures = lost(failures)
        problem = "; ".join(map(str, failures[:_MOST_LISTED]))
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
        """Release the root."""
        _close_journal(self._hooks)
        lease = self._lease
        if lease is not None and not self._superseded:
            let_go(lease)
            lease.release()
            self._given_back = True
        self._lease, self._taken = None, False
        self._disks.leave()

    def _own_name(self, name: str, step: int) -> str:
        try:
            require_free(self._storage, name)
        except CheckpointExistsError:
            if self._is_made(name, step):
                raise
        else:
            further = self._further.get(name)
            if further is None:
                self._occupied.discard(name)
                return name
            if self.line.is_committed(further, step):
                raise CheckpointExistsError(
                    f"step {step} is committed already, in a further tier of {self._storage.url}, as {name}; "
                    "checkpoints are never overwritten"
                )
        other = run_name(name, self.line.lineage_of(step).id)
        require_free(self._storage, other)
        _logger.warning(
            "%s/%s is occupied by a checkpoint that this run does not continue, or by other files%s: "
            "step %d is saved as %s",
            self._storage.url,
            name,
            ", here or in a further tier" if name in self._further else "",
            step,
            other,
        )
        return other

    def _is_made(self, name: str, step: int) -> bool:
        """Return whether the checkpoint of that name is already this run's save of `step`."""
        try:
            info = Catalog(self._storage).find(name=name)
        except (
            CheckpointNotFoundError,
            CorruptCheckpointError,
            IncompatibleCheckpointError,
            PartialCheckpointError,
        ):
            return False
        return name not in self._damaged and self.line.is_committed(info, step)

    def _acquire(self) -> None:
        with _explained(self._storage.url):
            with suppress(PermissionError):  # of which `check_root` says more
                refuse_as_root(self._storage)  # before its probe: nothing is written there
            self._storage.check_root()
            if self._lease is None:  # else an earlier call acquired it and failed later
                self._lease = _take_lease(self._storage, self._job_name, self._until_idle, _superseding(self))

    def _open(self) -> str:
        """Clean up the root, and read what is there; return an id for this run."""
        with _explained(self._storage.url):
            self.collect_orphans()
            self._occupied = {entry.name for entry in self._storage.list("")}
            self.inventory = Inventory(self._storage, self._hooks.held)
            survey = self.inventory.survey()
            further, present = self._elsewhere(survey)
            self._further = {info.name: info for info in further}
            # Parts, too: to go on before one of them is to leave it, should the rest of it come back.
            self.line.survey([*survey.everything, *survey.parts], present, further)
            code_version()  # now, so that no save waits for git
        return secrets.token_hex(4)

    def collect_orphans(self) -> None:
        """Remove remains of crashed saves and prunes; no save or prune may be in flight."""
        try:
            settle_parts(self._storage.parts)
            orphans = collect_orphans(self._storage, keep=self._hooks.spared())
        except OSError as error:
            # They only take space; the next job tries again.
            _logger.warning("what crashed saves left in %s was not removed: %s", self._storage.url, error)
            return
        if orphans:
            _logger.warning(
                "removed what crashed saves left in %s: %s", self._storage.url, ", ".join(orphans)
            )


def _close_journal(hooks: OwnerHooks) -> None:
    if hooks.journal is not None:
        hooks.journal.close()


def _mark(storage: Storage, lease: Lease, name: str, problem: str) -> None:
    try:
        lease.check()
        Catalog(storage).mark_damaged(name, problem)
    except CorruptCheckpointError:
        return  # without its marker it is no checkpoint any more, and does not count anyway
    except (CheckpointError, OSError) as error:
        _logger.warning("%s/%s is damaged, but could not be marked so: %s", storage.url, name, error)


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
    """Return a function that supersedes an ownership, without keeping it alive."""
    found = weakref.ref(ownership)

    def supersede() -> None:
        alive = found()
        if alive is not None:
            _close_journal(alive._hooks)
            alive._superseded = True

    return supersede


@contextmanager
def _explained(url: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(url, error) from error
