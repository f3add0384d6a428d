"""What the job that owns a root remembers of it: what is committed is immutable, so that it is read once."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import final

from ckpt_core.commit._catalog import Catalog, Survey, can_count, survey_of
from ckpt_core.commit._lineage import is_same
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError
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
