"""Repairs of checkpoints on disks that only one node sees, by a running job.

A disk keeps what is whole there. What it lacks is copied beside its part, compared with the manifest on the
way, and takes its place file by file; a disk without a part gets one, in one step. So after a kill at any
point every disk has at least what it had, every file is the one committed, and the next resume finds the
rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final

from ckpt_core.commit import MAX_MARKER_BYTES, MAX_SIGNATURE_BYTES, Manifest, Marker, working_name
from ckpt_core.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    damaged,
    unreadable,
)
from ckpt_core.formats.checksums import Checksum, combine_crc32, crc32_text, crc32_value
from ckpt_core.groups import GroupedStorage, on_each
from ckpt_core.names import EVERY_GROUP, MANIFEST, MARKER, SIGNATURE, twin_name
from ckpt_core.storage import Storage, StorageEntry, read_small
from ckpt_core.tiers._copy import CheckpointCopy, CopyTerms, begin_copy
from ckpt_core.types import CheckpointInfo, FileEntry

_BLOCK_BYTES: Final = 4 << 20
_RANGE_BYTES: Final = 256 << 20
"""Of one request to a disk, during which the look cannot be stopped."""


class CannotRepairError(Exception):
    """A checkpoint is left as it is; the message says why."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _DiskPart:
    """What one disk has of a checkpoint, and what it is to get.

    Attributes:
        there: whether it has a directory of that name.
        whole: the files that are as committed, as far as is known.
        wrong: the files that are not.
        small: path -> content of what is to be written beside the files of the manifest; the marker last.
        wanted: the files to be copied here.
    """

    disk: Storage
    there: bool
    whole: set[str] = field(default_factory=set[str])
    wrong: set[str] = field(default_factory=set[str])
    small: dict[str, bytes] = field(default_factory=dict[str, bytes])
    wanted: list[FileEntry] = field(default_factory=list[FileEntry])

    @property
    def lacks_any(self) -> bool:
        """Whether there is anything to do on this disk."""
        return not self.there or bool(self.wanted or self.small)

    @property
    def size_bytes(self) -> int:
        """The bytes to be copied here."""
        return sum(entry.size_bytes for entry in self.wanted)


