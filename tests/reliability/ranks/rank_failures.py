"""Ranks, stores and connections that fail at every place of a save and of a load; what all others are told.

Of every case four things are asked: nobody waits beyond the deadline, whoever is left is told which rank and
what it was to do, a fresh job finds what was acknowledged, and if the ranks come back so do the saves.
"""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.crashing import forks
from benchmarks.crashing.outcome import Outcome, problems
from benchmarks.crashing.rank_lives import (
    AGAIN,
    DEADLINE_SECONDS,
    FIRST,
    STORAGE_PLACES,
    Cell,
    Gate,
    Kind,
    Life,
    is_exact,
    manager,
    prepare,
    state_of,
)
from ckpt_core.commit import Catalog, verify
from ckpt_core.storage import LocalStorage

_KINDS: Final[tuple[Kind, ...]] = ("dies", "is stopped", "is busy", "raises")
_COORDINATOR_ONLY: Final = {
    "open",
    "commit: manifest",
    "commit: marker",
    "commit: rename",
    "prune",
    "load: look",
}
_BOUND_SECONDS: Final = 4 * DEADLINE_SECONDS + 12.0
"""Within what every call must have returned: what we promise, and room for a machine that is busy."""

_IDLE: Final = "nothing went wrong: the case tried nothing"
_LIMIT_SECONDS: Final = 100.0
_JOBS: Final = 6

# Place -> what the message must tell of where the victim was.
_PHASES: Final = {
    "decide": "while deciding whether to save",
    "capture": "while agreeing on a save|phase plan",
    "open": "phase open|phase write",
    "write": "phase write",
    "sync": "phase write",
    "commit": "phase commit|phase write|not known whether",
    "prune": "while deciding whether to save|while agreeing on a save|phase plan|pruning|phase open",
    "load": "while|could not be read|partly overwritten|relay",
}


def cells() -> list[Cell]:
    """Every case."""
    places = ["decide", "capture", *STORAGE_PLACES]
    ranks = [
        Cell(place=place, kind=kind, victim=victim, world_size=world_size)
        for place in places
        for kind in _KINDS
        for world_size, victims in ((2, (0, 1)), (3, (1,)))
        for victim in victims
        if victim == 0 or place not in _COORDINATOR_ONLY
    ]
    others: tuple[Kind, ...] = ("store dies", "store stands still", "store file is removed")
    stores = [Cell(place="network", kind=kind, victim=-1) for kind in others]
    resets = [
        Cell(place="network", kind="connections are reset", victim=victim, world_size=world_size)
        for world_size, victim in ((2, 0), (2, 1), (3, 1))
    ]
    return ranks + stores + resets


def run(*, seed: int, folder: Path, count: int | None) -> Iterator[Outcome]:
    """Try every case, or `count` of them, drawn by `seed`, each on a fresh copy of a root."""
    chosen = cells()
    if count is not None:
        chosen = random.Random(seed).sample(chosen, min(count, len(chosen)))
    yield from run_cells(chosen, folder)


def run_cells(chosen: Sequence[Cell], folder: Path, jobs: int = _JOBS) -> Iterator[Outcome]:
    """Try these cases, several at once: they mostly wait for a deadline."""
    torch.set_num_threads(1)
    forks.answer(lambda: prepare(folder / "template"))
    tasks = [partial(_tried, cell, folder, number) for number, cell in enumerate(chosen)]
    for found in forks.spread(tasks, jobs):
        yield Outcome(**found)


def _tried(cell: Cell, folder: Path, number: int) -> dict[str, Any]:
    """What the case came to; a machine too busy to get as far as the fault gets a second chance."""
    found = _try(cell, folder, f"{number}")
    return _try(cell, folder, f"{number}-again") if _IDLE in found["problem"] else found


