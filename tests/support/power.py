"""What is on a disk after a power cut, by what POSIX promises and no more.

Content is durable once its file was fsynced, a name once its directory was. Everything since then may have
reached the disk or not, in any order, except that a rename is one change: filesystems in use keep that much.
`PowerLog` notes, in every process that writes below a root, what was done; `power_cut` makes of these notes
and of the root as the processes left it a root as it may be found when the power is back.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, final

from ckpt_core.testing import Fault, Operation

Fate = Literal["strict", "journal", "random"]
"""What becomes of changes that were not synced.

`strict`: all are lost. `journal`: names up to some moment are kept, content is not, as filesystems do that
journal their metadata only. `random`: each is kept or not, content perhaps in part or as zeros.
"""

Names = Mapping[tuple[int, str], "int | None"]

_ROOT: Final = 0
_NAMING: Final = frozenset({"create", "mkdir", "unlink", "rmdir", "rename", "exchange", "link"})


@final
class PowerLog:
    """Notes what this process does below `root`, in files in `folder`, which is elsewhere.

    `fault` belongs among the faults of the `SystemCalls` of that root, as the first of them. The log begins
    with `PowerLog.begin`, while nobody writes; each process that writes, forks included, has one of its own.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._folder = folder
        self._copies = 0
        self._stem = f"{os.getpid()}-{time.monotonic_ns()}"
        self._log = os.open(folder / f"{self._stem}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @classmethod
    def begin(cls, root: Path, folder: Path) -> None:
        """Take all that is below `root` for durable."""
        folder.mkdir(parents=True)
        log = cls(root, folder)
        for path in sorted(root.rglob("*")):
            key = str(path.relative_to(root))
            log._note("mkdir" if path.is_dir() else "create", key)
            if path.is_file():
                log._note("fsync", key, copy=log._copy(path))
        for path in (root, *root.rglob("*")):
            if path.is_dir():
                log._note("fsync", "" if path == root else str(path.relative_to(root)))
        os.close(log._log)

    @property
    def fault(self) -> Fault:
        """Notes every operation when it has succeeded."""
        return Fault(after=self._after)

    def _after(self, operation: Operation) -> None:
        if "#" in operation.key.rpartition("/")[2]:
            return  # without a name it is gone in any case
        path = self._root / operation.key
        if operation.method == "fsync" and path.is_file():
            self._note("fsync", operation.key, copy=self._copy(path))
        elif operation.method in _NAMING or operation.method == "fsync":
            self._note(operation.method, operation.key)

    def _copy(self, path: Path) -> str:
        self._copies += 1
        name = f"{self._stem}-{self._copies}.content"
        shutil.copyfile(path, self._folder / name)
        return name

    def _note(self, method: str, key: str, copy: str | None = None) -> None:
        # The clock is the same for all processes, so that their notes can be put in order.
        line = json.dumps([time.monotonic_ns(), method, key, copy])
        os.write(self._log, line.encode() + b"\n")


def power_cut(folder: Path, root: Path, target: Path, *, fate: Fate = "strict", seed: int = 0) -> None:
    """Make `target` what may be found in place of `root` after a power cut.

    Args:
        folder: where every process that wrote to `root` kept its `PowerLog`; all of them have ended.
        root: as they left it.
        target: a directory that does not exist yet.
        fate: what becomes of changes that were not synced.
        seed: of the chances.
    """
    disk = _Disk()
    for method, key, copy in _notes(folder):
        disk.apply(method, key, copy)
    chance = random.Random(seed)
    names = _survivors(disk, fate, chance)
    live = {node: root / key for key, node in disk.live.items()}
    _materialise(names, target, _Contents(disk=disk, live=live, folder=folder, fate=fate, chance=chance))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Change:
    """What one operation does to names: (directory, name) -> the file or directory it leads to, or None."""

    names: Names
    moves: bool

    def done_to(self, names: dict[tuple[int, str], int | None]) -> None:
        """What is moved has no other name any more, even if the change before this one was lost."""
        if self.moves:
            moved = {node for node in self.names.values() if node is not None}
            names.update({place: None for place, node in names.items() if node in moved})
        names.update(self.names)


@final
@dataclass(kw_only=True, slots=True)
class _Disk:
    """Names and content, as the processes see them (`live`) and as far as they are durable.

    Every file and directory has a number of its own, for life: an inode number can be used again.
    """

    live: dict[str, int] = field(default_factory=lambda: {"": _ROOT})
    directories: set[int] = field(default_factory=lambda: {_ROOT})
    durable: dict[tuple[int, str], int | None] = field(default_factory=dict[tuple[int, str], "int | None"])
    pending: list[_Change] = field(default_factory=list[_Change])
    content: dict[int, str] = field(default_factory=dict[int, str])
    _count: int = 0

    def apply(self, method: str, key: str, copy: str | None) -> None:
        """One operation that has succeeded."""
        if method == "fsync":
            self._sync(key, copy)
        elif method in {"create", "mkdir"}:
            if key not in self.live:
                self._change({key: self._new(directory=method == "mkdir")})
        elif method in {"unlink", "rmdir"}:
            self._change({key: None})
        elif method == "exchange":
            first, second = key.split(" <-> ")
            self._change({first: self.live[second], second: self.live[first]}, moves=True)
        else:
            source, target = key.split(" -> ")
            node, moves = self.live[source], method == "rename"
            self._change({source: None, target: node} if moves else {target: node}, moves=moves)

    def _new(self, *, directory: bool) -> int:
        self._count += 1
        if directory:
            self.directories.add(self._count)
        return self._count

    def _change(self, names: Mapping[str, int | None], *, moves: bool = False) -> None:
        places = {self._place(key): node for key, node in names.items()}
        self.pending.append(_Change(names=places, moves=moves))
        self._rename(names)

    def _rename(self, names: Mapping[str, int | None]) -> None:
        moved = {key: self._below(key) for key in names}
        places = {self.live[key]: key for key in names if key in self.live}
        for key in names:
            for rest in moved[key]:
                del self.live[key + rest]
        for key, node in names.items():
            if node is None:
                continue
            self.live[key] = node
            for rest, inner in moved.get(places.get(node, ""), {}).items():
                self.live[key + rest] = inner

    def _below(self, key: str) -> dict[str, int]:
        """What is at `key` and under it: rest of the path -> number."""
        return {
            path[len(key) :]: node
            for path, node in self.live.items()
            if path == key or path.startswith(key + "/")
        }

    def _place(self, key: str) -> tuple[int, str]:
        folder, _, name = key.rpartition("/")
        return self.live[folder], name

    def _sync(self, key: str, copy: str | None) -> None:
        node = self.live.get(key)
        if node is None:
            return  # gone by the time it was noted
        if copy is not None:
            self.content[node] = copy
            return
        synced = [change for change in self.pending if any(folder == node for folder, _ in change.names)]
        for change in synced:
            change.done_to(self.durable)
        self.pending = [change for change in self.pending if change not in synced]


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Contents:
    """What is in the files that survive."""

    disk: _Disk
    live: Mapping[int, Path]
    folder: Path
    fate: Fate
    chance: random.Random

    def of(self, node: int) -> bytes:
        """The content of a file: what was synced, or whatever the fate makes of what was not."""
        copy = self.disk.content.get(node)
        synced = b"" if copy is None else (self.folder / copy).read_bytes()
        path = self.live.get(node)
        written = path.read_bytes() if path is not None and path.is_file() else synced
        if written == synced or self.fate == "strict":
            return synced
        if self.fate == "journal":
            return self.chance.choice([synced, written, bytes(len(written))])
        cut = self.chance.randrange(len(written) + 1)
        return self.chance.choice([synced, written, bytes(len(written)), written[:cut]])


def _notes(folder: Path) -> Generator[tuple[str, str, str | None]]:
    """The notes of all processes, in the order of time."""
    notes: list[Any] = []
    for path in sorted(folder.glob("*.log")):
        # A process may have been killed within its last line.
        lines = path.read_text().split("\n")[:-1]
        notes += [json.loads(line) for line in lines]
    for _, method, key, copy in sorted(notes, key=lambda note: note[0]):
        yield method, key, copy


def _survivors(disk: _Disk, fate: Fate, chance: random.Random) -> Names:
    """The names that are there when the power is back."""
    kept: Iterable[_Change] = ()
    if fate == "journal":
        kept = disk.pending[: chance.randrange(len(disk.pending) + 1)]
    elif fate == "random":
        kept = [change for change in disk.pending if chance.random() < 0.5]
    names = dict(disk.durable)
    for change in kept:
        change.done_to(names)
    return names


def _materialise(names: Names, target: Path, contents: _Contents) -> None:
    """Write the tree that these names make."""
    places = [(_ROOT, target)]
    while places:
        folder, path = places.pop()
        path.mkdir(parents=True)
        for (parent, name), node in names.items():
            if parent != folder or node is None:
                continue
            if node in contents.disk.directories:
                places.append((node, path / name))
            else:
                (path / name).write_bytes(contents.of(node))
