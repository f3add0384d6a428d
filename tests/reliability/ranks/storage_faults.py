"""Storage that fails below us at every system call: refused, told on all ranks, nothing lost, and back again.

Faults are put in at the system calls themselves, so that our own code above them is what is tried: half
writes, failed fsyncs, calls that hang.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

from ckpt_core.testing import Fault, Operation
from tests.reliability import forks
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.ranks.experiment import experiments
from tests.reliability.ranks.life import FIRST, Case, Trouble
from tests.support.system_calls import ShortWrite, SystemCalls

Who = Literal["one worker", "the coordinator", "all"]
Verdict = Literal["refused", "in doubt", "saved", "not loaded", "passed over"]

_NEW: Final = "step-000000003"
_WORK: Final = f".incomplete-*-{_NEW}~"

PLACES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "take the root": (
        ("create", ".ckpt-suite/.writer.json.*"),
        ("fsync", ".ckpt-suite/.writer.json.*"),
        ("rename", ".ckpt-suite/.writer.json.*"),
    ),
    "open": (("mkdir", _WORK),),
    "data": (("create", f"{_WORK}/*.distcp"), ("write", f"{_WORK}/*.distcp"), ("fsync", f"{_WORK}/*.distcp")),
    "rank's small files": (
        ("create", f"{_WORK}/rank-*.json"),
        ("write", f"{_WORK}/rank-*.json"),
        ("fsync", f"{_WORK}/chunks-*.json.z"),
    ),
    "rank's directory": (("fsync", f".incomplete-{'?' * 24}-{_NEW}~"),),
    ".metadata": (
        ("create", f"{_WORK}/.metadata"),
        ("write", f"{_WORK}/.metadata"),
        ("fsync", f"{_WORK}/.metadata"),
    ),
    "manifest": (
        ("create", f"{_WORK}/manifest.json"),
        ("write", f"{_WORK}/manifest.json"),
        ("fsync", f"{_WORK}/manifest.json"),
    ),
    "marker": (
        ("create", f"{_WORK}/COMMITTED"),
        ("write", f"{_WORK}/COMMITTED"),
        ("fsync", f"{_WORK}/COMMITTED"),
    ),
    "rename": (("rename", f"{_WORK} -> {_NEW}"),),
    "root after the rename": (("fsync", ""),),
    "prune": (
        ("rename", "step-000000001 -> *"),
        ("unlink", ".trash-*-step-000000001~/*"),
        ("rmdir", ".trash-*-step-000000001~"),
    ),
    "load: look": (("list", ""), ("read", "step-000000002/COMMITTED")),
    "load: small files": (
        ("open", "step-000000002/manifest.json"),
        ("read", "step-000000002/chunks-*.json.z"),
    ),
    "load: data": (("open", "step-000000002/*.distcp"), ("read", "step-000000002/*.distcp")),
}
"""Place -> system calls there, method and key as `SystemCalls` names them."""

_ON_COORDINATOR: Final = {
    "take the root",
    "open",
    ".metadata",
    "manifest",
    "marker",
    "rename",
    "root after the rename",
    "prune",
    "load: look",
}
_ERRORS: Final = {
    "create": (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    "write": (errno.ENOSPC, errno.EDQUOT, errno.EIO),
    "fsync": (errno.EIO, errno.ENOSPC),
    "mkdir": (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    "rename": (errno.EROFS, errno.ENOSPC, errno.EIO),
    "unlink": (errno.EROFS, errno.EIO),
    "rmdir": (errno.EROFS, errno.EIO),
    "open": (errno.EIO, errno.ESTALE),
    "read": (errno.EIO,),
    "list": (errno.EIO, errno.ESTALE),
}
_HANGS: Final = (
    ("data", "write"),
    ("data", "fsync"),
    ("rank's small files", "create"),
    ("marker", "fsync"),
    ("rename", "rename"),
    ("root after the rename", "fsync"),
    ("prune", "unlink"),
)
_LOST: Final = {("load: small files", "read"), ("load: data", "open"), ("load: data", "read")}
_SHORT: Final = ("data", "rank's small files", ".metadata", "manifest", "marker")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class StorageFault(Case):
    """A system call that fails.

    Attributes:
        place: which part of a save or a load.
        method: the system call that fails.
        key: on what.
        who: on which ranks.
        world_size: how many there are.
        number: the `errno` it fails with; 0 if it hangs, or writes short.
        short_bytes: how much a write takes at most; 0 if it does not write short.
    """

    place: str
    method: str
    key: str
    who: Who
    world_size: int = 2
    number: int = 0
    short_bytes: int = 0

    def __str__(self) -> str:
        return self.point

    @property
    def sweep(self) -> str:
        return f"storage faults, local disk: {self.fault}"

    @property
    def point(self) -> str:
        return f"{self.place}: {self.method} {self.fault}, {self.who} of {self.world_size}"

    @property
    def saves(self) -> int:
        return 0 if self.reloads else 1

    @property
    def waits(self) -> bool:
        return True

    @property
    def reloads(self) -> bool:
        """Whether the fault is there while the state is loaded; else it is there while a step is saved."""
        return self.place.startswith(("load", "take the root"))

    @property
    def closes_at_once(self) -> bool:
        return self.hangs and self.world_size == 1

    @property
    def is_before_all(self) -> bool:
        """Whether the coordinator cannot even take the root, which comes before every save and `resume`."""
        return self.place == "take the root" or (self.place, self.method) == ("load: look", "list")

    @property
    def hangs(self) -> bool:
        """Whether the call returns only when the fault is over."""
        return not (self.number or self.short_bytes)

    @property
    def deadline_seconds(self) -> float:
        """Of the job: short where it must pass, long where a busy machine must not be taken for a fault."""
        return 6.0 if self.hangs else 20.0

    @property
    def fault(self) -> str:
        """In a word or two."""
        if self.short_bytes:
            return f"at most {self.short_bytes} bytes a write"
        return errno.errorcode[self.number] if self.number else "hangs"

    @property
    def text(self) -> str:
        """What the message says of the fault."""
        return "has made no progress" if self.hangs else os.strerror(self.number)

    @property
    def ranks(self) -> frozenset[int]:
        """Who has the fault."""
        if self.who == "all":
            return frozenset(range(self.world_size))
        return frozenset({0 if self.who == "the coordinator" else 1})

    @property
    def verdict(self) -> Verdict:
        """What must come of it."""
        if self.place.startswith("load"):
            # What the device cannot read is lost; any other error may be gone at the next try.
            lost = self.number == errno.EIO and (self.place, self.method) in _LOST
            return "passed over" if lost else "not loaded"
        # A job starts on a full disk, too: a spare file is there for its claim.
        spared = self.place == "take the root" and self.number in {errno.ENOSPC, errno.EDQUOT}
        if self.short_bytes or self.place == "prune" or spared:
            return "saved"
        committing = self.hangs and self.place in {"marker", "rename"}
        return "in doubt" if committing or self.place == "root after the rename" else "refused"

    def step_loaded(self, *, struck: bool) -> int:
        """The one before, while the newest cannot be read."""
        return FIRST - 1 if struck and self.verdict == "passed over" else FIRST

    def trouble(self, rank: int, root: Path, end: forks.Gate, tell: forks.Tell) -> Trouble:
        """System calls that fail, on the ranks that have the fault."""
        return _FailingCalls(self, SystemCalls(root), end, tell) if rank in self.ranks else Trouble()

    def complaints(self, rank: int, told: Sequence[dict[str, Any]], root: str) -> Collection[str]:
        """What a rank should have been told, and was not."""
        first = next((each for each in told if each["what"] in {"load", "save"} and "error" in each), {})
        error, text = first.get("error"), first.get("text", "")
        if self.verdict in {"saved", "passed over"}:
            return [f"should not have been refused: {text}"] if error else []
        if error not in self._kinds:
            return [f"{error or 'no error'}, not {' or '.join(self._kinds)}: {text}"]
        if (self.verdict == "in doubt") != bool(first["in_doubt"]):
            return [f"the wrong answer to whether it was saved: {text}"]
        return [f"{what!r} is not in: {text}" for what in self._missing(rank, text, root)]

    def _missing(self, rank: int, text: str, root: str) -> Iterator[str]:
        """What the message must say, and does not."""
        hung_elsewhere = self.hangs and rank not in self.ranks
        if not hung_elsewhere and self.text not in text:
            yield self.text
        if self.verdict in {"refused", "in doubt"} and root not in text:
            yield root
        if not self.is_before_all:
            if self.verdict == "refused" and f"step {FIRST + 1} was not saved" not in text:
                yield f"step {FIRST + 1} was not saved"
            named = any(f"rank {each}" in text or f"rank(s) {each}" in text for each in self.ranks)
            if self.world_size > 1 and not named:
                yield f"rank {sorted(self.ranks)}"

    @property
    def _kinds(self) -> tuple[str, ...]:
        if self.is_before_all:
            return ("ConfigError",)
        if self.verdict == "not loaded":
            return ("LoadError", "CoordinationError")
        return ("SaveError",)


@final
class _FailingCalls(Trouble):
    """A fault below the storage of this rank, from its moment until the end."""

    def __init__(self, case: StorageFault, calls: SystemCalls, end: forks.Gate, tell: forks.Tell) -> None:
        self._case = case
        self._calls = calls
        self._end = end
        self._tell = tell
        self._struck = False

    def watching(self) -> AbstractContextManager[Any]:
        return self._calls

    def before_loading(self) -> None:
        if self._case.reloads:
            self._inject()

    def before_saving(self) -> None:
        if self._case.place == "root after the rename":
            rename = Fault(
                method="rename", key=".incomplete-*-step-*~ -> step-*", after=lambda _: self._inject()
            )
            self._calls.inject([rename])
        elif not self._case.reloads:
            self._inject()

    def end(self) -> None:
        self._calls.inject(())

    def _inject(self) -> None:
        case = self._case
        if case.short_bytes:
            fault: Fault = ShortWrite(
                method=case.method, key=case.key, before=self._strike, short_bytes=case.short_bytes
            )
        else:
            error = OSError(case.number, case.text) if case.number else None
            fault = Fault(method=case.method, key=case.key, before=self._strike, error=error)
        self._calls.inject([fault])

    def _strike(self, _: Operation) -> None:
        if not self._struck:
            self._struck = True
            self._tell({"struck": True})
        if self._case.hangs:
            self._end.wait()


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Try every case, or the chosen ones, each on a fresh copy of a root."""
    yield from experiments(choice, cases(), folder)


def cases() -> Iterator[StorageFault]:
    """Every case."""
    for place, calls in PLACES.items():
        for who, world_size in _whos(place):
            for method, key in calls:
                for details in _details(place, method):
                    yield StorageFault(
                        place=place, method=method, key=key, who=who, world_size=world_size, **details
                    )


def _details(place: str, method: str) -> Iterator[dict[str, int]]:
    yield from ({"number": number} for number in _ERRORS[method])
    if method == "write" and place in _SHORT:
        yield from ({"short_bytes": size} for size in ((1, 1000) if place != "data" else (1000, 6000)))
    if (place, method) in _HANGS:
        yield {}


def _whos(place: str) -> Iterator[tuple[Who, int]]:
    yield "the coordinator", 1
    yield "the coordinator", 2
    if place not in _ON_COORDINATOR:
        yield "one worker", 2
        yield "all", 2
