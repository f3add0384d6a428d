"""Storage that fails below us at every system call: refused, told on all ranks, nothing lost, and back again.

Faults are put in at the system calls themselves, so that our own code above them is what is tried: half
writes, failed fsyncs, calls that hang.
"""

from __future__ import annotations

import random
import select
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.crashing import forks
from benchmarks.crashing.fault_cells import Cell, cells
from benchmarks.crashing.fault_lives import Life
from benchmarks.crashing.outcome import Outcome, problems
from benchmarks.crashing.rank_lives import FIRST, Gate, prepare
from benchmarks.crashing.ranks import inspect

_ROOM_SECONDS: Final = 12.0
"""For a machine that is busy, beyond what we promise."""

_IDLE: Final = "nothing went wrong: the case tried nothing"
_LIMIT_SECONDS: Final = 100.0
_JOBS: Final = 6


def run(*, seed: int, folder: Path, count: int | None) -> Iterator[Outcome]:
    """Try every case, or `count` of them, drawn by `seed`, each on a fresh copy of a root."""
    chosen = list(cells())
    if count is not None:
        chosen = random.Random(seed).sample(chosen, min(count, len(chosen)))
    yield from run_cells(chosen, folder)


def run_cells(chosen: Sequence[Cell], folder: Path, jobs: int = _JOBS) -> Iterator[Outcome]:
    """Try these cases, several at once."""
    torch.set_num_threads(1)
    forks.answer(lambda: prepare(folder / "template"))
    server = forks.StoreServer()
    try:
        tasks = [partial(_tried, cell, folder, number, server) for number, cell in enumerate(chosen)]
        for found in forks.spread(tasks, jobs):
            yield Outcome(**found)
    finally:
        server.close()


def _tried(cell: Cell, folder: Path, number: int, server: forks.StoreServer) -> dict[str, Any]:
    """What the case came to; a machine too busy to get as far as the fault gets a second chance."""
    found = _try(cell, folder, f"faults-{number}", server)
    return _try(cell, folder, f"faults-{number}-again", server) if _IDLE in found["problem"] else found


def _try(cell: Cell, folder: Path, name: str, server: forks.StoreServer) -> dict[str, Any]:
    root = folder / name
    shutil.copytree(folder / "template", root)
    end = Gate()

    def be(rank: int, tell: forks.Tell) -> None:
        end.enter_child()
        if cell.world_size > 1:
            server.join(name, rank, cell.world_size)
        Life(cell, rank, root, end=end, tell=tell).live()

    children = [forks.fork(partial(be, rank)) for rank in range(cell.world_size)]
    _hear(children, "waits")
    end.open()
    broken = [f"rank {rank} never ended" for rank in forks.gather(children, _LIMIT_SECONDS)]
    told = [message for child in children for message in child.told]
    acknowledged = max((each["committed"] for each in told if "committed" in each), default=FIRST)
    broken += _complaints(cell, children, str(root))
    try:
        resumed = forks.answer(lambda: inspect(root, acknowledged))
    except RuntimeError as error:
        resumed = None
        broken.append(str(error).strip().rpartition("\n")[2])
    shutil.rmtree(root)
    return {
        "sweep": f"storage faults, local disk: {cell.fault}",
        "point": cell.name,
        "kills": 0,
        "acknowledged": acknowledged,
        "resumed": resumed,
        "problem": "; ".join(broken),
    }


def _hear(children: Sequence[forks.Child], word: str) -> None:
    """Listen until every rank has said so, or has ended."""
    deadline = time.monotonic() + _LIMIT_SECONDS
    while time.monotonic() < deadline:
        silent = [
            child
            for child in children
            if child.status is None and not any(word in message for message in child.told)
        ]
        if not silent:
            return
        ready, _, _ = select.select([child.stream for child in silent], [], [], 1.0)
        for child in silent:
            if child.stream in ready:
                child.listen()


def _complaints(cell: Cell, children: Sequence[forks.Child], root: str) -> list[str]:
    """What was promised of this case, and does not hold."""
    found: list[str] = []
    if not any("struck" in each for child in children for each in child.told):
        found.append(_IDLE)
    for rank, child in enumerate(children):
        crashes = [each["error"] for each in child.told if "error" in each and "what" not in each]
        found += [f"rank {rank} broke: {text.strip().rpartition(chr(10))[2]}" for text in crashes]
        told = [each for each in child.told if "what" in each]
        bound = 4 * cell.deadline_seconds + _ROOM_SECONDS
        late = [each for each in told if each["seconds"] > bound]
        found += [f"rank {rank}: {each['what']} took {each['seconds']:.1f} s" for each in late]
        found += [f"rank {rank}: {text}" for text in _unlike(cell, rank, told, root)]
        again = [each for each in told if each["what"] == "again"]
        if not (cell.hangs and cell.world_size == 1) and (not again or "error" in again[-1]):
            found.append(f"rank {rank} could not save again: {again[-1]['text'] if again else 'never tried'}")
    return found


def _unlike(cell: Cell, rank: int, told: Sequence[dict[str, Any]], root: str) -> Iterator[str]:
    """In what a rank was not told what it should have been."""
    first = next((each for each in told if each["what"] in {"load", "save"}), {})
    error, text = first.get("error"), first.get("text", "")
    if cell.verdict in {"saved", "passed over"}:
        if error:
            yield f"should not have been refused: {text}"
    elif error not in _kinds(cell):
        yield f"{error or 'no error'}, not {' or '.join(_kinds(cell))}: {text}"
    elif (cell.verdict == "in doubt") != bool(first["in_doubt"]):
        yield f"is told the wrong thing of whether it was saved: {text}"
    else:
        yield from (f"is not told {what!r}: {text}" for what in _missing(cell, rank, text, root))


def _missing(cell: Cell, rank: int, text: str, root: str) -> Iterator[str]:
    """What the message must say, and does not."""
    hung_elsewhere = cell.hangs and rank not in cell.ranks
    if not hung_elsewhere and cell.text not in text:
        yield cell.text
    if cell.verdict in {"refused", "in doubt"} and root not in text:
        yield root
    if not cell.is_before_all:
        if cell.verdict == "refused" and f"step {FIRST + 1} was not saved" not in text:
            yield f"step {FIRST + 1} was not saved"
        named = any(f"rank {each}" in text or f"rank(s) {each}" in text for each in cell.ranks)
        if cell.world_size > 1 and not named:
            yield f"rank {sorted(cell.ranks)}"


def _kinds(cell: Cell) -> tuple[str, ...]:
    if cell.is_before_all:
        return ("ConfigError",)
    if cell.verdict == "not loaded":
        return ("LoadError", "CoordinationError")
    return ("SaveError",)


def main(arguments: Sequence[str] = tuple(sys.argv[1:])) -> int:
    """Try the cases whose names begin with one of the arguments, or all; print what each came to."""
    import tempfile

    chosen = [
        cell for cell in cells() if not arguments or any(cell.name.startswith(each) for each in arguments)
    ]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        outcomes = list(run_cells(chosen, Path(folder)))
    for outcome in outcomes:
        print(f"{outcome.point}: {outcome.problem or 'as promised'}")
    print(f"{len(outcomes)} cases, {len(problems(outcomes))} problems")
    return bool(problems(outcomes))


if __name__ == "__main__":
    sys.exit(main())