@final
class PartsRepair:
    """The repair of one checkpoint on the disks of several nodes.

    `look` finds what is to be done, then `run` does it. The caller owns the root. `sources` are further roots
    with equal copies, the nearest first; `stop` is called before every step, and raises to end the repair.

    Raises:
        CorruptCheckpointError: its manifest is not to be found.
    """

    def __init__(
        self, root: GroupedStorage, info: CheckpointInfo, sources: Sequence[Storage], stop: Callable[[], None]
    ) -> None:
        self._root = root
        self._info, self._name = info, info.name
        self._sources = sources
        self._stop = stop
        places = [*root.parts, *sources]
        self._content = self._found_content(places)
        self._manifest = Manifest.from_bytes(self._content)
        groups = self._manifest.groups or (0,) * len(self._manifest.files)
        self._files = list(zip(self._manifest.files, groups, strict=True))
        self._beside = self._found_beside(places)
        self._marker = self._found_marker()
        self._twins = {path: twin.path for path, twin in self._manifest.twins().items()}
        self._twins |= {twin: path for path, twin in self._twins.items()}
        self.working = working_name(root, info.name, info.save_id)
        self._parts: Sequence[_DiskPart] = ()
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
        """Find what each disk lacks.

        Missing files and wrong sizes are seen in listings. The disk compares what all disks have, and the
        suspects (None: all files), with their checksums.

        Raises:
            CannotRepairError: a disk has something else under that name, or the checkpoint was saved in one
                place and is not whole.
            OSError: a disk failed, or its node was lost.
        """
        self._parts = on_each(self._root.parts, lambda disk: self._look_at(disk, suspects))
        self._homes = _homes(self._files, self._parts)
        for entry, group in self._files:
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
        """Return which disk has too little room for this and for a save like it, or ""."""
        for number, part in enumerate(self._parts):
            saved = (
                entry.size_bytes for entry, group in self._files if self._homes.get(group, number) == number
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

        `check` is called before anything gets a name that counts, and raises to end the repair.

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

    def _copy(self, part: _DiskPart, terms: CopyTerms) -> None:
        """Copy what a disk lacks into the working directory on it."""
        begin_copy(part.disk, self._name, self._manifest, self._beside, repair=True)
        damage: CorruptCheckpointError | None = None
        left: Sequence[FileEntry] = part.wanted
        for place, known in self._places():
            share = [entry for entry in left if known is None or self._is_among(entry, known)]
            if not share:
                continue
            try:
                CheckpointCopy(place, part.disk, self._name, self._content).copy_files(share, terms)
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

    def _complete(self, part: _DiskPart) -> None:
        """Make a new part durable, its marker last: a later start may give it its name."""
        part.disk.delete(f"{self.working}/{MARKER}")
        part.disk.write_bytes(f"{self.working}/{MARKER}", self._marker)
        for inner in _directories(part.wanted):
            part.disk.sync_directory(f"{self.working}/{inner}" if inner else self.working)

    def _require_unchanged(self, part: _DiskPart) -> None:
        """Raise if a disk has no longer what `look` saw there."""
        there = part.disk.entry(self._name) is not None
        if there and part.there:
            with suppress(CannotRepairError):
                self._lacking_beside(part.disk)
                return
        if there or part.there:
            raise CheckpointNotFoundError(
                f"{self._root.url}/{self._name} was pruned or replaced while it was repaired"
            )

    def _put(self, part: _DiskPart) -> None:
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

    def _look_at(self, disk: Storage, suspects: Collection[str] | None) -> _DiskPart:
        self._stop()
        if disk.entry(self._name) is None:
            return _DiskPart(disk=disk, there=False)
        part = _DiskPart(disk=disk, there=True, small=self._lacking_beside(disk))
        there = self._listed(disk)
        for entry, group in self._files:
            found = there.get(entry.path)
            if found is None:
                continue
            if found.is_directory or found.is_link:
                raise CannotRepairError(f"{disk.url}/{self._name}/{entry.path} is no file of a save")
            right = found.size_bytes == entry.size_bytes
            if right and (group == EVERY_GROUP or suspects is None or entry.path in suspects):
                right = _is_whole(disk, f"{self._name}/{entry.path}", entry, self._stop)
            (part.whole if right else part.wrong).add(entry.path)
        return part

    def _lacking_beside(self, disk: Storage) -> dict[str, bytes]:
        """Return the small files to be written beside those of the manifest.

        Raises:
            CannotRepairError: neither the marker nor the manifest is that of this checkpoint.
        """
        marked = self._is_marked(disk)
        lacking: dict[str, bytes] = {}
        for path, content in self._beside.items():
            there: bytes | None = None
            with suppress(FileNotFoundError, CorruptCheckpointError):
                there = read_small(disk, f"{self._name}/{path}")
            # A save puts their twins on one disk only. Nothing says which of two signatures is right.
            expected = path in {MANIFEST, SIGNATURE}
            if expected if there is None else content is self._content and there != content:
                lacking[path] = content
        if not marked and MANIFEST in lacking:
            raise CannotRepairError(
                f"{disk.url}/{self._name} has neither its marker nor its manifest on the disk of one node: "
                "it was not touched; inspect it, then move or delete it"
            )
        return lacking if marked else {**lacking, MARKER: self._marker}

    def _listed(self, disk: Storage) -> Mapping[str, StorageEntry]:
        """Return path -> entry of what is in the directories of the manifest's files."""
        found: dict[str, StorageEntry] = {}
        for inner in {entry.path.rpartition("/")[0] for entry in self._manifest.files}:
            for child in disk.list(f"{self._name}/{inner}" if inner else self._name):
                found[f"{inner}/{child.name}" if inner else child.name] = child
        return found

    def _is_marked(self, disk: Storage) -> bool:
        """Return whether the marker on a disk is that of this checkpoint.

        Raises:
            CannotRepairError: it is that of another, or the name is a link.
        """
        entry = disk.entry(self._name)
        if entry is None or entry.is_link or not entry.is_directory:
            raise CannotRepairError(
                f"{disk.url}/{self._name} is no directory of a save on the disk of one node"
            )
        try:
            marker = Marker.read(disk, self._name)
        except (FileNotFoundError, CorruptCheckpointError):
            return False
        if not self._is_ours(marker):
            raise CannotRepairError(f"{disk.url}/{self._name} is another checkpoint on the disk of one node")
        return True

    def _is_ours(self, marker: Marker) -> bool:
        return (marker.save_id, marker.manifest_sha256) == (self._info.save_id, self._info.manifest_sha256)

    def _found_content(self, places: Sequence[Storage]) -> bytes:
        for place in places:
            with suppress(CheckpointError, OSError):
                content = read_small(place, f"{self._name}/{MANIFEST}")
                if hashlib.sha256(content).hexdigest() == self._info.manifest_sha256:
                    return content
        raise damaged(f"{places[0].url}/{self._name}", MANIFEST, "is whole on no disk, and in no tier")

    def _found_beside(self, places: Sequence[Storage]) -> Mapping[str, bytes]:
        twins = self._manifest.replicas > 1
        found = {MANIFEST: self._content, **({twin_name(MANIFEST): self._content} if twins else {})}
        for path in (SIGNATURE, *((twin_name(SIGNATURE),) if twins else ())):
            for place in places:
                with suppress(CheckpointError, OSError):
                    found[path] = read_small(place, f"{self._name}/{path}", MAX_SIGNATURE_BYTES)
                    break
        return found

    def _found_marker(self) -> bytes:
        """Return the marker of the other parts: it says on how many disks they were saved."""
        for disk in self._root.parts:
            with suppress(CheckpointError, OSError):
                content = read_small(disk, f"{self._name}/{MARKER}", MAX_MARKER_BYTES)
                marker = Marker.from_bytes(content)
                # One of one group is on a disk that had it all, as on a job's only node.
                if self._is_ours(marker) and marker.groups > 1:
                    return content
        return Marker.of(self._manifest, self._content, groups=self._root.num_disks).to_bytes()


def _homes(files: Sequence[tuple[FileEntry, int]], parts: Sequence[_DiskPart]) -> Mapping[int, int]:
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


def _is_whole(disk: Storage, key: str, entry: FileEntry, stop: Callable[[], None]) -> bool:
    """Return whether a file has the checksum committed."""
    try:
        return _sum(disk, key, entry, stop) == entry.checksum
    except (FileNotFoundError, EOFError, ValueError):
        return False  # of a checksum that this version does not know, the copy tells
    except OSError as error:
        unreadable(error)
        return False


def _sum(disk: Storage, key: str, entry: FileEntry, stop: Callable[[], None]) -> str:
    if crc32_value(entry.checksum) is None:
        running = Checksum.like(entry.checksum)
        with disk.open(key) as stream:
            while block := stream.read(_BLOCK_BYTES):
                stop()
                running.update(block)
        return str(running)
    joined = 0
    for offset in range(0, entry.size_bytes, _RANGE_BYTES):
        stop()
        count = min(_RANGE_BYTES, entry.size_bytes - offset)
        joined = combine_crc32(joined, disk.crc32(key, offset, count), count)
    return crc32_text(joined)
