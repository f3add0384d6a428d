"""Compressed copies at stores of several speeds, loads from one, and what a run keeps.

    python -m benchmarks.compressed --rounds 5 --json out.json

The state is that of a byte-level GPT in training (`benchmarks.gains`). Stores are memory behind a limit of
their rate. `auto` stands beside every fixed choice; a load of a compressed checkpoint from a store of 200
MB/s beside one of the plain one. Everybody takes a turn in each round, in random order; medians of the time
on the clock count.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, final

import torch
from typing_extensions import override

from benchmarks.command import tell
from benchmarks.gains import Experts, Trained
from benchmarks.machine import in_words, machine_facts
from benchmarks.training import one_thread
from ckpt_core import CheckpointManager, KeepEvery, KeepLatest, KeepWeights, KeepWithin, Upload
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage, RangeReader, Storage, StorageEntry, Throttle
from ckpt_core.storage._layered import ReadOnlyStorage
from ckpt_core.tiers import CopyTerms, copy_checkpoint
from tests.kit.memory import MemoryStorage

RATES = (0.05e9, 0.2e9, 1e9, 3e9)
CODECS = ("none", "zstd", "planes", "auto")
_LOAD_RATE = 200e6
_SAVES = 20


@final
class SlowStorage(ReadOnlyStorage):
    """A storage from which no more than so many bytes a second come."""

    def __init__(self, storage: Storage, rate: float) -> None:
        self._storage, self._throttle = storage, Throttle(rate)
        self.supports_rename = storage.supports_rename

    @property
    @override
    def url(self) -> str:
        return self._storage.url

    @contextmanager
    @override
    def open(self, key: str) -> Generator[IO[bytes]]:
        with self._storage.open(key) as stream:
            yield stream

    @contextmanager
    @override
    def open_ranges(self, key: str) -> Generator[RangeReader]:
        with self._storage.open_ranges(key) as reader:
            yield _SlowRanges(reader, self._throttle)

    @override
    def size(self, key: str) -> int:
        return self._storage.size(key)

    @override
    def list(self, key: str) -> list[StorageEntry]:
        return self._storage.list(key)


@final
class _SlowRanges:
    def __init__(self, reader: RangeReader, throttle: Throttle) -> None:
        self._reader, self._throttle = reader, throttle
        self.size_bytes = reader.size_bytes

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Read as the storage does, when it is its turn."""
        list(self._throttle([buffer.cast("B")]))
        self._reader.read_into(offset, buffer)


def copied(source: Storage, name: str, codec: str, rate: float) -> Storage:
    """Copy a checkpoint to a new store of that rate; return the store."""
    target = MemoryStorage("store")
    terms = CopyTerms(pace=Throttle(rate), bytes_per_second=round(rate), compress=codec)
    copy_checkpoint(source, target, name, terms)
    return target


def loaded(storage: Storage, name: str, into: Trained) -> None:
    """Load a checkpoint from a store of 200 MB/s."""
    with CheckpointManager(SlowStorage(storage, _LOAD_RATE)) as manager:
        manager.load(into.state, name=name)


def timed(rounds: int, turns: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Let everybody take a turn in each round, in random order; the median of the seconds of each."""
    taken: dict[str, list[float]] = defaultdict(list)
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(turns), len(turns)):
            begun = time.perf_counter()
            turns[name]()
            taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(each) for name, each in taken.items()}


def kept(directory: Path, make: Callable[[], Trained], upload: dict[str, Any]) -> tuple[int, int, int]:
    """Save 20 steps and upload them; return bytes of the tier, what can be resumed there, and weights."""
    trained = make()
    tier = LocalStorage(directory / "tier")
    to = Upload(tier, when_busy="queue", deadline_seconds=600.0, **upload)
    with CheckpointManager(directory / "root", keep=KeepLatest(2), upload=to) as manager:
        for _ in range(_SAVES):
            trained.step()
            manager.save(trained.steps, trained.state)
    with CheckpointManager(tier) as manager:
        if manager.resume(make().state) != trained.steps:
            raise RuntimeError("the last step cannot be resumed from the tier")
    found = [info.weights_of is None for info in Catalog(tier).committed(abandoned=True)]
    size = sum(path.stat().st_size for path in (directory / "tier").rglob("*") if path.is_file())
    return size, sum(found), len(found) - sum(found)


def _kept_both(directory: Path, make: Callable[[], Trained]) -> dict[str, Any]:
    every, found = KeepEvery(1), dict[str, Any]()
    ways: dict[str, dict[str, Any]] = {
        "plain": {"keep": KeepLatest(3) | every},
        "budget, weights, planes": {
            "keep": (KeepLatest(3) | KeepWeights(every)) & KeepWithin("100 GB"),
            "compress": "planes",
        },
    }
    for name, upload in ways.items():
        size, resumable, weights = kept(directory / name, make, upload)
        found[name] = {"bytes": size, "resumable": resumable, "weights": weights}
        print(f"{_SAVES} saves, {name}: {size / 1e6:.1f} MB, {resumable} resumable, {weights} of weights")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compressed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="of training (default 20)")
    parser.add_argument("--experts", action="store_true", help="the mixture of experts, six times as large")
    parser.add_argument("--bf16", action="store_true", help="weights and moments in bf16")
    parser.add_argument("--json", type=Path, help="write everything that was measured there")
    options = parser.parse_args(arguments)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    make = partial(Trained, *([Experts] if options.experts else []), dtype=dtype)
    found: dict[str, Any] = {}
    with one_thread(), TemporaryDirectory(prefix="bench-") as directory:
        print(in_words(machine_facts(Path(directory), torch.device("cpu"))))
        trained = make()
        for _ in range(options.steps):
            trained.step()
        with CheckpointManager(directory) as manager:
            name = manager.save(trained.steps, trained.state).result().name
        source = LocalStorage(directory)
        for rate in RATES:
            turns = {codec: partial(copied, source, name, codec, rate) for codec in CODECS}
            seconds = found[f"{rate / 1e9:g} GB/s"] = timed(options.rounds, turns)
            best = min(seconds[codec] for codec in CODECS if codec != "auto")
            row = ", ".join(f"{codec} {each:.2f} s" for codec, each in seconds.items())
            print(f"copy to {rate / 1e9:g} GB/s: {row}; auto takes {seconds['auto'] / best:.2f} x the best")
        stores = {codec: copied(source, name, codec, 100e9) for codec in ("none", "zstd", "planes")}
        loads = {codec: partial(loaded, store, name, trained) for codec, store in stores.items()}
        seconds = found["load"] = timed(options.rounds, loads)
        for codec, store in stores.items():
            size = Catalog(store).find(name=name).size_bytes
            speed = seconds["none"] / seconds[codec]
            row = f"{size / 1e6:.1f} MB, {seconds[codec]:.2f} s, {speed:.2f} x the plain speed"
            print(f"load at 200 MB/s, {codec}: {row}")
        found |= _kept_both(Path(directory), make)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        tell(f"written to {options.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
