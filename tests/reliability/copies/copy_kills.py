"""`ckpt cp` killed at every system call on the target's disk, or at every request to its bucket.

Whatever is left, the source is as it was, the target has the checkpoint whole or nothing that counts, and the
same command then completes the copy and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

from ckpt_core.cli import main
from ckpt_core.commit import Catalog, Manifest, begin, commit, verify
from ckpt_core.formats.checksums import checksum
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.types import FileEntry
from tests.reliability import forks
from tests.reliability.disk.findings import PromiseBrokenError
from tests.reliability.disk.traps import Call, Recorder, Trap, When
from tests.reliability.objects.jobs import BUCKET, MIB, Service, assert_clean, fault_at, service, sweep_away
from tests.reliability.outcome import Choice, Outcome, seen, tried

STEP: Final = 7
NAME: Final = f"step-{STEP:09d}"
_SAVE_ID: Final = "5afe5afe5afe5afe"
_JOBS: Final = 2
_ATTEMPTS: Final = 3
_READS: Final = {"GET", "HEAD"}
_SWEEPS: Final = {
    "free": "ckpt cp to a local disk, killed",
    "theirs": "ckpt cp to a local disk, into a user's directory, killed",
    "s3": "ckpt cp to S3, killed",
}


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """Where the command is killed.

    Attributes:
        sweep: key of `_SWEEPS`.
        number: of the call or request.
        label: what it was in the rehearsal.
    """

    sweep: str
    number: int
    when: When
    label: str

    def __str__(self) -> str:
        return f"{_SWEEPS[self.sweep]}: {self.when} {self.number}, {self.label}"


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Kill at every point of every sweep, or at the chosen ones of each."""
    source = folder / "source"
    forks.forked(lambda _tell: _make_source(source))
    before = _digest(source)
    for sweep in ("free", "theirs"):
        if choice.may_name(_SWEEPS[sweep]):
            points = choice.of(_points_on_disk(sweep, source, folder))
            yield from tried((partial(_on_disk, point, source, folder, before) for point in points), _JOBS)
    if choice.may_name(_SWEEPS["s3"]):
        with service() as found:
            for number, point in enumerate(choice.of(_points_in_bucket(found, source))):
                yield _in_bucket(found, point, source, before, f"copy-{number}")


def _make_source(folder: Path) -> None:
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


def _digest(folder: Path) -> str:
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


def _prepare(target: Path, sweep: str) -> Path:
    target.mkdir(parents=True)
    if sweep == "theirs":
        (target / NAME).mkdir()
        (target / NAME / "notes.txt").write_text("mine")
        (target / NAME / "pytorch_model_fsdp_0").write_text("mine, by that name")
    return target


def _points_on_disk(sweep: str, source: Path, folder: Path) -> list[_Point]:
    """Every call on the target's disk, from a rehearsal."""
    target = _prepare(folder / f"rehearsal-{sweep}", sweep)

    def rehearse() -> list[dict[str, Any]]:
        return [asdict(call) for call in Recorder(target).record(lambda: _copied(source, str(target)))]

    calls = [Call(**fields) for fields in forks.answer(rehearse)]
    return [
        _Point(sweep=sweep, number=number, when=when, label=f"{call.method} {call.key}")
        for number, call in enumerate(calls)
        for when in call.moments
    ]


def _copied(source: Path, target: str, options: Sequence[str] = ()) -> None:
    code = _command(source, target, options)
    if code != 0:
        raise PromiseBrokenError(f"ckpt cp ended with {code}")


def _on_disk(point: _Point, source: Path, folder: Path, before: str) -> list[Outcome]:
    for attempt in range(_ATTEMPTS):
        target = _prepare(folder / f"{point.sweep}-{point.when}-{point.number}-{attempt}", point.sweep)
        child = forks.forked(partial(_killed_on_disk, point, source, target))
        if child.killed:
            break  # else another order of threads had fewer calls
    look = partial(_look, LocalStorage(target), source, before, str(target), ())
    resumed, problem = seen(look)
    problem = problem or _strays(target, point.sweep) or ("" if child.killed else f"not killed: {child.told}")
    shutil.rmtree(target, ignore_errors=True)
    return [_outcome(point, child, resumed, problem)]


