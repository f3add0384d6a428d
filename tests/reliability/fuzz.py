"""What readers make of bytes that nobody honest wrote: mutations, with a cap on memory and time.

Damage that a checksum finds is the part `damage`; here the checksums are those of the mutated bytes, as an
intruder in the storage would make them. A reader may give a value or refuse with an error of
`ckpt_core.errors`. Anything else is a problem: another exception, a crash or a hang of the process, more
memory than the cap, an unpickler without a guard, and, where a reader has a checksum of its own that was left
alone, another value.
"""

from __future__ import annotations

import mmap
import random
import resource
import signal
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Final

from ckpt_core.errors import CheckpointError
from tests.reliability import forks
from tests.reliability.fuzzing import mutations
from tests.reliability.fuzzing.readers import READERS
from tests.reliability.outcome import Choice, Outcome

MUTATIONS: Final = 10_000
"""Of each reader."""
MEMORY_CAP: Final = 1 << 30
"""Above what the process has when it begins."""
SECONDS: Final = 20
"""For one mutation, on however busy a machine."""
_ALL_SECONDS: Final = 36_000.0
_FINE: Final = ("read", "refused")
_RAN: Final[list[str]] = []
"""What the present mutation has made its reader run."""
_EXECUTES: Final = frozenset({"pickle.find_class", "os.system", "os.exec", "os.mkdir", "subprocess.Popen"})


def run(choice: Choice, folder: Path) -> Iterator[Outcome]:
    """Give each reader ten thousand mutations, or as many as are chosen."""
    readers = [each for each in READERS if not choice.named or each in choice.named]
    yield from _fuzzed(readers, choice.seed, choice.least(MUTATIONS), folder)


def mutation(reader: str, seed: int, number: int) -> mutations.Mutation:
    """The mutation of that number: the same in every process."""
    return mutations.mutate(READERS[reader].seeds(), random.Random(f"{seed} {reader} {number}"))


def attempt(reader: str, made: mutations.Mutation) -> tuple[str, str]:
    """What one reader makes of one mutation: `read`, `refused`, or what is wrong, and the words for it."""
    chosen = READERS[reader]
    try:
        value = chosen.read(made.content)
    except CheckpointError as error:
        return "refused", type(error).__name__
    except MemoryError as error:
        return "memory", repr(error)
    except Exception as error:
        return "exception", f"{type(error).__name__}: {error!s:.300}"
    if chosen.checked and not made.forged and repr(value) != chosen.expected(made.origin):
        return "wrong", f"{value!r:.300}"
    return "read", ""


def _fuzzed(readers: Sequence[str], seed: int, count: int, folder: Path) -> Iterator[Outcome]:
    """Fuzz readers in a process of their own, and in another one after each mutation that ends it."""
    left, first = list(readers), 0
    with mmap.mmap(-1, 16) as position:
        while left:

            def work(tell: forks.Tell, left: Sequence[str] = left, first: int = first) -> None:
                tempfile.tempdir = str(folder)
                sys.addaudithook(_note)
                for index, reader in enumerate(left):
                    _warm_up(reader)
                    _cap_memory()
                    for number, outcome in _work(reader, seed, range(0 if index else first, count)):
                        position[:] = struct.pack("<QQ", index, number)
                        if outcome is not None:
                            tell(asdict(outcome))

            child = forks.fork(work)
            forks.gather([child], _ALL_SECONDS)
            for message in child.told:
                if "error" in message:
                    raise RuntimeError(message["error"])
                yield Outcome(**message)
            if child.exit_code == 0:
                return
            index, number = struct.unpack("<QQ", position[:])
            kind = "hang" if child.exit_code == -signal.SIGALRM else "crash"
            passed = number - (0 if index else first)
            yield _outcome(left[index], "passed", times=passed)
            yield _outcome(left[index], kind, number, f"the process ended with {child.exit_code}")
            left, first = left[index:], number + 1


def _outcome(reader: str, kind: str, number: int | None = None, problem: str = "", times: int = 1) -> Outcome:
    point = "" if number is None else f"mutation {number}"
    return Outcome(sweep=f"forgery, {reader}: {kind}", point=point, times=times, problem=problem)


def _work(reader: str, seed: int, numbers: range) -> Iterator[tuple[int, Outcome | None]]:
    """Give a reader its mutations: each number before it is tried, and what became of it once it was."""
    counts = Counter[str]()
    for number in numbers:
        yield number, None
        made = mutation(reader, seed, number)
        _RAN.clear()
        signal.alarm(SECONDS)
        kind, detail = attempt(reader, made)
        signal.alarm(0)
        kind, detail = ("executed", _RAN[0]) if _RAN else (kind, detail)
        if kind in _FINE:
            counts[kind] += 1
        else:
            yield number, _outcome(reader, kind, number, detail or kind)
    for kind, times in counts.items():
        yield numbers[-1], _outcome(reader, kind, times=times)


def _note(event: str, found: object) -> None:
    if event in _EXECUTES:
        _RAN.append(str(found))


def _warm_up(reader: str) -> None:
    """Let everything be imported and allocated that an honest reading needs."""
    for origin in READERS[reader].seeds():
        READERS[reader].read(origin)


def _cap_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_CAP
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
