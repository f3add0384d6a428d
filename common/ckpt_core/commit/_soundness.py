"""Which checkpoints are known to be whole, so that nothing older is deleted in favour of one that is not."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, TypeAlias, final

from ckpt_core.commit._catalog import Catalog, Survey, can_count, survey_of
from ckpt_core.commit._lineage import is_same
from ckpt_core.commit._verify import share, verify
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    IncompatibleCheckpointError,
)
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo


@final
class Inventory:
    """The committed checkpoints of a root, for the one job that commits there.

    A look at them takes one listing, the pins and the marks, however many there are: other processes may pin,
    mark and delete meanwhile. What the owner did not write it reads when it first sees it.

    Concurrency: any thread.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._catalog = Catalog(storage)
        self._guard = threading.Lock()
        self._known: dict[str, CheckpointInfo] = {}
        self._foreign: set[str] = set()
        self._weighed: set[str] = set()

    def survey(self) -> Survey:
        """What is in the root now; see `Catalog.survey`."""
        children = self._storage.list("")
        with self._guard:
            # Names that are known need no second look, which counts where there are thousands.
            names = [
                child.name
                for child in children
                if child.is_directory
                and not child.is_link
                and (child.name in self._known or can_count(child.name))
            ]
            self._known = known = {name: self._known[name] for name in names if name in self._known}
            self._foreign.intersection_update(names)
            self._weighed.intersection_update(names)
        return survey_of(self._storage, names, lambda name: known.get(name) or self._read(name))

    def history(self) -> list[CheckpointInfo]:
        """Every committed checkpoint, abandoned ones, too, oldest step first, as retention may count them.

        On an object store the marker of a job that was replaced may arrive after the objects that it stands
        for were cleared away. Such a checkpoint must not be why another is pruned: it is said to be damaged.
        """
        infos = self.survey().everything
        return infos if self._storage.supports_rename else [self._as_found(info) for info in infos]

    def add(self, info: CheckpointInfo) -> None:
        """This job has committed it."""
        with self._guard:
            self._known[info.name] = replace(info, pinned=None, damaged=None, bad=None)
            self._foreign.discard(info.name)
            self._weighed.add(info.name)

    def forget(self, name: str) -> None:
        """It is no checkpoint any more; a directory with files of the user's may have stayed."""
        with self._guard:
            self._known.pop(name, None)
            self._weighed.discard(name)

    def still_there(self, info: CheckpointInfo) -> bool:
        """Whether its name leads to that checkpoint still; this is asked of storage."""
        try:
            same = is_same(self._catalog.marker(info.name).info(info.name), info)
        except (CheckpointNotFoundError, CheckpointError):
            same = False
        if not same:
            self.forget(info.name)
        return same

    def _read(self, name: str) -> CheckpointInfo:
        with self._guard:
            known, foreign = self._known.get(name), name in self._foreign
        if known is not None:
            return known
        if foreign:
            raise CheckpointNotFoundError(f"{self._storage.url}/{name} holds no committed checkpoint")
        try:
            info = self._catalog.marker(name).info(name)
        except CheckpointNotFoundError:
            with self._guard:
                self._foreign.add(name)
            raise
        with self._guard:
            return self._known.setdefault(name, info)

    def _as_found(self, info: CheckpointInfo) -> CheckpointInfo:
        with self._guard:
            weighed = info.name in self._weighed
        if weighed or info.damaged is not None:
            return info
        found = _bytes_below(self._storage, info.name)
        if found < info.size_bytes:
            return replace(info, damaged=f"only {found} of {info.size_bytes} bytes are there")
        with self._guard:
            self._weighed.add(info.name)
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


