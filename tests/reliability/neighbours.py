"""A neighbour who may write into the root puts links in the way of everything that a job does there.

A real process, of another user where this one may start one, exchanges directories and files for links that
lead out of a root that everybody may write to, while a save, a prune and the like go on. These may fail;
nothing outside may be changed or read.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, Self, cast, final

from ckpt_core.checksums import checksum
from ckpt_core.commit import Manifest, begin, collect_orphans, commit, quarantine, remove
from ckpt_core.commit._quarantine import set_aside
from ckpt_core.errors import CheckpointError
from ckpt_core.names import MANIFEST
from ckpt_core.storage import LocalStorage
from ckpt_core.types import CheckpointInfo, FileEntry
from tests.reliability.outcome import Choice, Outcome

ROUNDS: Final = 10_000
NOBODY: Final = 65534
_NAME: Final = "step-000000001"
_SECRET: Final = b"nobody else's"
_PRECIOUS: Final = ("data", "notes.txt", "__1_0.distcp", "deep/data")
_FILES: Final[Mapping[str, bytes]] = {
    "__0_0.distcp": bytes(5000),
    "part/__1_0.distcp": b"ours",
    "part/data": b"ours too",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Bait:
    """What the neighbour makes, and exchanges meanwhile: a directory and two names in it."""

    directories: Sequence[str] = ()
    files: Sequence[str] = ()
    links: Mapping[str, str] = field(default_factory=dict[str, str])
    swaps: Sequence[tuple[str, str, str]] = ()


@final
class Scene:
    """A root that everybody may write to, and what lies outside of it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.outside = folder / "outside"
        self.root.mkdir(parents=True)
        self.root.chmod(0o1777)
        self.storage = LocalStorage(self.root)
        self.restore()

    def restore(self) -> None:
        """Put what lies outside back as it was."""
        shutil.rmtree(self.outside, ignore_errors=True)
        self.outside.mkdir()
        for name in _PRECIOUS:
            path = self.outside / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(_SECRET)
        self._was = self._look()

    def damage(self) -> str:
        """What has changed outside, "" if nothing."""
        now = self._look()
        changed = {path for path in now.keys() | self._was.keys() if now.get(path) != self._was.get(path)}
        return f"changed outside: {sorted(changed)}" if changed else ""

    def clear(self) -> None:
        """Empty the root."""
        for path in self.root.iterdir():
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)

    def _look(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path in (self.outside, *self.outside.rglob("*")):
            status = path.lstat()
            content = path.read_bytes() if path.is_file() else b""
            # Times of access alone may change: we look, too.
            times = status.st_mtime_ns, status.st_ctime_ns
            found[str(path.relative_to(self.outside))] = (status.st_ino, status.st_mode, *times, content)
        return found


def save(scene: Scene, name: str = _NAME, *, replace: bool = False) -> CheckpointInfo:
    """All of a save, as the coordinator of a job sees it; into a directory that others may write to."""
    save_id = secrets.token_hex(4)
    working = begin(scene.storage, name, save_id, replace=replace)
    scene.storage.write_pieces(f"{working}/__0_0.distcp", [memoryview(_FILES["__0_0.distcp"])])
    for path, content in _FILES.items():
        if "/" in path:
            scene.storage.write_bytes(f"{working}/{path}", content)
    entries = tuple(
        FileEntry(path=path, size_bytes=len(content), checksum=checksum(content))
        for path, content in _FILES.items()
    )
    manifest = Manifest(
        save_id=save_id,
        step=1,
        created=1_700_000_000.0,
        world_size=1,
        items={"model": "sharded"},
        metrics={},
        annotations={},
        producer={},
        files=entries,
    )
    return commit(scene.storage, working, name, manifest, replace=replace)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Something that a job does to its root.

    Attributes:
        prepare: makes what the job finds, undisturbed, and returns what the neighbour adds.
        act: does it, while the neighbour is at work; returns what was wrong, "" if nothing.
    """

    prepare: Callable[[Scene, int], Bait]
    act: Callable[[Scene, int], str]


def _open_to_all(scene: Scene, *names: str) -> None:
    for name in names:
        (scene.root / name).chmod(0o777)


def _bait_in(scene: Scene, name: str) -> Bait:
    """A directory that others may write to: `part` in it turns into a link to the outside and back."""
    return Bait(
        files=[f"{name}/part/notes.txt"],
        links={f"{name}/link": str(scene.outside)},
        swaps=[(name, "part", "link")],
    )


def _checkpoint(scene: Scene, number: int) -> Bait:
    save(scene)
    _open_to_all(scene, _NAME, f"{_NAME}/part")
    if number % 2:
        (scene.root / _NAME / MANIFEST).unlink()  # names tell what is ours, which is deleted in place
    return _bait_in(scene, _NAME)


def _whole_checkpoint(scene: Scene, _number: int) -> Bait:
    return _checkpoint(scene, 0)


def _users_directory(scene: Scene, _number: int) -> Bait:
    """A directory of the neighbour's has the name that the checkpoint will have."""
    return Bait(
        directories=[_NAME, f"{_NAME}/part"],
        files=[f"{_NAME}/part/data"],
        links={f"{_NAME}/link": str(scene.outside)},
        swaps=[(_NAME, "part", "link")],
    )


_TORN: Final = f".incomplete-deadbeef-{_NAME}"
_THEIRS: Final = f".incomplete-deadbee1-{_NAME}"


def _leftovers(scene: Scene, _number: int) -> Bait:
    for path, content in _FILES.items():
        scene.storage.write_bytes(f"{_TORN}/{path}", content)
    _open_to_all(scene, _TORN, f"{_TORN}/part")
    ours = _bait_in(scene, _TORN)
    return Bait(
        directories=[_THEIRS, f"{_THEIRS}/part"],
        files=[*ours.files, f"{_THEIRS}/part/data"],
        links={**ours.links, f"{_THEIRS}/link": str(scene.outside)},
        swaps=[*ours.swaps, (_THEIRS, "part", "link")],
    )


def _in_the_way(scene: Scene, _number: int) -> Bait:
    """What is to make way is a directory, and a link, and a directory again."""
    return Bait(
        directories=[_NAME, f"{_NAME}/part"],
        links={"link": str(scene.outside), f"{_NAME}/link": str(scene.outside)},
        swaps=[(".", _NAME, "link"), (_NAME, "part", "link")],
    )


def _shared(scene: Scene, _number: int) -> Bait:
    return Bait(
        directories=["shared", "shared/part"],
        files=["shared/data", "shared/part/data"],
        links={
            "shared/link": str(scene.outside),
            "shared/file-link": str(scene.outside / "data"),
            "shared/new-link": str(scene.outside / "data"),
        },
        swaps=[
            ("shared", "part", "link"),
            ("shared", "data", "file-link"),
            ("shared", "new", "new-link"),
        ],
    )


def _lock_file(scene: Scene, _number: int) -> Bait:
    return Bait(
        files=["pins.json.lock"],
        links={"link": str(scene.outside / "new")},
        swaps=[(".", "pins.json.lock", "link")],
    )


def _save(scene: Scene, _number: int) -> str:
    save(scene)
    return ""


def _replace(scene: Scene, _number: int) -> str:
    save(scene, replace=True)
    return ""


def _prune(scene: Scene, _number: int) -> str:
    remove(scene.storage, CheckpointInfo(name=_NAME, step=1, created=0.0, save_id="00000001"))
    return ""


def _collect(scene: Scene, _number: int) -> str:
    theirs = (scene.root / _THEIRS).lstat().st_uid
    collect_orphans(scene.storage, keep=())
    left = (scene.root / _THEIRS).is_dir()
    return "" if theirs == os.geteuid() or left else "a leftover of another user was removed"


def _quarantine(scene: Scene, number: int) -> str:
    (quarantine if number % 2 else set_aside)(scene.storage, _NAME)
    return ""


def _read(scene: Scene, _number: int) -> str:
    for key in ("shared/data", "shared/part/data"):
        for _ in range(4):
            if _read_once(scene, key) == _SECRET:
                return f"{key} was read outside"
    return ""


def _read_once(scene: Scene, key: str) -> bytes:
    try:
        with scene.storage.open_ranges(key) as ranges:
            content = bytearray(ranges.size_bytes)
            ranges.read_into(0, memoryview(content))
        return bytes(content)
    except OSError:
        return b""


def _write(scene: Scene, number: int) -> str:
    if number % 2:
        scene.storage.write_bytes("shared/part/new", b"ours")
    scene.storage.write_pieces("shared/new", [memoryview(bytes(8192))])
    scene.storage.replace("shared/part/data", b"ours")
    return ""


def _lock(scene: Scene, _number: int) -> str:
    lock = scene.storage.try_lock("pins.json")
    if lock is not None:
        lock.release()
    return ""


OPERATIONS: Final[Mapping[str, Operation]] = {
    "save into a directory of theirs": Operation(prepare=_users_directory, act=_save),
    "prune": Operation(prepare=_checkpoint, act=_prune),
    "orphan collection": Operation(prepare=_leftovers, act=_collect),
    "replace": Operation(prepare=_whole_checkpoint, act=_replace),
    "quarantine": Operation(prepare=_in_the_way, act=_quarantine),
    "write": Operation(prepare=_shared, act=_write),
    "read": Operation(prepare=_shared, act=_read),
    "lock": Operation(prepare=_lock_file, act=_lock),
}


@final
class Neighbour:
    """The other process; see `tests.reliability.neighbour`."""

    def __init__(self, scene: Scene, uid: int) -> None:
        command = [sys.executable, "-m", "tests.reliability.neighbour", str(scene.root), str(uid)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def begin(self, bait: Bait) -> None:
        """Return when the bait is laid, and the exchanges begin."""
        fields = {name: getattr(bait, name) for name in ("directories", "files", "links", "swaps")}
        self._ask(json.dumps(fields))

    def end(self) -> int:
        """Stop it; returns how often it has exchanged something."""
        return int(self._ask("stop"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()

    def _ask(self, line: str) -> str:
        stdin, stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        stdin.write(line.encode() + b"\n")
        stdin.flush()
        answer = stdout.readline().decode()
        if not answer:
            raise RuntimeError("the neighbour has ended")
        return answer


def race(scene: Scene, neighbour: Neighbour, operation: Operation, number: int) -> tuple[str, str]:
    """One round; what came of it, and what was wrong, "" if nothing."""
    scene.clear()
    neighbour.begin(operation.prepare(scene, number))
    problem, came = "", "done"
    try:
        problem = operation.act(scene, number)
    except (OSError, CheckpointError) as error:
        came = type(error).__name__
    except Exception:
        problem = traceback.format_exc()
    swaps = neighbour.end()
    if damage := scene.damage():
        problem = f"{problem} {damage}".strip()
        scene.restore()
    return f"{swaps} exchanges, {came}", problem


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Race 10,000 rounds of every operation, or the chosen number; nothing is drawn by the seed."""
    uid = os.geteuid() or NOBODY
    who = "another user" if uid != os.geteuid() else "the same user"
    for name in [each for each in OPERATIONS if not choice.named or each in choice.named]:
        scene = Scene(folder / name.replace(" ", "-"))
        with Neighbour(scene, uid) as neighbour:
            for number in range(choice.least(ROUNDS)):
                came, problem = race(scene, neighbour, OPERATIONS[name], number)
                yield Outcome(
                    sweep=f"racing neighbour, {who}: {name}",
                    point=f"round {number}, {came}",
                    problem=problem,
                )