def _try(cell: Cell, folder: Path, name: str) -> dict[str, Any]:
    root = folder / f"ranks-{name}"
    shutil.copytree(folder / "template", root)
    children, broken = _Job(cell, root, folder / f"store-{name}").run()
    told = [message for child in children for message in child.told if isinstance(message, dict)]
    acknowledged = max((each["committed"] for each in told if "committed" in each), default=FIRST)
    broken += _complaints(cell, children)
    try:
        resumed = forks.answer(lambda: inspect(root, acknowledged))
    except RuntimeError as error:
        resumed = None
        broken.append(str(error).strip().rpartition("\n")[2])
    shutil.rmtree(root)
    victim = "the job" if cell.victim < 0 else f"rank {cell.victim}"
    return {
        "sweep": f"ranks: {cell.kind}",
        "point": f"{cell.place}, {victim} of {cell.world_size}",
        "kills": int(cell.kind == "dies"),
        "acknowledged": acknowledged,
        "resumed": resumed,
        "problem": "; ".join(broken),
    }


class _Job:
    """The ranks of one case, the store they meet at, and the one who breaks things."""

    def __init__(self, cell: Cell, root: Path, store_file: Path) -> None:
        self._cell = cell
        self._root = root
        self._store_file = store_file
        self._server = None if cell.kind == "store file is removed" else forks.StoreServer()
        self._begin, self._end = Gate(), Gate()
        self._children: list[forks.Child] = []

    def run(self) -> tuple[list[forks.Child], list[str]]:
        """The ranks, when they have ended, and who did not."""
        for rank in range(self._cell.world_size):
            self._children.append(forks.fork(partial(self._be, rank)))
        try:
            self._hear("loaded")
            self._break_store()
            self._begin.open()
            self._hear("waits")
            self._mend()
            self._end.open()
            late = forks.gather(self._children, _LIMIT_SECONDS)
        finally:
            if self._server is not None:
                self._server.close()
        return self._children, [f"rank {rank} never ended" for rank in late]

    def _be(self, rank: int, tell: forks.Tell) -> None:
        self._begin.enter_child()
        self._end.enter_child()
        if self._server is not None:
            os.environ["STORE_PORT"] = str(self._server.port)
            self._server.join("job", rank, self._cell.world_size)
        else:
            self._join_by_file(rank)
        Life(self._cell, rank, self._root, begin=self._begin, end=self._end, tell=tell).live()

    def _join_by_file(self, rank: int) -> None:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(str(self._store_file), self._cell.world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self._cell.world_size)

    def _hear(self, word: str) -> None:
        """Listen until every rank that can has said so, or has gone further, or has ended."""
        deadline = time.monotonic() + _LIMIT_SECONDS
        silent = {self._cell.victim} if self._cell.silences else set[int]()
        while time.monotonic() < deadline:
            waiting = [
                child
                for rank, child in enumerate(self._children)
                if rank not in silent and child.status is None and not _has_said(child, word)
            ]
            if not waiting:
                return
            ready, _, _ = select.select([child.stream for child in waiting], [], [], 1.0)
            for child in waiting:
                if child.stream in ready:
                    child.listen()

    def _break_store(self) -> None:
        match self._cell.kind:
            case "store dies":
                self._signal_server(signal.SIGKILL)
            case "store stands still":
                self._signal_server(signal.SIGSTOP)
            case "store file is removed":
                self._store_file.unlink()
            case _:
                pass

    def _mend(self) -> None:
        match self._cell.kind:
            case "store stands still":
                self._signal_server(signal.SIGCONT)
            case "is stopped":
                os.kill(self._children[self._cell.victim].pid, signal.SIGCONT)
            case _:
                pass

    def _signal_server(self, number: int) -> None:
        assert self._server is not None
        os.kill(self._server.pid, number)


def _has_said(child: forks.Child, word: str) -> bool:
    return any(word in message or "waits" in message for message in child.told)


def _complaints(cell: Cell, children: Sequence[forks.Child]) -> list[str]:
    """What was promised of this case, and does not hold."""
    found: list[str] = []
    if cell.victim >= 0 and not any(each.get("struck") for each in children[cell.victim].told):
        found.append(_IDLE)
    for rank, child in enumerate(children):
        if cell.kind == "dies" and rank == cell.victim:
            if not child.killed:
                found.append(f"rank {rank} did not die")
            continue
        crashes = [each["error"] for each in child.told if "error" in each and "what" not in each]
        found += [f"rank {rank} broke: {text.strip().rpartition(chr(10))[2]}" for text in crashes]
        found += _complaints_of(cell, rank, [each for each in child.told if "what" in each])
    return found