def _killed_on_disk(point: _Point, source: Path, target: Path, tell: forks.Tell) -> None:
    trap = Trap(point.number, point.when, everyone=False)
    trap.spring(target, lambda: _copied(source, str(target)))
    tell("copied")


def _look(storage: Storage, source: Path, before: str, target: str, options: Sequence[str], /) -> int:
    """What counts at the target, 0 for nothing; then the same command completes the copy."""
    if _digest(source) != before:
        raise PromiseBrokenError("the source was changed")
    found = [info.step for info in Catalog(storage).committed()]
    _require_whole(storage)
    _copied(source, target, options)
    if [info.step for info in Catalog(storage).committed()] != [STEP]:
        raise PromiseBrokenError("the second command did not complete the copy")
    _require_whole(storage)
    return max(found, default=0)


def _require_whole(storage: Storage) -> None:
    broken = {info.name: verify(storage, info.name) for info in Catalog(storage).committed()}
    if any(broken.values()):
        raise PromiseBrokenError(f"what counts at the target is damaged: {broken}")


def _strays(target: Path, sweep: str) -> str:
    """What was left behind, or of the user's was lost."""
    strays = {path.name for path in target.iterdir()} - {NAME, "writer.json.lock"}
    if strays:
        return f"left behind: {sorted(strays)}"
    texts = sorted(
        path.read_text()
        for path in (target / NAME).iterdir()
        if path.suffix == ".txt" or "yours" in path.name
    )
    expected = ["mine", "mine, by that name"] if sweep == "theirs" else []
    return "" if texts == expected else f"of the user's files there are {texts}"


def _outcome(point: _Point, child: forks.Child, resumed: int | None, problem: str) -> Outcome:
    return Outcome(
        sweep=_SWEEPS[point.sweep],
        point=f"{point.when} {point.number}, {point.label}",
        kills=int(child.killed),
        acknowledged=STEP if "copied" in child.told else 0,
        resumed=resumed,
        problem=problem,
    )


def _options(found: Service, who: str) -> list[str]:
    options = {
        "key": who,
        "secret": "testing",
        "endpoint_url": found.endpoint,
        "write_block_bytes": 5 * MIB,
        "request_seconds": 20.0,
    }
    return [
        word for key, value in options.items() for word in ("--storage-option", f"{key}={json.dumps(value)}")
    ]


def _points_in_bucket(found: Service, source: Path) -> list[_Point]:
    """Every request, from a rehearsal."""
    begun = len(found.control.log())
    _in_child(lambda: _copied(source, f"s3://{BUCKET}/rehearsal", _options(found, "copier")))
    log = [each for each in found.control.log(begun) if each.who == "copier" and "rehearsal/" in each.target]
    forks.forked(lambda _tell: sweep_away(found, "rehearsal"))
    return [
        _Point(sweep="s3", number=number, when=when, label=f"{request.method} {request.target}")
        for number, request in enumerate(log)
        for when in (("before",) if request.method in _READS else ("before", "after"))
    ]


def _in_child(act: Callable[[], None]) -> None:
    forks.answer(act)


def _in_bucket(found: Service, point: _Point, source: Path, before: str, root: str) -> Outcome:
    target, begin = f"s3://{BUCKET}/{root}", forks.Gate()

    def be(_rank: int, tell: forks.Tell) -> None:
        begin.wait()
        _copied(source, target, _options(found, "copier"))
        tell("copied")

    with forks.ranks(1, be) as children:
        action = "kill" if point.when == "before" else "kill_after"
        pids = [children[0].pid]
        found.control.set(fault_at(root, action=action, who="copier", nth=point.number, count=1, pids=pids))
        begin.open()
        forks.gather(children)
    begin.discard()
    found.control.clear()
    options = _options(found, "inspector")
    resumed, problem = seen(lambda: _look(found.storage(root), source, before, target, options))
    if not problem:
        problem = seen(lambda: assert_clean(found, root, STEP) or 0)[1]
    forks.forked(lambda _tell: sweep_away(found, root))
    problem = problem or ("" if children[0].killed else f"not killed: {children[0].told}")
    return _outcome(point, children[0], resumed, problem)
