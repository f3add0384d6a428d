"""What the owner of a root remembers of it: what is there, and what is whole.

Nothing older is deleted in favour of a checkpoint that is not whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Final, TypeAlias, final

from ckpt_core.commit._catalog import Catalog, Survey, arranged, read_all
from ckpt_core.commit._manifest import is_same
from ckpt_core.commit._verify import share, verify
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    FileFailure,
    IncompatibleCheckpointError,
    lost,
)
from ckpt_core.names import can_count
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

_HELD: Final = "its upload has not ended"
_LEAST_AT_ONCE: Final = 1 << 30
_MOST_AT_ONCE: Final = 16 << 30
_STOPS: Final = 8
_MOST_NAMED: Final = 5

_Key: TypeAlias = tuple[str, str, float]


@final
class Inventory:
    """The committed checkpoints of a root, for the one job that commits there.

    A survey costs one listing, the pins and the marks, however many checkpoints there are, because other
    processes may pin, mark and delete meanwhile. A checkpoint of another job is read when it is first seen.

    Concurrency: `droppable` on one thread at a time, the others on any.

    Args:
        held: returns the names of checkpoints that this job needs for now: retention keeps them as if pinned.
        mark: called with the name of a checkpoint found damaged and the problem; by default it is marked.
        watch: entered for each verification; gives what is called with every number of bytes compared.
    """

    def __init__(
        self,
        storage: Storage,
        held: Callable[[], Collection[str]] = tuple,
        *,
        mark: Callable[[str, str], None] | None = None,
        watch: Callable[[CheckpointInfo], AbstractContextManager[Callable[[int], None]]] = lambda _: (
            nullcontext(lambda _size: None)
        ),
    ) -> None:
        self._storage = storage
        self._held = held
        self._catalog = Catalog(storage)
        self._mark = mark or self._catalog.mark_damaged
        self._watch = watch
        self._guard = threading.RLock()
        self._known: dict[str, CheckpointInfo] = {}
        self._foreign: set[str] = set()
        self._size_checked: set[str] = set()
        self._whole: set[_Key] = set()
        self._damaged: dict[_Key, str] = {}
        self._shares_done: dict[_Key, int] = {}
        self.parts: Sequence[CheckpointInfo] = ()
        """What the last survey found only a part of, on the line of this training."""

    def survey(self, *, afresh: bool = False) -> Survey:
        """Return the present content; `afresh` after another job may have owned the root."""
        names = self._storage.directories("")
        with self._guard:
            for name in set(self._known) if afresh else self._known.keys() - names:
                self.forget(name)
            self._foreign = set() if afresh else self._foreign & names
            unknown = sorted(filter(can_count, names - self._known.keys() - self._foreign))
        found, unreadable = read_all(unknown, self._read)
        with self._guard:
            for info in found:
                self._known.setdefault(info.name, info)  # else a save has taken the name since it was read
            infos = list(self._known.values())
        survey = arranged(self._storage, infos, unreadable)
        # Not those of a training that this one does not come from: a user may have forgotten to resume it.
        line = survey.lineage.limits() if survey.parts else {}
        self.parts = [info for info in survey.parts if info.lineage.id in line]
        return survey

    def _read(self, name: str) -> CheckpointInfo:
        try:
            return self._catalog.info(name)
        except CheckpointNotFoundError:
            with self._guard:
                self._foreign.add(name)
            raise

    def history(self) -> list[CheckpointInfo]:
        """Return every committed checkpoint for retention, oldest first.

        On an object store the marker of a job that was replaced may arrive after its objects were deleted.
        Such a checkpoint must not cause another to be pruned, so it is reported as damaged.
        """
        held = self._held()
        return [
            replace(info, pinned=info.pinned or _HELD) if info.name in held else info
            for info in map(self._with_damage, self.survey().everything)
        ]

    def _with_damage(self, info: CheckpointInfo) -> CheckpointInfo:
        """Add the problem that this process knows, also if the mark could not be written."""
        if info.damaged is not None:
            return info
        problem = self._damaged.get(_key(info))
        if problem is None and not self._storage.supports_rename and info.name not in self._size_checked:
            found = self._storage.bytes_below(info.name)
            if found < info.size_bytes:
                problem = f"only {found} of {info.size_bytes} bytes are there"
            else:
                self._size_checked.add(info.name)
        return info if problem is None else replace(info, damaged=problem)

    def note_written(self, info: CheckpointInfo) -> None:
        """Add a checkpoint that this job has committed, in place of one of its name."""
        with self._guard:
            self._known[info.name] = replace(info, pinned=None, damaged=None, bad=None, abandoned=False)
            self._size_checked.add(info.name)
            self._foreign.discard(info.name)

    def forget(self, name: str) -> None:
        """Remove a checkpoint; its directory may remain, with files of the user's."""
        with self._guard:
            self._known.pop(name, None)
            self._size_checked.discard(name)

    def still_there(self, info: CheckpointInfo) -> bool:
        """Ask storage whether the name still leads to that checkpoint."""
        with suppress(CheckpointError):
            if is_same(self._catalog.marker(info.name).info(info.name), info):
                return True
        self.forget(info.name)
        return False

    def vouch(self, info: CheckpointInfo) -> None:
        """Record that a checkpoint is whole: verified, or written by this job."""
        self._whole.add(_key(info))
        self._damaged.pop(_key(info), None)

    def learn(self, info: CheckpointInfo, failures: Sequence[FileFailure]) -> None:
        """Record the result of a verification elsewhere, and set or remove the mark.

        A mark that cannot be written is a warning, and still known to this process.
        """
        problem = "; ".join(map(str, lost(failures)[:_MOST_NAMED]))
        if problem:
            self._distrust(info, problem)
        else:
            self.vouch(info)
        if problem or info.damaged is not None:
            self._catalog.remark(info.name, problem)

    def _distrust(self, info: CheckpointInfo, problem: str) -> None:
        self._whole.discard(_key(info))
        self._damaged[_key(info)] = problem

    def droppable(
        self,
        choose: Callable[[Sequence[CheckpointInfo]], Sequence[CheckpointInfo]],
        *,
        go_on: Callable[[], bool] = lambda: True,
    ) -> Sequence[CheckpointInfo]:
        """Return the deletions of `choose` that leave a whole checkpoint, or none.

        If no remaining checkpoint of the present lineage is known to be whole, the newest ones are verified
        until one is. A damaged one is marked and no longer counts, so that `choose` is called again.

        A deletion that is not in the history is of a checkpoint of which only a part is here. The rest may
        come back, so that one of its step or a newer one must remain whole.

        Args:
            choose: selects what to delete from a history; it must not count marked checkpoints.
            go_on: called from time to time during long verifications; if it returns False, nothing is deleted
                for now.
        """
        while True:
            history = self.history()
            drop = choose(history)
            if not drop:
                return drop
            names, known = {info.name for info in drop}, {info.name for info in history}
            least = max((info.step for info in drop if info.name not in known), default=-1)
            stays = [
                info
                for info in history
                if info.usable and not info.abandoned and info.name not in names and info.step >= least
            ]
            # The newest first: it is the most likely to be known, and there may be thousands.
            if any(_key(info) in self._whole and self.still_there(info) for info in reversed(stays)):
                return drop
            if not stays:
                return ()
            # A partly verified one comes first: otherwise newer ones could keep it from ever being completed.
            candidate = max(stays, key=lambda info: (_key(info) in self._shares_done, info.step))
            if not self._is_judged(candidate, go_on):
                _logger.warning(
                    "%s/%s could not be verified in the time available: nothing older is removed for now",
                    self._storage.url,
                    candidate.name,
                )
                return ()

    def _is_judged(self, info: CheckpointInfo, go_on: Callable[[], bool]) -> bool:
        """Verify a checkpoint, and mark it if damaged; False if `go_on` stopped it."""
        problem, size = "", info.size_bytes
        shares = max(1 + size // _MOST_AT_ONCE, min(_STOPS, 1 + size // _LEAST_AT_ONCE))
        try:
            files = self._catalog.manifest(info.name).originals
            with self._watch(info) as seen:
                for index in range(self._shares_done.pop(_key(info), 0), shares):
                    mine = share(files, index, shares)
                    failures = lost(verify(self._storage, info.name, paths=mine, seen=seen))
                    problem = "; ".join(map(str, failures[:_MOST_NAMED]))
                    if failures:
                        break
                    if index + 1 < shares and not go_on():
                        self._shares_done[_key(info)] = index + 1
                        return False
        except (CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError) as error:
            problem = str(error)
        if not problem:
            self.vouch(info)
            return True
        _logger.error(
            "%s/%s is damaged (%s): it was marked, and older checkpoints are kept in its place",
            self._storage.url,
            info.name,
            problem,
        )
        self._distrust(info, problem)
        self._mark(info.name, problem)
        return True


def _key(info: CheckpointInfo) -> _Key:
    return info.name, info.save_id, info.created
