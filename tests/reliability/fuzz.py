"""What readers make of bytes that nobody honest wrote: mutations, with a cap on memory and time.

Damage that a checksum finds is `benchmarks.damage`; here the checksums are those of the mutated bytes, as of
whoever may write to the storage. A reader may give a value or refuse with an error of `ckpt_core.errors`.
Anything else is counted: another exception, a crash or a hang of the process, more memory than the cap, an
unpickler without a guard, and, where a reader has a checksum of its own that was left alone, another value.
Run as `python -m benchmarks.fuzz --mutations 10000 --json out.json`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, final

from benchmarks.fuzzing import mutations
from ckpt_core.errors import CheckpointError

MEMORY_CAP: Final = 1 << 30
"""Above what the process has when it begins."""
SECONDS: Final = 20
"""For one mutation, on however busy a machine."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A mutation that broke a promise."""

    reader: str
    number: int
    kind: str
    detail: str


@final
@dataclass(kw_only=True, slots=True)
class Result:
    """What became of the mutations of one reader."""

    reader: str
    counts: Counter[str]
    findings: list[Finding]
    seconds: float = 0.0


def mutation(reader: str, seed: int, number: int) -> mutations.Mutation:
    """The mutation of that number: the same in every process."""
    from benchmarks.fuzzing.readers import READERS

    return mutations.mutate(READERS[reader].seeds(), random.Random(f"{seed} {reader} {number}"))


def attempt(reader: str, made: mutations.Mutation) -> tuple[str, str]:
    """What one reader makes of one mutation: `read`, `refused`, or what is wrong, and the words for it."""
    from benchmarks.fuzzing.readers import READERS

    chosen = READERS[reader]
    try:
        value = chosen.read(made.content)
    except CheckpointError as error:
        return "refused", type(error).__name__
    except MemoryError as error:
        return "memory", repr(error)
    except Exception as error:  # noqa: BLE001 - that is what is being counted
        return "exception", f"{type(error).__name__}: {error!s:.300}"
    if chosen.checked and not made.forged and repr(value) != chosen.expected(made.origin):
        return "wrong", f"{value!r:.300}"
    return "read", ""


def work(readers: Sequence[str], place: Path, *, seed: int, first: int, count: int) -> None:
    """Give each reader its mutations; results go to standard output, the present one's number to `place`."""
    ran: list[str] = []
    sys.addaudithook(lambda event, found: ran.append(str(found)) if event in _EXECUTES else None)
    with place.open("r+b") as stream, mmap.mmap(stream.fileno(), 16) as position:
        for index, reader in enumerate(readers):
            _warm_up(reader)
            _cap_memory()
            started, counts = time.monotonic(), Counter[str]()
            for number in range(first if index == 0 else 0, count):
                position[:16] = struct.pack("<QQ", index, number)
                made = mutation(reader, seed, number)
                ran.clear()
                signal.alarm(SECONDS)
                kind, detail = attempt(reader, made)
                signal.alarm(0)
                kind, detail = ("executed", ran[0]) if ran else (kind, detail)
                counts[kind] += 1
                if kind not in {"read", "refused"}:
                    print(json.dumps(["finding", reader, number, kind, detail]), flush=True)
            print(json.dumps(["done", reader, counts, time.monotonic() - started]), flush=True)


_EXECUTES: Final = frozenset({"pickle.find_class", "os.system", "os.exec", "os.mkdir", "subprocess.Popen"})


def _warm_up(reader: str) -> None:
    """Let everything be imported and allocated that an honest reading needs."""
    from benchmarks.fuzzing.readers import READERS

    for origin in READERS[reader].seeds():
        READERS[reader].read(origin)


def _cap_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_CAP
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))


def run(readers: Sequence[str], count: int, seed: int) -> list[Result]:
    """Fuzz these readers in a process of their own, and in another one after each that dies."""
    results = {reader: Result(reader=reader, counts=Counter(), findings=[]) for reader in readers}
    left, first = list(readers), 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        place = Path(folder) / "position"
        while left:
            place.write_bytes(bytes(16))
            arguments = ["--worker", ",".join(left), "--first", first, "--mutations", count, "--seed", seed]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.fuzz", *map(str, arguments), "--place", str(place)],
                stdout=subprocess.PIPE,
                text=True,
                check=False,
            )
            _collect(results, done.stdout)
            if done.returncode == 0:
                break
            if done.returncode > 0:
                raise SystemExit(f"the readers cannot read what is honest: {done.returncode}")
            index, number = struct.unpack("<QQ", place.read_bytes())
            kind = "hang" if done.returncode == -signal.SIGALRM else "crash"
            results[left[index]].counts[kind] += 1
            results[left[index]].counts["passed"] += number - (first if index == 0 else 0)
            told = f"the process ended with {done.returncode}"
            results[left[index]].findings.append(
                Finding(reader=left[index], number=number, kind=kind, detail=told)
            )
            left, first = left[index:], number + 1
    return list(results.values())


def _collect(results: dict[str, Result], output: str) -> None:
    for line in output.splitlines():
        kind, reader, *rest = json.loads(line)
        if kind == "finding":
            number, what, detail = rest
            results[reader].findings.append(Finding(reader=reader, number=number, kind=what, detail=detail))
        else:
            counts, seconds = rest
            results[reader].counts.update(counts)
            results[reader].seconds += seconds


def table(results: Sequence[Result]) -> str:
    """Outcomes by reader."""
    kinds = ("read", "refused", "exception", "memory", "executed", "wrong", "hang", "crash")
    lines = [f"{'reader':18}{'mutations':>10}" + "".join(f"{kind:>10}" for kind in kinds) + f"{'seconds':>9}"]
    for result in results:
        counts = "".join(f"{result.counts[kind]:10}" for kind in kinds)
        lines.append(f"{result.reader:18}{result.counts.total():10}{counts}{result.seconds:9.1f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 if anything was found."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fuzz", description=__doc__)
    parser.add_argument("--mutations", type=int, default=1000, help="for each reader")
    parser.add_argument("--reader", action="append", help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write counts and findings there")
    for hidden in ("--worker", "--place"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, default=0, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.worker:
        readers, place = chosen.worker.split(","), Path(chosen.place)
        work(readers, place, seed=chosen.seed, first=chosen.first, count=chosen.mutations)
        return 0
    from benchmarks.fuzzing.readers import READERS

    results = run(chosen.reader or list(READERS), chosen.mutations, chosen.seed)
    print(table(results))
    findings = [finding for result in results for finding in result.findings]
    for finding in findings[:40]:
        print(finding)
    if chosen.json is not None:
        rows: list[Any] = [[each.reader, each.counts, each.seconds] for each in results]
        fields = {"seed": chosen.seed, "readers": rows, "findings": [asdict(each) for each in findings]}
        chosen.json.write_text(json.dumps(fields))
    return 1 if findings else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads would take of the memory that is capped
    sys.exit(main())
