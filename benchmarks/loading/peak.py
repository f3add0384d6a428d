"""How much more memory a process has while it loads than before, with the live model in place."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, final

import torch

from benchmarks.comparison import Row, compare, panel
from benchmarks.fresh import in_fresh_process
from benchmarks.lineup import opened
from benchmarks.loading.lineup import ALL
from benchmarks.loading.loader import Loader, LoaderType, LoadTask
from benchmarks.loading.pages import CONDITIONS, PageState, bring_to
from benchmarks.loading.rounds import VERIFIED, make_load_task, prepare_all
from benchmarks.report import Report, Table
from benchmarks.state import StateShape, tensor_sizes
from benchmarks.timing import Spread

_MIB = 1 << 20
_SAMPLE_SECONDS = 0.002
MEASURES = ("peak_mib", "anonymous_mib")
_CONDITIONS = (
    "Every load is the first of a fresh process: what the libraries import and start in it counts. Peak: "
    "VmHWM, reset before the load, less VmRSS before it. It counts the pages of mapped files, which the "
    "kernel may take back; without them: RssAnon, sampled every 2 ms, so that short peaks may be missed.",
)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """`rounds` fresh processes for each loader, each killed after `timeout_seconds`."""

    shape: StateShape
    device: str
    rounds: int
    pages: PageState
    timeout_seconds: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
    """MiB above what the process had before the load: of everything, and of what no file backs."""

    peak_mib: float
    anonymous_mib: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Resident bytes of this process: now, at most since the last reset, and now but for files' pages."""

    resident: int
    highest: int
    anonymous: int

    @classmethod
    def now(cls) -> Self:
        """As the kernel tells."""
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        kib = {
            name: value.split()[0]
            for name, _, value in (line.partition(":") for line in lines)
            if value.strip()
        }
        return cls(
            resident=int(kib["VmRSS"]) * 1024,
            highest=int(kib["VmHWM"]) * 1024,
            anonymous=int(kib["RssAnon"]) * 1024,
        )


def run_peak(
    types: Sequence[LoaderType], settings: Settings, root: Path, *, progress: Callable[[str], None]
) -> Report:
    """One load in each fresh process, of files that are written here."""
    expected, not_run, size_bytes = _write_files(types, settings, root)
    (root / "checksums.json").write_text(json.dumps(expected))
    found: dict[str, list[Peak]] = {}
    for number in range(settings.rounds):
        for each in types:
            if each.key in not_run:
                continue
            outcome = _outcome(each, settings, root)
            if isinstance(outcome, str):
                not_run[each.key] = outcome
            else:
                found.setdefault(each.key, []).append(Peak(**outcome))
        progress(f"round {number + 1} of {settings.rounds}")
    return _report(compare(types, found, not_run), settings, size_bytes)


def _write_files(
    types: Sequence[LoaderType], settings: Settings, root: Path
) -> tuple[dict[str, int], dict[str, str], int]:
    """The checksums of what was saved, who could not, and how many bytes it is."""
    task = make_load_task(settings.shape, torch.device(settings.device), root)
    with opened(types, task) as lineup:
        prepare_all(lineup)
    return dict(task.checksums), lineup.not_run, task.size_bytes


def _outcome(each: LoaderType, settings: Settings, root: Path) -> dict[str, Any] | str:
    order = {
        "key": each.key,
        "shape": asdict(settings.shape),
        "device": settings.device,
        "pages": settings.pages,
        "root": str(root),
    }
    outcome = root / "outcome.json"
    return in_fresh_process(__name__, order, outcome, timeout_seconds=settings.timeout_seconds)


def _report(rows: Sequence[Row[Loader]], settings: Settings, size_bytes: int) -> Report:
    return Report(
        benchmark="load-peak",
        title=f"Memory that loading {settings.shape} takes beyond the model itself",
        table=[_table(rows)],
        results={
            "size_bytes": size_bytes,
            "pages": settings.pages,
            "contenders": {row.contender.key: row.as_json(MEASURES) for row in rows},
        },
        panels=[
            panel(rows, "peak_mib", "At most, mapped files too", axis="MiB beyond the model"),
            panel(rows, "anonymous_mib", "Without the pages of files", axis="MiB beyond the model"),
        ],
        conditions=[CONDITIONS[settings.pages], VERIFIED, *_CONDITIONS],
    )


def _table(rows: Sequence[Row[Loader]]) -> Table:
    body = [
        [row.contender.name, *(_text(row.spread(measure)) for measure in MEASURES)]
        if row.timings
        else [row.contender.name, f"not run: {row.not_run}"]
        for row in rows
    ]
    return Table(("", "MiB at most, median [min, max]", "MiB without mapped files"), body)


def _text(spread: Spread | None) -> str:
    return "" if spread is None else f"{spread.median:.0f} [{spread.low:.0f}, {spread.high:.0f}]"


def main(order: dict[str, Any], outcome: Path) -> None:
    """In the fresh process: one load."""
    device, root = torch.device(order["device"]), Path(order["root"])
    sizes = tensor_sizes(StateShape(**order["shape"]))
    task = LoadTask(
        tensors={
            name: torch.empty(numel, dtype=dtype, device=device) for name, (numel, dtype) in sizes.items()
        },
        checksums=json.loads((root / "checksums.json").read_text()),
        size_bytes=sum(numel * dtype.itemsize for numel, dtype in sizes.values()),
        root=root,
        device=device,
    )
    with opened([ALL[order["key"]]], task) as lineup:
        prepare_all(lineup)
        found = [
            lineup.attempt(each, partial(_measured, each, order["pages"])) for each in list(lineup.running)
        ]
    peaks = [asdict(each) for each in found if each is not None]
    outcome.write_text(json.dumps(peaks[0] if peaks else {"not_run": lineup.not_run[order["key"]]}))


def _measured(loader: Loader, pages: PageState) -> Peak:
    loader.poison()
    bring_to(pages, loader.files())
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = Memory.now()
    ended = threading.Event()
    anonymous = [before.anonymous]

    def sample() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            anonymous.append(Memory.now().anonymous)

    sampler = threading.Thread(target=sample, name="bench-memory")
    sampler.start()
    try:
        loader.load()
    finally:
        ended.set()
        sampler.join()
    highest = Memory.now().highest
    loader.check()
    return Peak(
        peak_mib=(highest - before.resident) / _MIB, anonymous_mib=(max(anonymous) - before.anonymous) / _MIB
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
