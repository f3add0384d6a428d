"""A look at the disks of several nodes: what each has of one checkpoint."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, final

from ckpt_core.commit import MAX_MARKER_BYTES, MAX_SIGNATURE_BYTES, Manifest, Marker
from ckpt_core.errors import CheckpointError, CorruptCheckpointError
from ckpt_core.formats.checksums import Checksum, combine_crc32, crc32_text, crc32_value
from ckpt_core.names import EVERY_GROUP, MANIFEST, MARKER, SIGNATURE, twin_name
from ckpt_core.storage import Storage, StorageEntry, read_small
from ckpt_core.tiers._checked_reader import damaged
from ckpt_core.types import CheckpointInfo, FileEntry

_BLOCK_BYTES: Final = 4 << 20
_RANGE_BYTES: Final = 256 << 20
"""Of one request to a disk, during which the look cannot be stopped."""


class CannotRepairError(Exception):
    """A checkpoint is left as it is; the message says why."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class DiskPart:
    """What one disk has of a checkpoint, and what it is to get.

    Attributes:
        disk: the disk.
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
class PartLook:
    """A look at what disks have of a checkpoint.

    Concurrency: any thread, each disk on one.

    Attributes:
        content: the bytes of the manifest.
        manifest: of the checkpoint.
        beside: path -> content of the files that the manifest does not list; itself first.
        marker: the bytes of the marker.

    Args:
        disks: of all nodes.
        info: the checkpoint.
        sources: further roots with equal copies.
        stop: called before every step; raises to end the look.

    Raises:
        CorruptCheckpointError: the manifest is not to be found.
    """

    def __init__(
        self,
        disks: Sequence[Storage],
        info: CheckpointInfo,
        sources: Sequence[Storage],
        stop: Callable[[], None],
    ) -> None:
        self._info = info
        self._name = info.name
        self._stop = stop
        places = [*disks, *sources]
        self.content = self._found_content(places)
        self.manifest = Manifest.from_bytes(self.content)
        self.beside = self._found_beside(places)
        self.marker = self._found_marker(disks)

    def files(self) -> Iterator[tuple[FileEntry, int]]:
        """Yield the files of the manifest, each with its group; 0 if all are in one place."""
        groups = self.manifest.groups or (0,) * len(self.manifest.files)
        return zip(self.manifest.files, groups, strict=True)

    def at(self, disk: Storage, suspects: Collection[str] | None) -> DiskPart:
        """Look at one disk.

        Missing files and wrong sizes are seen in listings. The disk compares what all disks have, and the
        suspects, with their checksums.

        Args:
            disk: of one node.
            suspects: files that may be damaged; None for all.

        Raises:
            CannotRepairError: it has something else under that name.
            OSError: it failed, or its node was lost.
        """
        self._stop()
        if disk.entry(self._name) is None:
            return DiskPart(disk=disk, there=False)
        part = DiskPart(disk=disk, there=True, small=self.lacking_beside(disk))
        there = self._listed(disk)
        for entry, group in self.files():
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

    def lacking_beside(self, disk: Storage) -> dict[str, bytes]:
        """Return the small files to be written beside those of the manifest.

        Raises:
            CannotRepairError: neither the marker nor the manifest is that of this checkpoint.
        """
        marked = self._is_marked(disk)
        lacking: dict[str, bytes] = {}
        for path, content in self.beside.items():
            there = self._content_at(disk, path)
            # A save puts their twins on one disk only. Nothing says which of two signatures is right.
            expected = path in {MANIFEST, SIGNATURE}
            if expected if there is None else content is self.content and there != content:
                lacking[path] = content
        if not marked and MANIFEST in lacking:
            raise CannotRepairError(
                f"{disk.url}/{self._name} has neither its marker nor its manifest on the disk of one node: "
                "it was not touched; inspect it, then move or delete it"
            )
        return lacking if marked else {**lacking, MARKER: self.marker}

    def _listed(self, disk: Storage) -> Mapping[str, StorageEntry]:
        """Return path -> entry of what is in the directories of the manifest's files."""
        found: dict[str, StorageEntry] = {}
        for inner in {entry.path.rpartition("/")[0] for entry in self.manifest.files}:
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

    def _content_at(self, place: Storage, path: str) -> bytes | None:
        """Return the content of a small file; None if there is no such file."""
        try:
            return read_small(place, f"{self._name}/{path}")
        except (FileNotFoundError, CorruptCheckpointError):
            return None

    def _found_content(self, places: Sequence[Storage]) -> bytes:
        for place in places:
            with suppress(CheckpointError, OSError):
                content = read_small(place, f"{self._name}/{MANIFEST}")
                if hashlib.sha256(content).hexdigest() == self._info.manifest_sha256:
                    return content
        raise damaged(f"{places[0].url}/{self._name}", MANIFEST, "is whole on no disk, and in no tier")

    def _found_beside(self, places: Sequence[Storage]) -> Mapping[str, bytes]:
        twins = self.manifest.replicas > 1
        found = {MANIFEST: self.content, **({twin_name(MANIFEST): self.content} if twins else {})}
        for path in (SIGNATURE, *((twin_name(SIGNATURE),) if twins else ())):
            for place in places:
                with suppress(CheckpointError, OSError):
                    found[path] = read_small(place, f"{self._name}/{path}", MAX_SIGNATURE_BYTES)
                    break
        return found

    def _found_marker(self, disks: Sequence[Storage]) -> bytes:
        """Return the marker of the other parts: it says on how many disks they were saved."""
        for disk in disks:
            with suppress(CheckpointError, OSError):
                content = read_small(disk, f"{self._name}/{MARKER}", MAX_MARKER_BYTES)
                marker = Marker.from_bytes(content)
                # One of one group is on a disk that had it all, as on a job's only node.
                if self._is_ours(marker) and marker.groups > 1:
                    return content
        return Marker.of(self.manifest, self.content, groups=len(disks)).to_bytes()


def _is_whole(disk: Storage, key: str, entry: FileEntry, stop: Callable[[], None]) -> bool:
    """Return whether a file has the checksum committed."""
    try:
        return _sum(disk, key, entry, stop) == entry.checksum
    except (FileNotFoundError, EOFError, ValueError):
        return False  # of a checksum that this version does not know, the copy tells
    except OSError as error:
        # A block that the device cannot read is lost; any other error may be temporary.
        if error.errno != errno.EIO:
            raise
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
