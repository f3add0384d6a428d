"""The checkpoints known to be whole, and the inventory that pruning relies on.

Nothing older is deleted in favour of a checkpoint that is not whole.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Final, TypeAlias, final

from ckpt_core.commit._catalog import (
    Arranged,
    Catalog,
    Survey,
    arrange,
    read_all,
    with_remarks,
)
from ckpt_core.commit._lineage import by_step, is_same
from ckpt_core.commit._manifest import whole_info
from ckpt_core.commit._verify import share, verify
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
    lost,
)
from ckpt_core.names import can_count
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo, FileEntry

HELD: Final = "its upload has not ended"


@final
class Inventory:
    """The committed checkpoints of a root, for the one job that commits there.

    A survey costs one listing, the pins and the marks, however many checkpoints there are, because other
    processes may pin, mark and delete meanwhile. A checkpoint of another job is read when it is first seen.
    What is known stays arranged, so that names which appeared or disappeared are all that a survey works on.

    Concurrency: any thread.

    Args:
        storage: the root.
        held: returns the names of checkpoints that this job needs for now: retention keeps them as if pinned.
    """

    def __init__(self, storage: Storage, held: Callable[[], Collection[str]] = tuple) -> None:
        self._storage = storage
        self._held = held
        self._catalog = Catalog(storage)
        self._guard = threading.RLock()
        self._known: dict[str, CheckpointInfo] = {}
        self._arranged: Arranged | None = None
        self._foreign: set[str] = set()
        self._size_checked: set[str] = set()
        self._parts: Sequence[CheckpointInfo] = ()

    @property
    def parts(self) -> Sequence[CheckpointInfo]:
        """What the last survey found only a part of, on the line of this training."""
        return self._parts

    def survey(self) -> Survey:
        """Return the present content of the root; see `Catalog.survey`."""
        names = self._storage.directories("")
        with self._guard:
            for name in self._known.keys() - names:
                self.forget(name)
            self._foreign &= names
            unknown = sorted(filter(can_count, names - self._known.keys() - self._foreign))
        found, unreadable = read_all(unknown, self._read)
        with self._guard:
            for info in found:
                if info.name not in self._known:  # else a save has taken the name since it was read
                    self.add(info)
        survey = with_remarks(self._storage, self._arrange(unreadable), unreadable)
        # Not those of a training that this one does not come from: a user may have forgotten to resume it.
        line = survey.lineage.limits() if survey.parts else {}
        self._parts = [info for info in survey.parts if info.lineage.id in line]
        return survey

    def history(self) -> list[CheckpointInfo]:
        """Return every committed checkpoint for retention, oldest first.

        On an object store the marker of a job that was replaced may arrive after its objects were deleted.
        Such a checkpoint must not cause another to be pruned, so it is reported as damaged.
        """
        infos, held = self.survey().everything, self._held()
        if held:
            infos = [
                replace(info, pinned=info.pinned or HELD) if info.name in held else info for info in infos
            ]
        if self._storage.supports_rename:
            return infos
        return [info if info.name in self._size_checked else self._with_size_checked(info) for info in infos]

    def add(self, info: CheckpointInfo) -> None:
        """Add a committed checkpoint; the one that had its name, if any, is replaced."""
        info = replace(info, pinned=None, damaged=None, bad=None, abandoned=False)
        with self._guard:
            arranged = self._arranged
            if arranged is None or info.name in self._known or info.lineage != arranged.lineage:
                self._arranged = None
            else:
                insort(arranged.infos, info, key=by_step)
            self._known[info.name] = info
            self._foreign.discard(info.name)

    def note_written(self, info: CheckpointInfo) -> None:
        """Add a checkpoint that this job has committed, so that all of it is there."""
        self._size_checked.add(info.name)
        self.add(info)

    def forget(self, name: str) -> None:
        """Remove a checkpoint; its directory may remain, with files of the user's."""
        with self._guard:
            gone, arranged = self._known.pop(name, None), self._arranged
            self._size_checked.discard(name)
            if gone is None or arranged is None:
                return
            present = arranged.lineage
            left = [info for info in arranged.infos if info.name != name]
            ids = {info.lineage.id for info in left if info.lineage.number == present.number}
            # Otherwise another lineage may be the present one now.
            self._arranged = Arranged(infos=left, lineage=present) if ids == {present.id} else None

    def still_there(self, info: CheckpointInfo) -> bool:
        """Ask storage whether the name still leads to that checkpoint."""
        try:
            same = is_same(self._catalog.marker(info.name).info(info.name), info)
        except (CheckpointNotFoundError, CheckpointError):
            same = False
        if not same:
            self.forget(info.name)
        return same

    def _arrange(self, unreadable: Collection[str]) -> Arranged:
        """Return the known checkpoints in order, as a copy."""
        with self._guard:
            if unreadable:
                return arrange(self._storage, list(self._known.values()), unreadable)
            if self._arranged is None:
                self._arranged = arrange(self._storage, list(self._known.values()))
            return replace(self._arranged, infos=list(self._arranged.infos))

    def _read(self, name: str) -> CheckpointInfo:
        try:
            return whole_info(self._storage, name, self._catalog.marker(name))
        except CheckpointNotFoundError:
            with self._guard:
                self._foreign.add(name)
            raise

    def _with_size_checked(self, info: CheckpointInfo) -> CheckpointInfo:
        if info.damaged is not None:
            return info
        found = _bytes_below(self._storage, info.name)
        if found < info.size_bytes:
            return replace(info, damaged=f"only {found} of {info.size_bytes} bytes are there")
        self._size_checked.add(info.name)
        return info


