"""A checkpoint to copy, the command that copies it, and what must be true after a kill.

The source is as it was, the target has the checkpoint whole or nothing that counts, and the same command then
completes the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Manifest, begin, commit, verify
from ckpt_core.formats.checksums import checksum
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.types import FileEntry
from tests.reliability import forks
from tests.reliability.disk.findings import PromiseBrokenError
from tests.reliability.disk.traps import When
from tests.reliability.outcome import Outcome

STEP: Final = 7
NAME: Final = f"step-{STEP:09d}"
_SAVE_ID: Final = "5afe5afe5afe5afe"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Where the command is killed.

    Attributes:
        sweep: the row of the table.
        number: of the call or request.
        label: what it was in the rehearsal.
    """

    sweep: str
    number: int
    when: When
    label: str

    def __str__(self) -> str:
        return f"{self.sweep}: {self.when} {self.number}, {self.label}"


def make_source(folder: Path) -> None:
    """A checkpoint with second files, a directory of a host, and a file in several parts."""
    storage = LocalStorage(folder)
    files = {
        "__0_0.distcp": bytes(range(256)) * (24 * 1024) + b"the last, odd part",
        "__1_0.distcp": b"\1" * 5000,
        "pytorch_model_fsdp_0/__0_0.distcp": b"nested" * 99,
        "rank-00000.json": b"{}",
    }
    files |= {f"{path}.replica": content for path, content in files.items()}
    entries = tuple(
        FileEntry(path=path, size_bytes=len(content), checksum=checksum(content))
        for path, content in files.items()
    )
    working = begin(storage, NAME, _SAVE_ID)
    for path, content in files.items():
        storage.write_bytes(f"{working}/{path}", content)
    storage.write_bytes(f"{working}/manifest.json.sig", b"signed")
    manifest = Manifest(save_id=_SAVE_ID, step=STEP, created=1.0, world_size=2, files=entries, replicas=2)
    commit(storage, working, NAME, manifest)
    storage.replace(f"{NAME}/manifest.json.replica", storage.read_bytes(f"{NAME}/manifest.json"))


def digest(folder: Path) -> str:
    """Every name and byte of a directory."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        found.update(str(path.relative_to(folder)).encode())
        found.update(path.read_bytes() if path.is_file() else b"/")
    return found.hexdigest()


def _command(source: Path, target: str, options: Sequence[str] = ()) -> int:
    """What `ckpt cp` returns; it says nothing here."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return main(["cp", str(source), target, *options])


def copied(source: Path, target: str, options: Sequence[str] = ()) -> None:
    code = _command(source, target, options)
    if code != 0:
        raise PromiseBrokenError(f"ckpt cp ended with {code}")


def look(storage: Storage, source: Path, before: str, target: str, options: Sequence[str], /) -> int:
    """What counts at the target, 0 for nothing; then the same command completes the copy."""
    if digest(source) != before:
        raise PromiseBrokenError("the source was changed")
    found = [info.step for info in Catalog(storage).committed()]
    _require_whole(storage)
    copied(source, target, options)
    if [info.step for info in Catalog(storage).committed()] != [STEP]:
        raise PromiseBrokenError("the second command did not complete the copy")
    _require_whole(storage)
    return max(found, default=0)


def _require_whole(storage: Storage) -> None:
    broken = {info.name: verify(storage, info.name) for info in Catalog(storage).committed()}
    if any(broken.values()):
        raise PromiseBrokenError(f"what counts at the target is damaged: {broken}")


def outcome_of(point: Point, child: forks.Child, resumed: int | None, problem: str) -> Outcome:
    return Outcome(
        sweep=point.sweep,
        point=f"{point.when} {point.number}, {point.label}",
        kills=int(child.killed),
        acknowledged=STEP if "copied" in child.told else 0,
        resumed=resumed,
        problem=problem,
    )