def _complaints_of(cell: Cell, rank: int, told: Sequence[dict[str, Any]]) -> list[str]:
    found = [
        f"rank {rank}: {each['what']} took {each['seconds']:.1f} s"
        for each in told
        if each["seconds"] > _BOUND_SECONDS
    ]
    if cell.place == "decide" and cell.kind == "raises" and rank == cell.victim:
        told = [each for each in told if each.get("text") != "broken on purpose"]  # in its own code
    foreign = [each for each in told if each.get("error") in {"RuntimeError", "DistStoreError"}]
    found += [f"rank {rank}: {each['what']} raised {each['error']}: {each['text']}" for each in foreign]
    refused = [each for each in told if "error" in each and each["what"] in {"load", "save"}]
    if _must_tell(cell, rank) and not refused:
        found.append(f"rank {rank} was told nothing")
    found += [text for each in refused[:1] if (text := _unclear(cell, rank, each["text"]))]
    again = [each for each in told if each["what"] == "again"]
    if not cell.is_lasting and (not again or "error" in again[-1]):
        found.append(f"rank {rank} could not save again: {again[-1]['text'] if again else 'it never tried'}")
    if not any(each["what"] == "close" for each in told):
        found.append(f"rank {rank} did not come to close its manager")
    return found


def _must_tell(cell: Cell, rank: int) -> bool:
    """Whether an error must reach every rank: a lost connection is made up for, a broken prune is logged."""
    if cell.kind == "connections are reset":
        return False
    if cell.place == "decide" and cell.kind == "raises" and rank == cell.victim:
        return False
    return not (cell.place == "prune" and cell.kind == "raises")


def _unclear(cell: Cell, rank: int, text: str) -> str:
    """What a message does not tell that it should."""
    if cell.victim < 0:
        # A FileStore comes back empty when somebody writes to it: then ranks do not find one another.
        told = "the job's store" in text or "did not arrive" in text
        return "" if told else f"rank {rank} is not told of the store: {text}"
    if not re.search(rf"rank(\(s\))? {cell.victim}\b", text):
        return f"rank {rank} is not told that it was rank {cell.victim}: {text}"
    phase = _PHASES.get(cell.place) or _PHASES.get(cell.place.partition(":")[0].split()[0], "")
    return "" if re.search(phase, text) else f"rank {rank} is not told where, {phase}: {text}"


def inspect(root: Path, acknowledged: int) -> int:
    """What a fresh job finds: the newest is whole and exact, what is torn is collected, and saves go on."""
    storage = LocalStorage(root)
    infos = Catalog(storage).committed()
    broken = [info.name for info in infos if verify(storage, info.name)]
    state = state_of(0)
    with manager(root, deadline_seconds=60.0) as checkpoints:
        step = checkpoints.resume(state)
        assert step is not None, "nothing to resume from"
        assert not broken, f"committed and damaged: {broken}"
        assert step >= acknowledged, f"step {acknowledged} was acknowledged, {step} was resumed"
        assert step == max(info.step for info in infos), f"step {step} is not the newest"
        assert is_exact(state, step), f"step {step} holds other values"
        torn = Catalog(storage).torn()
        assert not torn, f"not collected: {torn}"
        checkpoints.save(AGAIN + step, state_of(AGAIN + step)).result()
    return step


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> int:
    """Try the cases whose names begin with one of the arguments, or all; print what each came to."""
    import tempfile

    def wanted(cell: Cell) -> bool:
        name = f"{cell.place}/{cell.kind}/{cell.victim}/{cell.world_size}"
        return not arguments or any(name.startswith(each) for each in arguments)

    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        outcomes = list(run_cells([cell for cell in cells() if wanted(cell)], Path(folder)))
    for outcome in outcomes:
        print(f"{outcome.sweep}, {outcome.point}: {outcome.problem or 'as promised'}")
    print(f"{len(outcomes)} cases, {len(problems(outcomes))} problems")
    return bool(problems(outcomes))


if __name__ == "__main__":
    sys.exit(main())
