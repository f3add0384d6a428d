"""The place that a conversion writes: a draft until all of it is there.

local                                           after a crash here, there is
1. `.NAME.export~/.export/plan`                 a draft, which the same conversion continues
2. each file as `PATH.part`, then as `PATH`     whole files in it, and one that is begun again
3. rename the draft onto NAME                   all of it
4. delete `.export`                             nothing else

object store
1. `NAME/.export/plan`                          a prefix that the same conversion continues
2. each object but the last                     whole objects; the last one makes a folder of them
3. the last object                              all of it
4. delete `.export`                             nothing else
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import prod
from typing import Final, final

from ckpt_core.convert._fill import FileFill, size_of
from ckpt_core.convert._laid_out import Computed, OutFile, Wanted, ignore, phase
from ckpt_core.coordination import Coordinator, Solo
from ckpt_core.crew import run_all
from ckpt_core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    NoRoomError,
    RootBusyError,
)
from ckpt_core.loading import LocatedTensor
from ckpt_core.names import export_draft
from ckpt_core.options import bytes_text
from ckpt_core.storage import Lock, Storage, is_full, read_small

_THREADS: Final = 2
_OWN: Final = ".export"
_PLAN: Final = f"{_OWN}/plan"
_MOST_PLAN_BYTES: Final = 64
_ALONE: Final = "content"
"""What the draft of a place that is one file has it as."""


def write(
    tensors: Mapping[str, LocatedTensor],
    files: Sequence[OutFile],
    target: Storage,
    directory: str,
    *,
    coordinator: Coordinator | None = None,
    progress: Callable[[int], None] = ignore,
) -> None:
    """Write the files of a conversion: all of them, or none. Collective.

    A file takes five windows of memory, and what `FileFill` needs; two are written at a time. An attempt
    that was killed is continued by the next one with equal files and equal checksums.

    The directory is a name that is free in the target, or is empty. Of the files the one is last that makes
    the others a whole; or there is a single one with the path "". `progress` is called on several threads
    with bytes that are written, or were by an earlier attempt; what it raises ends the conversion.

    Raises:
        CheckpointExistsError: the place has something in it; nothing was written.
        CheckpointNotFoundError: the source was pruned meanwhile.
        CorruptCheckpointError: the source is damaged.
        NoRoomError: the target is full.
        RootBusyError: another process writes there.
        OSError: a storage failed.
    """
    ranks = coordinator or Solo()
    place = _OutPlace(target, directory, files)
    what = f"writing {target.url}/{directory}"

    def fill(file: OutFile) -> None:
        with FileFill(tensors) as content:
            place.write(file, content.windows(file), progress)

    with _explained(tensors, place), place.locked():
        is_whole = False
        with phase(ranks, what):
            if ranks.is_coordinator:
                size = sum(size_of(piece, tensors) for file in files for piece in file.pieces)
                is_whole = place.begin(_digest(tensors, files), size)
        is_whole = ranks.broadcast(is_whole)
        with phase(ranks, what):
            share = () if is_whole else files if target.supports_rename else files[:-1]
            threads = _THREADS if target.supports_rename and ranks.world_size == 1 else 1
            run_all(fill, share[ranks.rank :: ranks.world_size], threads, name="ckpt-export")
        with phase(ranks, what):
            if ranks.is_coordinator:
                if not target.supports_rename:
                    fill(files[-1])
                place.commit()


@contextmanager
def _explained(tensors: Mapping[str, LocatedTensor], place: _OutPlace) -> Generator[None]:
    """Tell damage from a source that was pruned, and a full disk from a broken one."""
    try:
        yield
    except (CorruptCheckpointError, FileNotFoundError) as error:
        try:
            for part in {id(each.part): each.part for each in tensors.values()}.values():
                part.require_there()
        except CheckpointNotFoundError as gone:
            raise CheckpointNotFoundError(
                f"{gone}: it was pruned while it was read, and {place.url} was not completed. Pin a step to "
                "keep it (`ckpt pin`)"
            ) from error
        raise
    except OSError as error:
        if not is_full(error):
            raise
        raise NoRoomError(
            f"{place.url} was not completed: no space is left. What is written waits in "
            f"{place.draft_url}, and the same command continues it: free space and repeat it, or delete that"
        ) from error


def _digest(tensors: Mapping[str, LocatedTensor], files: Sequence[OutFile]) -> str:
    """Return what stands for the content of files; random without checksums."""
    found = hashlib.sha256()
    names: dict[str, None] = {}
    for file in files:
        found.update(repr((file.path, len(file.pieces))).encode())
        for piece in file.pieces:
            if isinstance(piece, bytes):
                found.update(hashlib.sha256(piece).digest())
            elif isinstance(piece, Wanted):
                names[piece.name] = None
                found.update(repr((piece.name, piece.dtype)).encode())
            elif isinstance(piece, Computed):
                spans = piece.spans(0, prod(piece.shape))
                names |= dict.fromkeys(name for name, _, _ in spans)
                found.update(repr((piece.what, piece.shape, piece.dtype, spans)).encode())
    for name in names:
        sums = tensors[name].checksums
        if sums is None:
            return secrets.token_hex(32)
        found.update(repr((name, tensors[name].form, sorted(sums.items()))).encode())
    return found.hexdigest()


@final
class _OutPlace:
    def __init__(self, target: Storage, directory: str, files: Sequence[OutFile]) -> None:
        self._target = target
        self._directory = directory
        self._paths = [file.path for file in files]
        parent, _, name = directory.rpartition("/")
        draft = "/".join(filter(None, (parent, export_draft(name))))
        self._home = draft if target.supports_rename else directory
        self._lock: Lock | None = None

    @property
    def url(self) -> str:
        return f"{self._target.url}/{self._directory}"

    @property
    def draft_url(self) -> str:
        return f"{self._target.url}/{self._home}"

    @contextmanager
    def locked(self) -> Generator[None]:
        """Release at the end the lock that `begin` has taken."""
        try:
            yield
        finally:
            if self._lock is not None:
                self._lock.release()

    def begin(self, plan: str, size_bytes: int) -> bool:
        """Keep what an equal attempt has written; return whether that is all of it.

        Raises:
            CheckpointExistsError, RootBusyError, NoRoomError: see `write`.
        """
        target, renames = self._target, self._target.supports_rename
        entry = target.entry(self._directory)
        is_file = entry is not None and (entry.is_link or not entry.is_directory)
        there = set() if entry is None or is_file else {each.name for each in target.list(self._directory)}
        begun = self._plan_in(self._directory) if _OWN in there else ""
        if renames and begun == plan:
            return True  # killed after the rename
        own = set() if renames else {_OWN, *(path.partition("/")[0] for path in self._paths if begun)}
        if is_file or not there <= own:
            shown = "a file" if is_file else f"not empty ({', '.join(sorted(there - own)[:3])}…)"
            raise CheckpointExistsError(
                f"{self.url} is {shown}; nothing was written: name another place, or move what is there"
            )
        if not renames and self._paths == [""]:
            return False  # one object, which needs no draft
        with suppress(FileExistsError):
            target.make_directory(f"{self._home}/{_OWN}")
        self._lock = target.try_lock(f"{self._home}/{_PLAN}")
        if self._lock is None:
            raise RootBusyError(f"another process is writing {self.url}: wait for it, or end it")
        if self._plan_in(self._home) != plan:
            self._clear()
        self._require_room(size_bytes)
        target.replace(f"{self._home}/{_PLAN}", plan.encode())
        return False

    def write(self, file: OutFile, windows: Iterator[memoryview], progress: Callable[[int], None]) -> None:
        """Write a file, durable on return, unless an equal attempt has."""
        target, key = self._target, self._key(file.path)
        if target.exists(key):
            progress(target.size(key))
            return

        def counted() -> Iterator[memoryview]:
            for window in windows:
                yield window
                progress(len(window))

        if not target.supports_rename:
            target.write_pieces(key, counted())
            return
        target.delete(f"{key}.part")
        target.write_pieces(f"{key}.part", counted())
        target.rename(f"{key}.part", key)

    def commit(self) -> None:
        """Give the place its name, where that is not the last object."""
        target, home = self._target, self._home
        if target.supports_rename and target.entry(home) is not None:
            for path in {path.rpartition("/")[0] for path in self._paths}:
                target.sync_directory(f"{home}/{path}" if path else home)
            if self._paths == [""]:
                target.rename(self._key(""), self._directory)
                target.delete(home)
            elif target.entry(self._directory) is None:
                target.rename(home, self._directory)
            else:
                target.exchange(home, self._directory)
                if not target.list(home):  # the empty directory that was there
                    target.delete(home)
            target.sync_directory(self._directory.rpartition("/")[0])
        target.delete(f"{self._directory}/{_OWN}")

    def _key(self, path: str) -> str:
        if path:
            return f"{self._home}/{path}"
        return f"{self._home}/{_ALONE}" if self._target.supports_rename else self._directory

    def _plan_in(self, directory: str) -> str:
        try:
            return read_small(self._target, f"{directory}/{_PLAN}", _MOST_PLAN_BYTES).decode(errors="replace")
        except (FileNotFoundError, CorruptCheckpointError):
            return ""  # also of what is no file of ours

    def _clear(self) -> None:
        target = self._target
        if target.supports_rename:
            for entry in target.list(self._home):
                if entry.name != _OWN:
                    target.delete(f"{self._home}/{entry.name}")
            return
        for path in self._paths:
            target.delete(self._key(path))
        with suppress(OSError):  # an owner may lack the right to list them
            target.abandon_uploads(lambda key: key.startswith(f"{self._home}/"))

    def _require_room(self, size_bytes: int) -> None:
        target, free = self._target, self._target.space().free_bytes
        written = sum(target.size(key) for key in map(self._key, self._paths) if target.exists(key))
        if free is not None and free < size_bytes - written:
            raise NoRoomError(
                f"{self.url} needs {bytes_text(size_bytes - written)}, and {bytes_text(free)} are "
                "free there; nothing was written",
                needed_bytes=size_bytes - written,
                free_bytes=free,
            )
