"""The repair of one checkpoint on the disks of several nodes.

A disk keeps what is whole there. What it lacks is copied beside its part, compared with the manifest on the
way, and takes its place file by file; a disk without a part gets one, in one step. So after a kill at any
point every disk has at least what it had, every file is the one committed, and the next resume finds the
rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import final

from ckpt_core.commit import working_name
from ckpt_core.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckpt_core.groups import GroupedStorage, on_each
from ckpt_core.names import EVERY_GROUP, MARKER
from ckpt_core.storage import Storage
from ckpt_core.tiers._checked_reader import damaged
from ckpt_core.tiers._copy import CheckpointCopy, CopyTerms, begin_copy
from ckpt_core.tiers.repairing._disk_parts import CannotRepairError, DiskPart, PartLook
from ckpt_core.types import CheckpointInfo, FileEntry


@final
class PartsRepair:
    """The repair of one checkpoint on the disks of several nodes.

    `look` finds what is to be done, then `run` does it. The caller owns the root.

    Attributes:
        working: the directory on each disk that files are copied into.

    Args:
        root: on the disks of several nodes.
        info: the checkpoint.
        sources: further roots with equal copies, the nearest first.
        stop: called before every step; raises to end the repair.

    Raises:
        CorruptCheckpointError: its manifest is not to be found.
    """

    def __init__(
        self, root: GroupedStorage, info: CheckpointInfo, sources: Sequence[Storage], stop: Callable[[], None]
    ) -> None:
        self._root = root
        self._name = info.name
        self._sources = sources
        self._look = PartLook(root.parts, info, sources, stop)
        self._manifest = self._look.manifest
        self._twins = {path: twin.path for path, twin in self._manifest.twins().items()}
        self._twins |= {twin: path for path, twin in self._twins.items()}
        self.working = working_name(root, info.name, info.save_id)
        self._parts: Sequence[DiskPart] = ()
        self._homes: Mapping[int, int] = {}

    @property
    def is_needed(self) -> bool:
        """Whether a disk lacks anything."""
        return any(part.lacks_any for part in self._parts)

    @property
    def size_bytes(self) -> int:
        """The bytes to be copied."""
        return sum(part.size_bytes for part in self._parts)

    def look(self, suspects: Collection[str] | None) -> None:
        """Find what each disk lacks; see `PartLook.at`.

        Raises:
            CannotRepairError: a disk has something else under that name, or the checkpoint was saved in one
                place and is not whole.
            OSError: a disk failed, or its node was lost.
        """
        self._parts = on_each(self._root.parts, lambda disk: self._look.at(disk, suspects))
        self._homes = _homes([*self._look.files()], self._parts)
        for entry, group in self._look.files():
            wrong = [part for part in self._parts if entry.path in part.wrong]
            lacking = [part for part in self._parts if entry.path not in part.whole]
            if group == EVERY_GROUP:
                wrong = lacking
            elif not wrong and len(lacking) == len(self._parts):
                wrong = [self._parts[self._homes[group]]]
            for part in wrong:
                part.wanted.append(entry)
        if not self._manifest.groups:
            if self.size_bytes:
                raise CannotRepairError("it was saved in one place: no file belongs to the disk of a node")
            self._parts = ()

    def crowded(self, headroom: Callable[[int | None], int]) -> str:
        """Return which disk has too little room for this and for a save like it, or "".

        Args:
            headroom: returns the bytes to be left free on a disk of a size.
        """
        for number, part in enumerate(self._parts):
            saved = (
                entry.size_bytes
                for entry, group in self._look.files()
                if self._homes.get(group, number) == number
            )
            free, total, _ = part.disk.space()
            needed = part.size_bytes + sum(saved) + headroom(total)
            if part.wanted and free is not None and free < needed:
                return (
                    f"it would take room that the next save needs on the disk of node {number} "
                    f"({free} of {needed} bytes are free)"
                )
        return ""

    def run(self, terms: CopyTerms, *, check: Callable[[], None]) -> None:
        """Copy what is lacking, and put it in its place.

        Args:
            terms: of the copy.
            check: called before anything gets a name that counts; raises to end the repair.

        Raises:
            CorruptCheckpointError: no copy of a file is whole.
            CheckpointNotFoundError: the checkpoint, or its copy, was pruned or replaced meanwhile.
            OSError: a disk or a source failed, or a node was lost.
        """
        for part in self._parts:
            if part.wanted or not part.there:
                self._copy(part, terms)
        check()
        # No save or prune of this job may give the name to another directory between look and change.
        with self._root.names_held():
            on_each(self._parts, self._require_unchanged)
            on_each([part for part in self._parts if part.there and part.lacks_any], self._put)
        if new := [part for part in self._parts if not part.there]:
            on_each(new, self._complete)
            with self._root.names_held():
                on_each(self._parts, self._require_unchanged)
                self._root.rename(self.working, self._name)
            self._root.sync_directory("")

    def _copy(self, part: DiskPart, terms: CopyTerms) -> None:
        """Copy what a disk lacks into the working directory on it."""
        begin_copy(part.disk, self._name, self._manifest, self._look.beside, repair=True)
        damage: CorruptCheckpointError | None = None
        left: Sequence[FileEntry] = part.wanted
        for place, known in self._places():
            share = [entry for entry in left if known is None or self._is_among(entry, known)]
            if not share:
                continue
            try:
                CheckpointCopy(place, part.disk, self._name, self._look.content).copy_files(share, terms)
            except CorruptCheckpointError as error:
                damage = error
            else:
                left = [entry for entry in left if entry not in share]
        if left:
            nowhere = "is whole on no disk, and in no tier"
            raise damage or damaged(f"{self._root.url}/{self._name}", left[0].path, nowhere)

    def _places(self) -> Iterator[tuple[Storage, Collection[str] | None]]:
        """Yield what to copy from, and the files known to be whole there; None if unknown."""
        yield from ((part.disk, part.whole) for part in self._parts if part.there)
        yield from ((source, None) for source in self._sources)

    def _is_among(self, entry: FileEntry, known: Collection[str]) -> bool:
        """Return whether a file or its twin is among those known to be whole."""
        return entry.path in known or self._twins.get(entry.path) in known

    def _complete(self, part: DiskPart) -> None:
        """Make a new part durable, its marker last: a later start may give it its name."""
        part.disk.delete(f"{self.working}/{MARKER}")
        part.disk.write_bytes(f"{self.working}/{MARKER}", self._look.marker)
        for inner in _directories(part.wanted):
            part.disk.sync_directory(f"{self.working}/{inner}" if inner else self.working)

    def _require_unchanged(self, part: DiskPart) -> None:
        """Raise if a disk has no longer what `look` saw there."""
        there = part.disk.entry(self._name) is not None
        if there and part.there:
            with suppress(CannotRepairError):
                self._look.lacking_beside(part.disk)
                return
        if there or part.there:
            raise CheckpointNotFoundError(
                f"{self._root.url}/{self._name} was pruned or replaced while it was repaired"
            )

    def _put(self, part: DiskPart) -> None:
        """Put what was copied in the place of what is damaged or missing on a disk."""
        for inner in _directories(part.wanted) - {""}:
            with suppress(FileExistsError):
                part.disk.make_directory(f"{self._name}/{inner}")
        for entry in part.wanted:
            key = f"{self._name}/{entry.path}"
            if entry.path in part.wrong:
                part.disk.delete(key)
            part.disk.rename(f"{self.working}/{entry.path}", key)
        for inner in _directories(part.wanted):
            part.disk.sync_directory(f"{self._name}/{inner}" if inner else self._name)
        for path, content in part.small.items():
            part.disk.replace(f"{self._name}/{path}", content)
        part.disk.delete(self.working)


def _homes(files: Sequence[tuple[FileEntry, int]], parts: Sequence[DiskPart]) -> Mapping[int, int]:
    """Return for each group the disk with most of its files, or one to take them.

    The files of a group stay together: a node that sees its disk alone must know what is not there.
    """
    groups, numbers = sorted({group for _, group in files} - {EVERY_GROUP}), range(len(parts))
    found = Counter(
        (group, number)
        for entry, group in files
        for number, part in enumerate(parts)
        if entry.path in part.whole or entry.path in part.wrong
    )
    homes: dict[int, int] = {}
    for group in groups:
        count, number = max((found[group, number], -number) for number in numbers)
        if count:
            homes[group] = -number
    free = [number for number in numbers if number not in homes.values()]
    for group in groups:
        if group not in homes:
            homes[group] = group if group in free else next(iter(free), group % len(parts))
            free = [number for number in free if number != homes[group]]
    return homes


def _directories(entries: Sequence[FileEntry]) -> set[str]:
    return {entry.path.rpartition("/")[0] for entry in entries} | {""}
