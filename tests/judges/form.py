"""The figures of the house as a table: one command, before and after each step."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from tests.judges import figures
from tests.judges.figures import ROOT

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ROUNDS = 5


def show(measured: bool) -> None:
    """Print all figures; the measured ones, which take half a minute, if asked for."""
    _rooms()
    _house()
    _privates()
    if measured:
        _starts()
        from tests.judges.hops import show as hops

        hops()


def _rooms() -> None:
    now, (most, _) = figures.rooms(), figures.budget()
    held = {room: [path for path in figures.sources() if figures.room_of(path) == room] for room in now}
    print(
        f"{'room':16}{'lines':>8}{'budget':>8}{'code':>8}{'functions':>10}{'classes':>8}{'modules':>8}"
        f"{'public':>8}{'others':>8}"
    )
    sums = [0] * 8
    for room, each in now.items():
        paths = held[room]
        row = [
            *(each.lines, most[room].lines if room in most else 0, sum(map(figures.code_of, paths))),
            sum(figures.count(path, *_FUNCTIONS) for path in paths),
            sum(figures.count(path, ast.ClassDef) for path in paths),
            *(len(paths), each.public, each.others),
        ]
        sums = [a + b for a, b in zip(sums, row, strict=True)]
        _row(room, row)
    _row("shipped", sums)
    print()


def _row(room: str, row: list[int]) -> None:
    widths = (8, 8, 8, 10, 8, 8, 8, 8)
    print(f"{room:16}" + "".join(f"{value:>{width},}" for value, width in zip(row, widths, strict=True)))


def _house() -> None:
    threads = figures.threads()
    for name in ("tests", "benchmarks", "examples"):
        print(f"lines of {name}: {figures.lines_of(figures.sources(ROOT / name)):,}")
    print(
        f"words of docs/: {figures.words('docs/*.md'):,}; with README, CHANGELOG and the others of the root:"
    )
    print(f"  {figures.words('docs/*.md', '*.md'):,}")
    print(f"kinds of thread: {len(threads)}: {', '.join(threads)}")
    print(f"callbacks held by classes: {figures.callbacks()}")
    print(f"names of others that are pinned: {figures.pinned()}")
    print(f"options: {figures.fields('CheckpointOptions')} + {figures.fields('Upload')} of an upload")
    print(f"places that listen: {figures.listeners()}")
    print(f"packages of more than {figures.MODULES_IN_A_PACKAGE} modules: {figures.crowded()}\n")


def _privates() -> None:
    found = figures.through_privates()
    print(f"tests through privates: {len({path for paths in found.values() for path in paths})} files")
    for room, paths in found.items():
        print(f"  {room:16}{len(paths):>4}  {', '.join(Path(path).stem for path in paths)}")
    print()


def _starts() -> None:
    """Wall-clock of fresh processes, the median of some: a busy machine makes all of them larger."""
    hosts = "import torch, lightning.pytorch"
    beyond = (
        f"{hosts}, time; begun = time.perf_counter(); import lightning_ckpt;"
        "print(time.perf_counter() - begun)"
    )
    print(f"import lightning_ckpt, beyond torch and Lightning: {_seconds(beyond) * 1000:.0f} ms")
    with tempfile.TemporaryDirectory() as root:
        _python(
            "import sys, torch; from ckpt_core import CheckpointManager\n"
            "with CheckpointManager(sys.argv[1]) as manager: manager.save(1, {'a': torch.ones(8)})",
            root,
        )
        taken = []
        for _ in range(_ROUNDS):
            begun = time.perf_counter()
            _python("import sys; from ckpt_core.cli import main; sys.exit(main(['ls', sys.argv[1]]))", root)
            taken.append(time.perf_counter() - begun)
        print(f"ckpt ls, a root of one checkpoint: {median(taken) * 1000:.0f} ms")


def _seconds(program: str) -> float:
    return median(float(_python(program)) for _ in range(_ROUNDS))


def _python(program: str, *arguments: str) -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "common")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, *arguments],
        check=True, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    return done.stdout
