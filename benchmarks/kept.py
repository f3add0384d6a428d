"""What a save costs with few and with many checkpoints kept: `python -m benchmarks.kept --kept 3 1000`.

The roots take turns, save by save, so that what else the machine does falls to all alike. With `--remote`
they are object stores in memory, and every request to one takes `--latency-ms`.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ckpt_core import CheckpointManager, KeepEvery, KeepLatest
from ckpt_core.commit import Manifest, begin, commit
from ckpt_core.formats.checksums import checksum
from ckpt_core.names import step_name
from ckpt_core.storage import LocalStorage, Storage, object_storage
from ckpt_core.testing import Fault, FaultyStorage
from ckpt_core.types import FileEntry

_REQUESTS = ("open", "list", "size", "delete", "replace", "close")
"""What is a request to an object store; the rest is done without one, or part of these."""


def fill(storage: Storage, kept: int) -> None:
    """Commit so many checkpoints of one small file each."""
    for step in range(1, kept + 1):
        name, save_id, content = step_name(step), f"{step:08x}", b"x" * 100
        working = begin(storage, name, save_id)
        storage.write_bytes(f"{working}/data", content)
        entry = FileEntry(path="data", size_bytes=len(content), checksum=checksum(content))
        manifest = Manifest(save_id=save_id, step=step, created=time.time(), world_size=1, files=(entry,))
        commit(storage, working, name, manifest)


def remote(latency_seconds: float, storage: Storage) -> Storage:
    """The same storage, where every request takes its time."""

    def wait(_: object) -> None:
        time.sleep(latency_seconds)

    return FaultyStorage(storage, [Fault(method=method, before=wait) for method in _REQUESTS])


def measure(storages: Sequence[tuple[int, Storage]], saves: int) -> dict[int, list[float]]:
    """Seconds from the call until the save is durable and the prune behind it is done, in turns."""
    seconds: dict[int, list[float]] = {kept: [] for kept, _ in storages}
    state = {"w": torch.zeros(1 << 16)}
    with ExitStack() as closing:
        managers = {
            kept: closing.enter_context(CheckpointManager(storage, keep=KeepEvery(1) | KeepLatest(3)))
            for kept, storage in storages
        }
        for kept, manager in managers.items():
            manager.continue_from()
            manager.save(kept + 1, state)  # what only the first save has to do
            manager.wait()
        for number in range(2, saves + 2):
            for kept, manager in managers.items():
                began = time.perf_counter()
                manager.save(kept + number, state)
                manager.wait()
                seconds[kept].append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Print medians, and the ratio to the first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=int, nargs="+", default=[3, 1000])
    parser.add_argument("--saves", type=int, default=20)
    parser.add_argument("--remote", action="store_true")
    parser.add_argument("--latency-ms", type=float, default=20.0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        storages: list[tuple[int, Storage]] = []
        for kept in arguments.kept:
            inner: Storage = LocalStorage(Path(folder) / str(kept))
            if arguments.remote:
                inner = object_storage(f"memory://{secrets.token_hex(8)}/run")
            fill(inner, kept)
            slow = remote(arguments.latency_ms / 1000, inner) if arguments.remote else inner
            storages.append((kept, slow))
        medians = {kept: statistics.median(each) for kept, each in measure(storages, arguments.saves).items()}
    first = medians[arguments.kept[0]]
    for kept, median in medians.items():
        print(f"{kept:>6} kept: {median * 1000:8.1f} ms per save, {median / first:.2f} x")


if __name__ == "__main__":
    main()
