"""A root on several disks: found out, changed on each, read from where a file is."""

from __future__ import annotations

import io
import os
import secrets
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from operator import methodcaller
from typing import IO, Any, Final, TypeVar, final

from typing_extensions import override

from ckpt_core.coordination import Coordinator
from ckpt_core.crew import run_all
from ckpt_core.errors import ConfigError, HalfRenamedError
from ckpt_core.groups._remote_disk import RemoteDisk, serve_disk
from ckpt_core.names import EVERY_GROUP, probe_name, probed_by
from ckpt_core.storage import (
    LocalStorage,
    Lock,
    RangeReader,
    Space,
    Storage,
    StorageEntry,
    open_storage,
    unwritable,
)
from ckpt_core.types import FileEntry

S = TypeVar("S")
T = TypeVar("T")

_MOST_THREADS: Final = 16


def _in_each(operation: str) -> Any:
    """Return a method of `Storage` that every group carries out."""
    return lambda root, *arguments: root._in_all(methodcaller(operation, *arguments))


@final
class GroupedStorage(Storage):
    """The root of a job, on the disk of one group or of several.

    Until `join`, and with one group, every call is the same call of `own`. With several:

    - The coordinator's changes are made in every group. A rename is refused if it cannot be made in each
      group that has the source; if it fails half-way, it raises `HalfRenamedError`.
    - Reads take a file from `own` if it is there, else from the first group that has it.
    - Listings are the union. Free space is that of the group which would be full first, counted as if all
      ranks wrote there.

    A rank's own files are written to `own`, not through this object.

    Concurrency: any thread; `join` and `close` on the main thread.

    Attributes:
        own: the disk of this rank's group.
        patience_seconds: the longest wait for the disk of another group.
    """

    def __init__(self, own: Storage, patience_seconds: float = 900.0) -> None:
        self._own = own
        self.patience_seconds = patience_seconds
        self.supports_rename = own.supports_rename
        self.rereads_from_memory = own.rereads_from_memory
        self._peers: Sequence[Storage] = ()
        self._number = 0
        self._ranks: Sequence[int] = (1,)
        self._names = threading.RLock()

    def join(self, number: int, ranks: Sequence[int], peers: Sequence[Storage]) -> None:
        """Extend the root to the disks of other groups, the `peers`, in order.

        `number` is that of this rank's group, `ranks` how many ranks each has.
        """
        self._number, self._ranks, self._peers = number, ranks, peers
        self.num_disks = len(ranks)

    def leave(self) -> None:
        """Be the own disk again."""
        self._peers, self._number, self._ranks, self.num_disks = (), 0, (1,), 1

    @property
    @override
    def own(self) -> Storage:
        return self._own

    @property
    @override
    def parts(self) -> Sequence[Storage]:
        return [*self._peers[: self._number], self._own, *self._peers[self._number :]]

    @property
    @override
    def url(self) -> str:
        return self._own.url

    check_root = _in_each("check_root")
    replace = _in_each("replace")
    delete = _in_each("delete")
    make_directory = _in_each("make_directory")

    @contextmanager
    def names_held(self) -> Generator[None]:
        """Let no other thread change a name on several disks within the block.

        Every commit, prune and move of a job is a rename or exchange of its coordinator.
        """
        with self._names:
            yield

    @contextmanager
    @override
    def create(self, key: str) -> Generator[IO[bytes]]:
        if not self._peers:
            with self._own.create(key) as stream:
                yield stream
            return
        content = io.BytesIO()
        yield content
        self._in_all(lambda part: part.write_bytes(key, content.getvalue()))

    @override
    def write_pieces(self, key: str, pieces: Iterable[memoryview]) -> None:
        if not self._peers:
            self._own.write_pieces(key, pieces)
            return
        content = [*pieces]
        self._in_all(lambda part: part.write_pieces(key, content))

    @contextmanager
    @override
    def open(self, key: str) -> Generator[IO[bytes]]:
        with ExitStack() as stack:
            yield self._first(lambda part: stack.enter_context(part.open(key)))

    @contextmanager
    @override
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        with ExitStack() as stack:
            yield self._first(lambda part: stack.enter_context(part.open_ranges(key)))

    @override
    def list(self, key: str) -> list[StorageEntry]:
        listings = self._in_all(lambda part: part.list(key))
        found = {entry.name: entry for entries in reversed(listings) for entry in entries}
        return [found[name] for name in sorted(found)]

    @override
    def directories(self, key: str) -> set[str]:
        return set[str]().union(*self._in_all(lambda part: part.directories(key)))

    @override
    def entry(self, key: str) -> StorageEntry | None:
        found = (part.entry(key) for part in (self._own, *self._peers))
        return next((entry for entry in found if entry is not None), None)

    @override
    def size(self, key: str) -> int:
        return self._first(lambda part: part.size(key))

    @override
    def sync_directory(self, key: str) -> None:
        def sync(part: Storage) -> bool:
            with suppress(FileNotFoundError):  # this group has no file in that directory
                part.sync_directory(key)
                return True
            return False

        if not any(self._in_all(sync)):
            self._own.sync_directory(key)

    @override
    def rename(self, source: str, target: str) -> None:
        if not self._peers:
            self._own.rename(source, target)
            return
        with self._names:
            taken = self._in_all(
                lambda part: (part.entry(source) is not None, part.entry(target) is not None)
            )
            holders = [part for part, (has, _) in zip(self.parts, taken, strict=True) if has]
            if not holders:
                raise FileNotFoundError(2, "No such file or directory", f"{self.url}/{source}")
            if any(has and occupied for has, occupied in taken):
                raise FileExistsError(17, "File exists", f"{self.url}/{target}")
            self._all_or_half(holders, lambda part: part.rename(source, target), target)

    @override
    def exchange(self, first: str, second: str) -> None:
        if not self._peers:
            self._own.exchange(first, second)
            return

        def swap(part: Storage) -> None:
            if part.entry(second) is None:
                part.rename(first, second)
            else:
                part.exchange(first, second)

        with self._names:
            self._all_or_half(self.parts, swap, second)

    @override
    def space(self) -> Space:
        return Space(*map(self._least, zip(*self._in_all(lambda part: part.space()), strict=True)))

    @override
    def try_lock(self, key: str) -> Lock | None:
        if not self._peers:
            return self._own.try_lock(key)
        found = self._in_all(lambda part: part.try_lock(key))
        locks = _Locks([lock for lock in found if lock is not None])
        if len(locks.each) < len(found):
            locks.release()
            return None
        return locks

    @override
    def lock_holder(self, key: str) -> int | None:
        return self._own.lock_holder(key)

    @override
    def other_owner(self, key: str) -> str | None:
        return next(filter(None, self._in_all(lambda part: part.other_owner(key))), None)

    @override
    def abandon_uploads(self, unwanted: Callable[[str], bool]) -> Sequence[str]:
        return self._own.abandon_uploads(unwanted)

    def _first(self, act: Callable[[Storage], T]) -> T:
        """Act on the first disk that has the file, this rank's own before others."""
        *others, last = self._own, *self._peers
        for part in others:
            with suppress(FileNotFoundError):
                return act(part)
        return act(last)

    def _in_all(self, act: Callable[[Storage], T]) -> Sequence[T]:
        """Act in every group at the same time; return the results in order.

        Raises the error of the first group that has one, once all have ended.
        """
        return on_each(self.parts, act) if self._peers else [act(self._own)]

    def _all_or_half(self, parts: Sequence[Storage], act: Callable[[Storage], None], target: str) -> None:
        outcomes = _outcomes(parts, act)
        errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        # A connection that was lost leaves open what has happened.
        if errors and (len(errors) < len(outcomes) or any(isinstance(e, ConnectionError) for e in errors)):
            raise HalfRenamedError(
                f"{self.url}/{target} has this name on the disks of {len(outcomes) - len(errors)} of "
                f"{len(outcomes)} nodes ({errors[0]}); the next start of the job settles it"
            ) from errors[0]
        if errors:
            raise errors[0]

    def _least(self, sizes: Sequence[int | None]) -> int | None:
        """Return the space for evenly spread files of all ranks; None if unknown anywhere."""
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes):
            return None
        total = sum(self._ranks)
        return min(size * total // ranks for size, ranks in zip(known, self._ranks, strict=True))


@final
class _Locks:
    def __init__(self, each: Sequence[Lock]) -> None:
        self.each = each

    def release(self) -> None:
        for lock in self.each:
            lock.release()


def _outcomes(parts: Sequence[S], act: Callable[[S], T]) -> list[T | Exception]:
    """Act in these groups at the same time; return results and errors in order."""
    outcomes: dict[int, T | Exception] = {}

    def run(number: int) -> None:
        try:
            outcomes[number] = act(parts[number])
        except Exception as error:  # noqa: BLE001 - the caller raises it when all have ended
            outcomes[number] = error

    run_all(run, range(len(parts)), _MOST_THREADS, name="ckpt-group")
    return [outcomes[number] for number in range(len(parts))]


def on_each(disks: Sequence[S], act: Callable[[S], T]) -> Sequence[T]:
    """Act on each of several disks at the same time; return the results in order.

    Raises the error of the first that has one, once all have ended.
    """
    results: list[T] = []
    for outcome in _outcomes(disks, act):
        if isinstance(outcome, Exception):
            raise outcome
        results.append(outcome)
    return results


def open_root(
    root: str | os.PathLike[str] | Storage,
    storage_options: Mapping[str, Any] | None = None,
    *,
    deadline_seconds: float,
    writers: int | None = None,
) -> Storage:
    """Open a root, which may turn out to be on disks of several nodes.

    ConfigError as `open_storage`, and for `writers` where no thread of ours writes.
    """
    storage = open_storage(root, storage_options, deadline_seconds=deadline_seconds)
    if writers is not None:
        if not isinstance(storage, LocalStorage):
            raise ConfigError(f"leave out writers={writers}: {storage.url} is no local filesystem")
        storage.writers = writers
    # Half, so that the error of a rank reaches the others before their deadline. A bucket is one place.
    return GroupedStorage(storage, deadline_seconds / 2) if storage.supports_rename else storage


def local_part(storage: Storage) -> LocalStorage | None:
    """Return the local directory with all files of a root; None if there is none."""
    own = storage.own
    return own if isinstance(own, LocalStorage) and storage.num_disks == 1 else None


def holders(storage: Storage, directory: str, files: Sequence[FileEntry]) -> tuple[int, ...]:
    """Return the group of each file of a directory, as a manifest has it.

    Empty if the storage has one group; `EVERY_GROUP` for a file that all groups have.
    """
    parts = storage.parts
    if len(parts) == 1:
        return ()
    inner = sorted({entry.path.rpartition("/")[0] for entry in files})

    def names(part: Storage) -> set[str]:
        places = ((place, f"{directory}/{place}" if place else directory) for place in inner)
        return {
            f"{place}/{child.name}" if place else child.name
            for place, key in places
            for child in part.list(key)
        }

    there = on_each(parts, names)
    held = {
        entry.path: [number for number, found in enumerate(there) if entry.path in found] for entry in files
    }
    return tuple(found[0] if len(found) == 1 else EVERY_GROUP for found in held.values())


def form_groups(storage: GroupedStorage, coordinator: Coordinator) -> str:
    """Find which ranks see one another's files, and connect the groups. Collective.

    Every rank leaves a file of no content in its root, then looks whose are there. With several groups the
    root spans their disks after this. Return the ranks of each group, in words.

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