@final
class Soundness:
    """What this process has verified, to the last byte, and what it has found damaged.

    Concurrency: `droppable` on one thread at a time, the others on any.

    Args:
        storage: the root.
        mark: told the name of what is damaged, and what is wrong with it.
    """

    def __init__(self, storage: Storage, mark: Callable[[str, str], None]) -> None:
        self._storage = storage
        self._mark = mark
        self._whole: set[_Key] = set()
        self._damaged: dict[_Key, str] = {}
        self._shares_done: dict[_Key, int] = {}

    def vouch(self, info: CheckpointInfo) -> None:
        """It has been verified, or is to be taken for whole."""
        self._whole.add(_key(info))
        self._damaged.pop(_key(info), None)

    def learn(self, info: CheckpointInfo, problem: str) -> None:
        """It was verified elsewhere: mark it if there is a problem, else take a mark away.

        Raises:
            CheckpointError: the marks were written by a newer version.
            OSError: the marks cannot be written; what was found is known to this process all the same.
        """
        catalog = Catalog(self._storage)
        if not problem:
            self.vouch(info)
            if info.damaged is not None:
                catalog.unmark(info.name)
            return
        self._distrust(info, problem)
        with suppress(CheckpointNotFoundError, CorruptCheckpointError):  # then it counts for nobody as it is
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
        """What may be deleted of what `choose` would delete: nothing, if nothing that stays is whole.

        If none that stays and is of the present lineage is known to be whole, the newest of them are verified
        until one is. What is damaged is marked and counts for nothing, so that `choose` is asked again.

        Args:
            inventory: of the root.
            choose: what should go of a history; it must not count what is marked.
            go_on: asked from time to time while much is being read; if not, all stays for now.
        """
        while True:
            history = inventory.history()
            if self._damaged:
                history = [self._judged(info) for info in history]
            drop = choose(history)
            names = {info.name for info in drop}
            stays = [
                info for info in history if info.usable and not info.abandoned and info.name not in names
            ]
            # The newest first: it is the most likely to be known, and there may be thousands.
            if not drop or any(
                _key(info) in self._whole and inventory.still_there(info) for info in reversed(stays)
            ):
                return drop
            if not stays:
                return ()
            # What has been read in part before comes first: else one that is always overtaken is never whole.
            candidate = max(stays, key=lambda info: (_key(info) in self._shares_done, info.step))
            if self._is_whole(candidate, go_on) is None:
                _logger.warning(
                    "%s/%s could not be verified in the time there was: nothing older is removed for now",
                    self._storage.url,
                    candidate.name,
                )
                return ()

    def _judged(self, info: CheckpointInfo) -> CheckpointInfo:
        """The checkpoint with what is known of it, also if the mark could not be written."""
        problem = self._damaged.get(_key(info))
        return info if problem is None or info.damaged is not None else replace(info, damaged=problem)

    def _is_whole(self, info: CheckpointInfo, go_on: Callable[[], bool]) -> bool | None:
        """Whether it verifies; None if it was not allowed to end. What does not is marked."""
        try:
            files = Catalog(self._storage).manifest(info.name).files
        except (CheckpointNotFoundError, CorruptCheckpointError, IncompatibleCheckpointError) as error:
            return self._tell(info, str(error))
        shares = max(1 + info.size_bytes // _MOST_AT_ONCE, min(_STOPS, 1 + info.size_bytes // _LEAST_AT_ONCE))
        for place in range(self._shares_done.pop(_key(info), 0), shares):
            failures = verify(self._storage, info.name, paths=share(files, place, shares))
            if failures:
                return self._tell(info, "; ".join(map(str, failures[:5])))
            if place + 1 < shares and not go_on():
                self._shares_done[_key(info)] = place + 1
                return None
        self.vouch(info)
        return True

    def _tell(self, info: CheckpointInfo, problem: str) -> bool:
        _logger.error(
            "%s/%s is damaged (%s): it is marked, and what is older is kept in its place",
            self._storage.url,
            info.name,
            problem,
        )
        self._distrust(info, problem)
        self._mark(info.name, problem)
        return False


def _key(info: CheckpointInfo) -> _Key:
    return info.name, info.save_id, info.created
