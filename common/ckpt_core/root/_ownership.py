"""The right to write to a root, taken before the first byte; lineages of saves."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias, final

from ckpt_core.commit import (
    Catalog,
    Inventory,
    Lease,
    Marker,
    Owner,
    Survey,
    collect_orphans,
    is_name,
    next_lineage,
    on_present_line,
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
    CoordinationError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    PartialCheckpointError,
    RootBusyError,
    lost,
)
from ckpt_core.groups import GroupedStorage, form_groups
from ckpt_core.journal import Journal
from ckpt_core.names import incomplete_name, is_incomplete, is_trash, original_name, run_name
from ckpt_core.provenance import code_version
from ckpt_core.storage import Storage, unwritable
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CheckpointInfo, Lineage, Parent

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

    With one shared disk that is one exchange. The storage spans all disks afterwards. `owner_id` is of the
    claim that the coordinator has just written to its root; there `claim` is called with each further disk,
    and `survey` in the end.
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
        coordinator.commit_channel().broadcast(topic, lambda: None, deadline_seconds=storage.patience_seconds)
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
                original, save_id = original_name(name), _save_id(part, name)
                for other in others if save_id is not None else ():
                    if _save_id(other, original) == save_id:
                        other.rename(original, name)
                        other.sync_directory("")


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


def _save_id(storage: Storage, directory: str) -> str | None:
    """Return the id of the complete save in a directory; None without one."""
    try:
        return Marker.read(storage, directory).save_id
    except (FileNotFoundError, NotADirectoryError, CheckpointError):
        return None


Elsewhere: TypeAlias = Callable[[Survey], tuple[Sequence[CheckpointInfo], Lineage]]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The job that a manager serves: its root, its ranks, and who hears of it."""

    storage: Storage
    coordinator: Coordinator
    telemetry: Telemetry


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
        line: the lineage of the live state; valid on the coordinator only, like the inventory.
        inventory: the committed checkpoints in the root, and which of them are known to be whole.

    Args:
        until_idle: blocks until no save is in flight; must keep nothing large alive.
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
        until_idle: Callable[[], None] = lambda: None,
        hooks: OwnerHooks | None = None,
        elsewhere: Elsewhere = lambda survey: ((), survey.lineage),
    ) -> None:
        self._hooks = hooks or OwnerHooks()
        self._elsewhere = elsewhere
        self._further: dict[str, CheckpointInfo] = {}
        self.until_idle = until_idle
        self._superseded = False
        self._storage = storage
        self._coordinator = coordinator
        self._lease: Lease | None = None
        self._taken = self._given_back = False
        self._damaged: set[str] = set()
        self._occupied: set[str] = set()
        self._prefix = self._owner_id = ""
        self.inventory = Inventory(
            storage, self._hooks.held, mark=lambda name, problem: self.note_damaged({name: problem})
        )
        self.line = Ancestry(storage.url)

    def take(self) -> None:
        """Claim the root, unless claimed already, and remove the remains of crashed saves.

        Raises:
            ConfigError: the root cannot be written, or is not the same for all ranks.
            RootBusyError: another live job writes to it.
        """
        if self._taken:
            return

        def acquire(urls: list[str]) -> list[tuple[str, list[str]]]:
            with _explained(self._storage.url):
                with suppress(PermissionError):  # of which `check_root` says more
                    refuse_as_root(self._storage)  # before its probe: nothing is written there
                self._storage.check_root()
                if self._lease is None:  # else an earlier call acquired it and failed later
                    self._lease = _take_lease(self, self._storage)
            return [(self._lease.owner.id, urls)] * len(urls)

        owner_id, urls = self._coordinator.gather_scatter(self._storage.url, acquire, what="taking the root")
        self._owner_id = owner_id
        try:
            lease = self._lease
            self._prefix = find_disks(
                self._storage,
                self._coordinator,
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

        Unless it is to `replace` a committed checkpoint of that name, it gets one of its lineage where an
        abandoned or unusable one has the name.
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
        self._occupied.add(info.name)
        self.inventory.note_written(info)
        self.line.record_commit(info)

    def note_damaged(self, damaged: Mapping[str, str]) -> None:
        """Remember damaged checkpoints: a later save of the same name replaces them.

        The coordinator marks them, name -> problem, for users and later jobs, if the root is this job's. A
        mark that cannot be written is a warning: training does not depend on it.
        """
        self._damaged |= set(damaged)
        if (lease := self._lease) is not None:
            for name, problem in damaged.items():
                Catalog(self._storage).remark(name, problem, check=lease.check)

    def note_sound(self, name: str) -> None:
        """Undo `note_damaged` for a checkpoint that verifies after all."""
        self._damaged.discard(name)
        if (lease := self._lease) is not None:
            Catalog(self._storage).remark(name, "", check=lease.check)

    def note_verified(self, info: CheckpointInfo, failures: Sequence[FileFailure]) -> None:
        """Set or remove the mark of a checkpoint that a user verified, in any job's root."""
        if lost(failures):
            self._damaged.add(info.name)
        else:
            self._damaged.discard(info.name)
        self.inventory.learn(info, failures)

    def release(self) -> None:
        self._close_journal()
        lease = self._lease
        if lease is not None and not self._superseded:
            _held.pop(lease.owner.id, None)
            lease.release()
            self._given_back = True
        self._lease, self._taken = None, False
        leave_disks(self._storage, self._coordinator, self._owner_id)

    def _close_journal(self) -> None:
        if self._hooks.journal is not None:
            self._hooks.journal.close()

    def _own_name(self, name: str, step: int) -> str:
        """Return `name`, or one of this lineage where another one's checkpoint has it."""
        try:
            require_free(self._storage, name)
        except CheckpointExistsError:
            if name not in self._damaged and self._is_made(name, step):
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
        unreadable = (CorruptCheckpointError, IncompatibleCheckpointError, PartialCheckpointError)
        with suppress(CheckpointNotFoundError, *unreadable):
            return self.line.is_committed(Catalog(self._storage).find(name=name), step)
        return False

    def _open(self) -> str:
        """Clean up the root, and read what is there; return an id for this run."""
        with _explained(self._storage.url):
            self.collect_orphans()
            self._occupied = {entry.name for entry in self._storage.list("")}
            # Parts, too: to go on before one of them is to leave it, should the rest of it come back.
            survey = self.inventory.survey(afresh=True)
            further, present = self._elsewhere(survey)
            self._further = {info.name: info for info in further}
            self.line.survey([*survey.everything, *survey.parts], further, present)
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


@final
class Ancestry:
    """The lineage of the live state.

    Concurrency: `record_commit` on any thread, but not during another call for the first save after a load;
    the other methods on the main thread.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: dict[str, CheckpointInfo] = {}
        self._further: Sequence[CheckpointInfo] = ()
        self._present = Lineage()
        self._origin: CheckpointInfo | None = None
        self._elsewhere: Parent | None = None
        self._own: Lineage | None = None
        self._on_purpose = self._branch = False

    def survey(
        self, infos: Sequence[CheckpointInfo], further: Sequence[CheckpointInfo], present: Lineage
    ) -> None:
        """Record what is in the root, which this job has taken, and only in further tiers.

        What is pruned here later stays known, because a tier may have it.
        """
        self._known, self._further, self._present = {info.name: info for info in infos}, further, present

    def continue_from(self, info: CheckpointInfo, *, branch: bool = False) -> None:
        """Note that the live state is that of this checkpoint: it was loaded as a whole.

        With `branch` the training differs from now on, so that its saves begin a lineage of their own.
        """
        self._origin, self._elsewhere, self._own = info, None, None
        self._on_purpose, self._branch = False, branch

    def start_afresh(self) -> None:
        """Note that the live state continues no checkpoint, as the user intends."""
        self._origin = self._own = None
        self._on_purpose = True

    def begin_from(self, parent: Parent | None) -> None:
        """Note that the live state was loaded from another root, if it was.

        That is the parent of the next commit, and changes nothing in the lineages of this root.
        """
        if parent is not None:
            self._elsewhere = replace(parent, elsewhere=True)

    @property
    def parent(self) -> Parent | None:
        return self._elsewhere or (None if self._origin is None else Parent.of(self._origin))

    def lineage_of(self, step: int) -> Lineage:
        """Return the lineage of a save made now; a new one unless it continues the newest."""
        if self._own is None:
            known = [*self._known.values(), *self._further]
            self._own, begun = next_lineage(known, self._present, self._origin, step, branch=self._branch)
            if begun and known:
                self._log(step, self._own, known)
        return self._own

    def record_commit(self, info: CheckpointInfo) -> None:
        """Record a committed save of this job, which the live state continues."""
        self._known[info.name] = info
        self._origin, self._present, self._elsewhere = info, info.lineage, None

    def is_committed(self, info: CheckpointInfo, step: int) -> bool:
        """Return whether the checkpoint `info` is already this lineage's save of `step`."""
        return info.usable and self.lineage_of(step).includes(info.lineage, info.step)

    def _log(self, step: int, lineage: Lineage, known: Sequence[CheckpointInfo]) -> None:
        abandoned = [info for info in on_present_line(known, lineage) if info.abandoned]
        if self._origin is None:
            _logger.log(
                logging.INFO if self._on_purpose else logging.WARNING,
                "starting afresh in %s, which holds %d checkpoint(s) of an earlier run, up to step %d: they "
                "are abandoned from the commit of step %d on, and stay, or are removed one by one with "
                'abandoned="prune". To continue from them instead, stop, and resume the newest before the '
                "first save",
                self._url,
                len(known),
                max(info.step for info in known),
                step,
            )
        elif abandoned:
            _logger.warning(
                "going back to step %d of %s: %d checkpoint(s) that are not before it (%s) are abandoned "
                "from the commit of step %d on",
                self._origin.step,
                self._url,
                len(abandoned),
                ", ".join(info.name for info in abandoned[-5:]),
                step,
            )


@dataclass(frozen=True, slots=True)
class _Holding:
    """A root that a manager of this process holds, without keeping that alive."""

    lease: Lease
    until_idle: Callable[[], None]
    owner: weakref.ref[Ownership]
    pid: int
    """A forked child inherits the table, but none of the roots."""


_taking: Final = threading.RLock()
_held: dict[str, _Holding] = {}


def _take_lease(ownership: Ownership, storage: Storage) -> Lease:
    """Take a root, also from this process's earlier manager, once that is idle."""
    with _taking:
        found = Owner.of(storage)
        earlier = None if found is None else _held.get(found.id)
        if earlier is not None and earlier.pid == os.getpid():
            earlier.until_idle()
            if (alive := earlier.owner()) is not None:
                alive._close_journal()
                alive._superseded = True
            _held.pop(earlier.lease.owner.id, None)
            earlier.lease.release()
            _logger.warning(
                "%s was held by an earlier CheckpointManager of this process, which was not closed: it is "
                "taken over, and the earlier one cannot save any more",
                storage.url,
            )
        lease = Lease.acquire(storage, Path(next(iter(sys.argv), "")).name or "python")
        _held[lease.owner.id] = _Holding(lease, ownership.until_idle, weakref.ref(ownership), os.getpid())
    return lease


@contextmanager
def _explained(url: str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(url, error) from error