def _bytes_below(storage: Storage, directory: str) -> int:
    return sum(
        _bytes_below(storage, f"{directory}/{child.name}") if child.is_directory else child.size_bytes
        for child in storage.list(directory)
    )


_logger = logger_of(__name__)

_LEAST_AT_ONCE: Final = 1 << 30
_MOST_AT_ONCE: Final = 16 << 30
_STOPS: Final = 8

_Key: TypeAlias = tuple[str, str, float]


def _unwatched(_info: CheckpointInfo) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda _size: None)


@final
class Soundness:
    """The checkpoints that this process has verified in full or found damaged.

    Concurrency: `droppable` on one thread at a time, the others on any.

    Args:
        storage: the root.
        mark: called with the name of a damaged checkpoint and the problem.
        watch: entered for each verification; gives what is called with every number of bytes compared.
    """

    def __init__(
        self,
        storage: Storage,
        mark: Callable[[str, str], None],
        *,
        watch: Callable[[CheckpointInfo], AbstractContextManager[Callable[[int], None]]] = _unwatched,
    ) -> None:
        self._storage = storage
        self._mark = mark
        self._watch = watch
        self._whole: set[_Key] = set()
        self._damaged: dict[_Key, str] = {}
        self._shares_done: dict[_Key, int] = {}

    def vouch(self, info: CheckpointInfo) -> None:
        """Record that a checkpoint is whole: verified, or written by this job."""
        self._whole.add(_key(info))
        self._damaged.pop(_key(info), None)

    def learn(self, info: CheckpointInfo, problem: str) -> None:
        """Record the result of a verification elsewhere, and set or remove the mark.

        Raises:
            CheckpointError: the marks were written by a newer version.
            OSError: the marks cannot be written; this process remembers the result all the same.
        """
        catalog = Catalog(self._storage)
        if not problem:
            self.vouch(info)
            if info.damaged is not None:
                catalog.unmark(info.name)
            return
        self._distrust(info, problem)
        with suppress(CheckpointNotFoundError, CorruptCheckpointError):  # then it does not count anyway
            catalog.mark_damaged(info.name, problem)

    def _distrust(self, info: CheckpointInfo, problem: str) -> None:
        self._whole.discard(_key(info))
        self._damaged[_key(info)] = problem

    def droppable(
        self,
        inventory: Inventory,
        choose: Callable[[Sequence[CheckpointInfo]], Sequence[CheckpointInfo]],
        *,
        go_on: Callable[[], bool] = lambda: True,
    ) -> Sequence[CheckpointInfo]:
        """Return the deletions of `choose` that leave a whole checkpoint, or none.

        If no remaining checkpoint of the present lineage is known to be whole, the newest ones are verified
        until one is. A damaged one is marked and no longer counts, so that `choose` is called again.

        A deletion that is not in the history is of a checkpoint of which only a part is here. The rest may
        come back, so that one newer than it must remain whole.

        Args:
            inventory: of the root.
            choose: selects what to delete from a history; it must not count marked checkpoints.
            go_on: called from time to time during long verifications; if it returns False, nothing is deleted
                for now.
        """
        while True:
            history = inventory.history()
            if self._damaged:
                history = [self._with_known_damage(info) for info in history]
            drop = choose(history)
            if not drop:
                return drop
            names, known = {info.name for info in drop}, {info.name for info in history}
            least = max((info.step for info in drop if info.name not in known), default=-1)
            stays = [
                info
                for info in history
                if info.usable and not info.abandoned and info.name not in names and info.step > least
            ]
            # The newest first: it is the most likely to be known, and there may be thousands.
            if any(_key(info) in self._whole and inventory.still_there(info) for info in reversed(stays)):
                return drop
            if not stays:
                return ()
            # A partly verified one comes first: otherwise newer ones could keep it from ever being completed.
            candidate = max(stays, key=lambda info: (_key(info) in self._shares_done, info.step))
            if self._is_whole(candidate, go_on) is None:
                _logger.warning(
                    "%s/%s could not be verified in the time available: nothing older is removed for now",
                    self._storage.url,
                    candidate.name,
                )
                return ()

    def _with_known_damage(self, info: CheckpointInfo) -> CheckpointInfo:
        """Add the problem that this process knows, also if the mark could not be written."""
        problem = self._damaged.get(_key(info))
        return info if problem is None or info.damaged is not None else replace(info, damaged=problem)

    def _is_whole(self, info: CheckpointInfo, go_on: Callable[[], bool]) -> bool | None:
        """Verify a checkpoint and mark it if damaged; None if `go_on` stopped it."""
        try:
            files = Catalog(self._storage).manifest(info.name).originals
        except (CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError) as error:
            return self._report_damage(info, str(error))
        with self._watch(info) as seen:
            return self._compare(info, files, go_on, seen=seen)

    def _compare(
        self,
        info: CheckpointInfo,
        files: Sequence[FileEntry],
        go_on: Callable[[], bool],
        *,
        seen: Callable[[int], None],
    ) -> bool | None:
        shares = max(1 + info.size_bytes // _MOST_AT_ONCE, min(_STOPS, 1 + info.size_bytes // _LEAST_AT_ONCE))
        for index in range(self._shares_done.pop(_key(info), 0), shares):
            failures = lost(verify(self._storage, info.name, paths=share(files, index, shares), seen=seen))
            if failures:
                return self._report_damage(info, "; ".join(map(str, failures[:5])))
            if index + 1 < shares and not go_on():
                self._shares_done[_key(info)] = index + 1
                return None
        self.vouch(info)
        return True

    def _report_damage(self, info: CheckpointInfo, problem: str) -> bool:
        _logger.error(
            "%s/%s is damaged (%s): it was marked, and older checkpoints are kept in its place",
            self._storage.url,
            info.name,
            problem,
        )
        self._distrust(info, problem)
        self._mark(info.name, problem)
        return False


def _key(info: CheckpointInfo) -> _Key:
    return info.name, info.save_id, info.created
