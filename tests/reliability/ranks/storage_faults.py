"""The storage faults that are tried: which system call fails, how, on whom, and what must come of it."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, final

Who = Literal["one worker", "the coordinator", "all"]
Verdict = Literal["refused", "in doubt", "saved", "not loaded", "passed over"]

_NEW: Final = "step-000000003"
_WORK: Final = f".incomplete-*-{_NEW}"

PLACES: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "take the root": (
        ("create", ".writer.json.*"),
        ("fsync", ".writer.json.*"),
        ("rename", ".writer.json.*"),
    ),
    "open": (("mkdir", _WORK),),
    "data": (("create", f"{_WORK}/*.distcp"), ("write", f"{_WORK}/*.distcp"), ("fsync", f"{_WORK}/*.distcp")),
    "rank's small files": (
        ("create", f"{_WORK}/rank-*.json"),
        ("write", f"{_WORK}/rank-*.json"),
        ("fsync", f"{_WORK}/chunks-*.json"),
    ),
    "rank's directory": (("fsync", f".incomplete-{'?' * 24}-{_NEW}"),),
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
        ("unlink", ".trash-*-step-000000001/*"),
        ("rmdir", ".trash-*-step-000000001"),
    ),
    "load: look": (("list", ""), ("read", "step-000000002/COMMITTED")),
    "load: small files": (("open", "step-000000002/manifest.json"), ("read", "step-000000002/chunks-*.json")),
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
class Cell:
    """One experiment.

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
    def name(self) -> str:
        """For people, and to choose it by."""
        return f"{self.place}: {self.method} {self.fault}, {self.who} of {self.world_size}"

    @property
    def text(self) -> str:
        """What the message says of the fault."""
        return "has not got on" if self.hangs else os.strerror(self.number)

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
        if self.short_bytes or self.place == "prune":
            return "saved"
        committing = self.hangs and self.place in {"marker", "rename"}
        return "in doubt" if committing or self.place == "root after the rename" else "refused"


def cells() -> Iterator[Cell]:
    """Every case."""
    for place, calls in PLACES.items():
        for who, world_size in _whos(place):
            for method, key in calls:
                for number in _ERRORS[method]:
                    yield Cell(
                        place=place, method=method, key=key, who=who, world_size=world_size, number=number
                    )
                if method == "write" and place in _SHORT:
                    for size in (1, 1000) if place != "data" else (1000, 6000):
                        yield Cell(
                            place=place,
                            method=method,
                            key=key,
                            who=who,
                            world_size=world_size,
                            short_bytes=size,
                        )
                if (place, method) in _HANGS:
                    yield Cell(place=place, method=method, key=key, who=who, world_size=world_size)


def _whos(place: str) -> Iterator[tuple[Who, int]]:
    yield "the coordinator", 1
    yield "the coordinator", 2
    if place not in _ON_COORDINATOR:
        yield "one worker", 2
        yield "all", 2
