"""The lease of a root: one job writes at a time; a replaced one is fenced."""

from __future__ import annotations

import errno
import json
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import Final, Self, final

from ckpt_core.crew import run_all
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CorruptCheckpointError, RootBusyError
from ckpt_core.names import WRITER
from ckpt_core.storage import Lock, Storage, excludes_others, is_full, read_small

_logger = logger_of(__name__)

_MAX_BYTES: Final = 1 << 16
_MOST_THREADS: Final = 16
_LOCK_FILE: Final = f"{WRITER}.lock"
"""Where a filesystem has the lock; nobody deletes it."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """The owner of a root, as recorded in `writer.json`."""

    id: str
    job: str
    host: str
    pid: int
    started: float

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.started))
        return f"{self.job} (host {self.host}, pid {self.pid}, started {since})"

    @property
    def has_ended(self) -> bool:
        """Whether its process certainly has: it ran on this host, and is not there."""
        if self.host == socket.gethostname() and self.pid > 0:
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return True
            except OSError:
                pass
        return False

    @classmethod
    def here(cls, job: str) -> Owner:
        host, pid = socket.gethostname(), os.getpid()
        return cls(id=secrets.token_hex(8), job=job, host=host, pid=pid, started=time.time())

    @classmethod
    def of(cls, storage: Storage) -> Owner | None:
        """Read who took the root last and has not released it; None if unknown."""
        try:
            content = read_small(storage, WRITER, _MAX_BYTES)
        except (FileNotFoundError, CorruptCheckpointError):
            return None
        try:
            owner = cls(**json.loads(content))
            str(owner)  # a value that cannot be shown was not written by us
        except (ValueError, LookupError, TypeError, OverflowError, OSError, RecursionError):
            return None
        return owner


@final
class Lease:
    """The right to write to a root.

    Where the storage can lock, a second live job is refused. Everywhere, `writer.json` holds the id of the
    newest job, and `check`, called before each commit, stops a job that another has replaced. On object
    stores, and on network filesystems without locks, that is the only fence. Where each node has a disk of
    its own, all of this holds for every disk. Any thread may call any method.

    A disk without room for the record is locked all the same, since only who owns a root can free space
    there; the record follows once there is room.
    """

    def __init__(self, storage: Storage, owner: Owner, lock: Lock) -> None:
        self._storage = storage
        self._locks = [lock]
        self._unrecorded: set[Storage] = set()
        self._locks_a_file = excludes_others(lock) and storage.exists(_LOCK_FILE)
        self.owner = owner

    @classmethod
    def acquire(cls, storage: Storage, job: str) -> Lease:
        """Take the root for the process named `job`; RootBusyError if another holds it."""
        lock = storage.try_lock(WRITER)
        if lock is None:
            raise RootBusyError(_busy(storage))
        lease = cls(storage, Owner.here(job), lock)
        lease._claim(storage)
        return lease

    def extend(self, storage: Storage) -> None:
        """Take the disk of another node, too; errors as by `acquire`."""
        lock = storage.try_lock(WRITER)
        if lock is None:
            raise RootBusyError(f"on the disk of another node, {_busy(storage)}")
        self._locks.append(lock)
        self._claim(storage)

    def _reclaim(self) -> bool:
        """Make the claim again unless another one is there by now."""
        if self._locks_a_file and not self._storage.exists(_LOCK_FILE):
            raise FileNotFoundError(
                errno.ENOENT,
                "what this job has claimed was moved, deleted or unmounted; bring it back, or restart",
                self._storage.url,
            )
        try:
            self._storage.write_bytes(WRITER, self._content)
        except FileExistsError:
            return self.is_held()
        _logger.warning(
            "%s/%s was removed while this job holds the root, and is there again", self._storage.url, WRITER
        )
        return True

    @property
    def _content(self) -> bytes:
        return json.dumps(asdict(self.owner)).encode()

    def _claim(self, storage: Storage) -> None:
        try:
            self._record(storage)
        except BaseException:
            self._locks.pop().release()
            raise

    def _record(self, storage: Storage) -> None:
        """Write the record, or note that there is no room for it."""
        try:
            storage.replace(WRITER, self._content)
        except OSError as error:
            if not is_full(error) or not (excludes_others(self._locks[-1]) or Owner.of(storage) is None):
                raise
            storage.delete(WRITER)  # of a job that has ended: the lock is ours
            self._unrecorded.add(storage.own)
        else:
            self._unrecorded.discard(storage.own)

    def is_held(self) -> bool:
        """Return whether no other job has taken the root since."""
        return all(holder == self.owner for holder in self._holders())

    def _holders(self) -> list[Owner | None]:
        holders: dict[int, Owner | None] = {}
        parts = self._storage.parts

        def look(number: int) -> None:
            awaited = parts[number].own in self._unrecorded
            holders[number] = Owner.of(parts[number])
            if holders[number] is None and awaited:
                self._record(parts[number])
                holders[number] = self.owner

        run_all(look, range(len(parts)), _MOST_THREADS, name="ckpt-group")
        return [holders[number] for number in range(len(parts))]

    def check(self, *, reclaim: bool = False) -> None:
        """Raise RootBusyError if another job has taken the root, or the claim is gone.

        With `reclaim`, a claim that was removed is made again.
        """
        holders = self._holders()
        lost = [number for number, holder in enumerate(holders) if holder != self.owner]
        if not lost:
            return
        holder = holders[lost[0]]
        if holder is None and reclaim and self._reclaim():
            return
        where = self._storage.url if len(holders) == 1 else f"disk {lost[0]} of {self._storage.url}"
        if holder is None:
            raise RootBusyError(
                f"{where} no longer belongs to this job: its claim was removed ({WRITER}, or with it the "
                "directory, the disk or the bucket); this job stopped saving. Bring back what is missing, "
                "make sure that no other job writes there, and restart this one"
            )
        raise RootBusyError(
            f"{where} no longer belongs to this job: it was taken over by {holder}; this job stopped saving. "
            "If this is the job that should continue, stop the other one and restart this one"
        )

    def release(self) -> None:
        try:
            for part, holder in zip(self._storage.parts, self._holders(), strict=True):
                if holder == self.owner:
                    part.delete(WRITER)
        except OSError as error:
            # Harmless: the next job overwrites the claim.
            _logger.warning("could not remove %s/%s: %s", self._storage.url, WRITER, error)
        finally:
            for lock in self._locks:
                lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()


def _busy(storage: Storage) -> str:
    owner = Owner.of(storage)
    if owner is not None and (owner.host, owner.pid) == (socket.gethostname(), os.getpid()):
        return (
            f"{storage.url} is held by {owner.job} in this very process, since "
            f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(owner.started))}: wait until it ends"
        )
    pid = storage.lock_holder(WRITER)
    who = "another live process" if owner is None else str(owner)
    if pid is not None and (owner is None or owner.pid != pid):
        who += f"; the kernel names pid {pid} as the holder of {WRITER}.lock"
    return f"{storage.url} is being written by {who}: wait until it ends, stop it, or save to another root"
