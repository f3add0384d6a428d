"""Ranks, stores and connections that fail at every place of a save and of a load; what all others are told.

Of every case four things are asked: nobody waits beyond the deadline, who is left hears which rank it was and
what it was to do, a fresh job finds what was acknowledged, and if the ranks come back so do the saves.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, final

from ckpt_core.storage import Storage
from ckpt_core.testing import Fault, FaultyStorage
from tests.reliability import forks
from tests.reliability.outcome import Choice, Outcome
from tests.reliability.ranks.experiment import experiments
from tests.reliability.ranks.life import Case, Trouble

Kind = Literal[
    "dies",
    "is stopped",
    "is busy",
    "raises",
    "store dies",
    "store is stopped",
    "store file is removed",
    "connections are reset",
]

_KINDS: Final[tuple[Kind, ...]] = ("dies", "is stopped", "is busy", "raises")
_STORE_FAULTS: Final[dict[Kind, str]] = {
    "store dies": "is killed",
    "store is stopped": "is stopped",
    "store file is removed": "is removed",
}

STORAGE_PLACES: Final = {
    "open": ("make_directory", "*step-000000003*"),
    "write tensors": ("create", "*step-000000003*.distcp"),
    "write small files": ("create", "*step-000000003*.json"),
    "sync": ("sync_directory", "*step-000000003*"),
    "commit: manifest": ("create", "*step-000000003*/manifest.json"),
    "commit: marker": ("create", "*step-000000003*/COMMITTED"),
    "commit: rename": ("rename", "*step-000000003* -> step-000000003"),
    "prune": ("rename", "step-000000001 -> *"),
    "load: look": ("list", ""),
    "load: open": ("open", "step-000000002/*"),
    "load: verify": ("open_ranges", "step-000000002/*.distcp"),
    "load: fetch": ("read_into", "step-000000002/*.distcp"),
}
"""Place -> the storage operation before which the fault strikes, of those that go by one."""

_READS_BEFORE_FETCH: Final = {0: 2}
"""How often a rank reads of a data file to verify it: once, and the lowest once more."""

_COORDINATOR_ONLY: Final = {
    "open",
    "commit: manifest",
    "commit: marker",
    "commit: rename",
    "prune",
    "load: look",
}

# Place -> what the message must tell of where the victim was.
_PHASES: Final = {
    "decide": "while deciding whether to save",
    "capture": "while agreeing on a save|phase plan",
    "open": "phase open|phase write",
    "write": "phase write",
    "sync": "phase write",
    "commit": "phase commit|phase write|not known whether",
    "prune": "while deciding whether to save|while agreeing on a save|phase plan|pruning|phase open",
    "load": "while|could not be (read|loaded)|partly overwritten|broadcast of",
}
_BROKEN: Final = "broken on purpose"


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankFailure(Case):
    """A rank, a store or a connection that fails.

    Attributes:
        place: where the victim is when it fails.
        kind: how it fails.
        victim: its rank; -1 if it is no rank.
        world_size: how many ranks.
    """

    place: str
    kind: Kind
    victim: int
    world_size: int = 2

    def __str__(self) -> str:
        return f"{self.place}/{self.kind}/{self.victim}/{self.world_size}"

    @property
    def reloads(self) -> bool:
        return self.place.startswith("load")  # a state that was loaded in part is not saved

    @property
    def sweep(self) -> str:
        return f"ranks: {self.kind}"

    @property
    def point(self) -> str:
        victim = "the job" if self.victim < 0 else f"rank {self.victim}"
        return f"{self.place}, {victim} of {self.world_size}"

    @property
    def dying(self) -> frozenset[int]:
        return frozenset({self.victim} if self.kind == "dies" else ())

    @property
    def silent(self) -> frozenset[int]:
        return frozenset({self.victim} if self.kind in {"dies", "is stopped", "is busy"} else ())

    @property
    def store_fault(self) -> str:
        return _STORE_FAULTS.get(self.kind, "")

    @property
    def strikes(self) -> bool:
        return self.victim >= 0

    @property
    def lasts(self) -> bool:
        return self.kind in {"dies", "store dies", "store file is removed"}

    def trouble(self, rank: int, root: Path, end: forks.Gate, tell: forks.Tell) -> Trouble:
        """What the victim does wrong."""
        del root
        return _FailingRank(self, end, tell) if rank == self.victim else Trouble()

    def complaints(self, rank: int, told: Sequence[dict[str, Any]], root: str) -> Collection[str]:
        """What a rank should have been told, and was not."""
        del root
        if self.place == "decide" and self.kind == "raises" and rank == self.victim:
            told = [each for each in told if each.get("text") != _BROKEN]  # in its own code
        foreign = [each for each in told if "error" in each and not each["ours"]]
        found = [f"{each['what']} raised {each['error']}: {each['text']}" for each in foreign]
        refused = [each for each in told if "error" in each and each["what"] in {"load", "save"}]
        if self._must_tell(rank) and not refused:
            found.append("it was told nothing")
        return found + [text for each in refused[:1] if (text := self._unclear(each["text"]))]

    def _must_tell(self, rank: int) -> bool:
        """Whether an error must reach a rank: a lost connection is made up for, a broken prune is logged."""
        if self.kind == "connections are reset":
            return False
        if self.place == "decide" and self.kind == "raises" and rank == self.victim:
            return False
        return not (self.place == "prune" and self.kind == "raises")

    def _unclear(self, text: str) -> str:
        """What a message does not tell that it should."""
        if self.victim < 0:
            # A FileStore comes back empty when somebody writes to it: then ranks do not find one another.
            told = "the job's store" in text or "did not arrive" in text
            return "" if told else f"the store is not named: {text}"
        if not re.search(rf"rank(\(s\))? {self.victim}\b", text):
            return f"rank {self.victim} is not named: {text}"
        phase = _PHASES.get(self.place) or _PHASES.get(self.place.partition(":")[0].split()[0], "")
        return "" if re.search(phase, text) else f"{phase} is not named: {text}"


@final
class _FailingRank(Trouble):
    """How the victim fails, once, at its place."""

    def __init__(self, case: RankFailure, end: forks.Gate, tell: forks.Tell) -> None:
        self._case = case
        self._end = end
        self._tell = tell
        self._struck = False

    def around(self, storage: Storage) -> Storage:
        """Fails before the operation of its place."""
        where = STORAGE_PLACES.get(self._case.place)
        if where is None:
            return storage
        nth = _READS_BEFORE_FETCH.get(self._case.victim, 1) if self._case.place == "load: fetch" else 0
        return FaultyStorage(storage, [Fault(method=where[0], key=where[1], nth=nth, before=self._strike)])

    def before_saving(self) -> None:
        if self._case.kind == "connections are reset" and reset_connections():
            self._tell({"struck": True})

    def deciding(self) -> None:
        if self._case.place == "decide":
            self._strike()

    def capturing(self) -> None:
        if self._case.place == "capture":
            self._strike()

    def _strike(self, *_: Any) -> None:
        if self._struck:
            return
        self._struck = True
        self._tell({"struck": True})
        match self._case.kind:
            case "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            case "is stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "is busy":
                while not self._end.is_open():
                    pass
            case _:
                raise RuntimeError(_BROKEN)


def reset_connections() -> int:
    """Shut the TCP connections of this process to other ranks, as a network does that fails; how many."""
    store, count = int(os.environ["MASTER_PORT"]), 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as duplicate:
            if duplicate.family in {socket.AF_INET, socket.AF_INET6} and duplicate.getpeername()[1] != store:
                duplicate.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def cases() -> Iterator[RankFailure]:
    """Every case."""
    for place in ("decide", "capture", *STORAGE_PLACES):
        for kind in _KINDS:
            for world_size, victim in ((2, 0), (2, 1), (3, 1)):
                if victim == 0 or place not in _COORDINATOR_ONLY:
                    yield RankFailure(place=place, kind=kind, victim=victim, world_size=world_size)
    for kind in _STORE_FAULTS:
        yield RankFailure(place="network", kind=kind, victim=-1)
    for world_size, victim in ((2, 0), (2, 1), (3, 1)):
        yield RankFailure(place="network", kind="connections are reset", victim=victim, world_size=world_size)


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Try every case, or the chosen ones, each on a fresh copy of a root."""
    yield from experiments(choice, cases(), folder)
