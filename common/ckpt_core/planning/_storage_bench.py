"""A measurement of a storage, by the calls that saves and loads make."""

from __future__ import annotations

import mmap
import os
import secrets
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from ckpt_core.crew import run_all
from ckpt_core.errors import ConfigError, RootBusyError
from ckpt_core.names import bench_began, bench_name
from ckpt_core.options import DEFAULT_HEADROOM, bytes_text
from ckpt_core.storage import LocalStorage, Storage, excludes_others

_BLOCK_BYTES: Final = 16 * 2**20
_SMALL_BYTES: Final = 4096
_FILE_BYTES: Final = 64 * 2**20
_REPEATS: Final = 9
_ALIVE: Final = "alive"
_ABANDONED_SECONDS: Final = 3600.0
"""Where locks exclude nothing, an older measurement has ended: none may take longer."""

MOST_SECONDS: Final = 1800.0


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BenchLimits:
    """What a measurement may take.

    Attributes:
        total_bytes: the most to write.
        seconds: the time for all reads and writes of large files.
        writers: numbers of files written at the same time.
    """

    total_bytes: int
    seconds: float
    writers: Sequence[int] = (1, 4)

    def __post_init__(self) -> None:
        if not self.writers or min(self.writers) < 1 or max(self.writers) > 256:
            raise ConfigError(f"writers must be numbers from 1 to 256, not {list(self.writers)}")
        if not 0 < self.seconds <= MOST_SECONDS:
            raise ConfigError(f"seconds must be above 0, at most {MOST_SECONDS:g}, not {self.seconds:g}")
        least = max(self.writers) * _BLOCK_BYTES * (len(self.writers) + 1)
        if self.total_bytes < least:
            raise ConfigError(
                f"{bytes_text(self.total_bytes)} are too few for {max(self.writers)} writers: "
                f"give at least {bytes_text(least)}"
            )


class BenchRun(NamedTuple):
    """One run over files of one size.

    Attributes:
        writers: files written, then read, at the same time.
        files: how many.
        size_bytes: of all of them.
        write_bytes_per_second: until the last byte was handed over.
        durable_bytes_per_second: until all were durable.
        read_bytes_per_second: of the same files; 0 if the time was over.
    """

    writers: int
    files: int
    size_bytes: int
    write_bytes_per_second: float
    durable_bytes_per_second: float
    read_bytes_per_second: float


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class BenchResult:
    """What a storage did.

    Attributes:
        root: path or URL.
        runs: with large files.
        small_write_seconds: median, for a file of 4 KiB, durable.
        commit_seconds: median, from the last data file to the commit.
        collected: remains of measurements that were killed, removed before this one.
    """

    root: str
    runs: Sequence[BenchRun]
    small_write_seconds: float
    commit_seconds: float
    collected: Sequence[str]

    @property
    def record(self) -> dict[str, Any]:
        """The result as JSON values; `ckpt plan --storage` reads it."""
        return {
            "version": 1,
            "root": self.root,
            "write_bytes_per_second": max(run.durable_bytes_per_second for run in self.runs),
            "read_bytes_per_second": max(run.read_bytes_per_second for run in self.runs),
            "small_write_seconds": self.small_write_seconds,
            "commit_seconds": self.commit_seconds,
            "runs": [run._asdict() for run in self.runs],
            "collected": list(self.collected),
        }


def measure_storage(
    storage: Storage,
    limits: BenchLimits,
    *,
    progress: Callable[[int], None] = lambda _: None,
    stop: Callable[[], None] = lambda: None,
    now: float | None = None,
) -> BenchResult:
    """Measure a storage in a directory of its own, which goes at the end.

    Args:
        storage: the root; nothing else in it is touched.
        limits: of bytes and time.
        progress: called with counts of bytes written or read.
        stop: called between blocks; an error of it ends the measurement.
        now: Unix time.

    Raises:
        ConfigError: there is no room.
        OSError: storage failed.
    """
    moment = time.time() if now is None else now
    collected = collect_benches(storage, moment)
    _refuse_without_room(storage, limits.total_bytes)
    with _own_directory(storage, moment) as directory:
        bench = _Bench(storage, directory, progress, stop)
        plans = [(writers, writers) for writers in limits.writers]
        share = limits.total_bytes // (len(plans) + 1)
        most = max(limits.writers)
        plans.append((most, max(share // _FILE_BYTES, most)))
        seconds = limits.seconds / (2 * len(plans))
        runs = [bench.run(each, size_bytes=share, seconds=seconds) for each in plans]
        return BenchResult(
            root=storage.url,
            runs=runs,
            small_write_seconds=bench.small_writes(),
            commit_seconds=bench.commits(),
            collected=collected,
        )


def collect_benches(storage: Storage, now: float) -> list[str]:
    """Remove what measurements that were killed have left; return its names."""
    found: list[str] = []
    for name in sorted(storage.directories("")):
        began = bench_began(name)
        if began is None:
            continue
        lock = storage.try_lock(f"{name}/{_ALIVE}")
        if lock is None:
            continue
        try:
            if excludes_others(lock) or now - began > _ABANDONED_SECONDS:
                storage.delete(name)
                found.append(name)
        finally:
            lock.release()

    def is_abandoned(key: str) -> bool:
        began = bench_began(key.partition("/")[0])
        return began is not None and now - began > _ABANDONED_SECONDS

    storage.abandon_uploads(is_abandoned)
    return found


def _refuse_without_room(storage: Storage, needed: int) -> None:
    free = storage.free_bytes()
    headroom = DEFAULT_HEADROOM.of(storage.total_bytes())
    if free is not None and free < needed + headroom:
        raise ConfigError(
            f"{storage.url}: has {bytes_text(free)} free; a measurement of {bytes_text(needed)} would not "
            f"leave the {bytes_text(headroom)} that saves leave: make room, or give a smaller --gib"
        )


@contextmanager
def _own_directory(storage: Storage, now: float) -> Generator[str]:
    """Make a directory that the next measurement removes if this one is killed."""
    name = bench_name(int(now), secrets.token_hex(4))
    lock = storage.try_lock(f"{name}/{_ALIVE}")
    if lock is None:
        raise RootBusyError(f"{storage.url}/{name}: another measurement has just removed it: try again")
    try:
        yield name
    finally:
        try:
            storage.delete(name)
        finally:
            lock.release()


@final
class _Bench:
    """A measurement in a directory of its own."""

    def __init__(
        self, storage: Storage, directory: str, progress: Callable[[int], None], stop: Callable[[], None]
    ) -> None:
        self._storage = storage
        self._directory = directory
        self._progress = progress
        self._stop = stop
        # Not compressible, and in pages of its own, as direct writes need it.
        self._block = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
        self._block[:] = os.urandom(_BLOCK_BYTES)
        self._runs = 0

    def run(self, plan: tuple[int, int], *, size_bytes: int, seconds: float) -> BenchRun:
        """Write files, read them back, delete them.

        Args:
            plan: writers, and files.
            size_bytes: of all files together.
            seconds: for the writes, and for the reads.
        """
        writers, files = plan
        self._runs += 1
        directory = f"{self._directory}/run-{self._runs}"
        self._storage.make_directory(directory)
        keys = [f"{directory}/{number}" for number in range(files)]
        blocks = max(size_bytes // files // _BLOCK_BYTES, 1)
        begin = time.perf_counter()
        handed = [begin]

        def write(key: str) -> None:
            if key == keys[0] or time.perf_counter() < begin + seconds:
                self._storage.write_pieces(key, self._pieces(blocks, begin + seconds, handed))

        run_all(write, keys, writers, name="ckpt-bench")
        self._storage.sync_directory(directory)
        durable = time.perf_counter() - begin
        written = [key for key in keys if self._storage.exists(key)]
        total = sum(self._storage.size(key) for key in written)
        read = self._read(written, writers, seconds)
        self._storage.delete(directory)
        return BenchRun(
            writers, len(written), total, total / max(max(handed) - begin, 1e-9), total / durable, read
        )

    def _pieces(self, blocks: int, deadline: float, handed: list[float]) -> Generator[memoryview]:
        for number in range(blocks):
            self._stop()
            if number and time.perf_counter() > deadline:
                return
            yield self._block
            handed.append(time.perf_counter())
            self._progress(_BLOCK_BYTES)

    def _read(self, keys: Sequence[str], threads: int, seconds: float) -> float:
        """Read files by blocks; return bytes per second."""
        for key in keys:
            _forget(self._storage, key)
        begin = time.perf_counter()
        counts: list[int] = []

        def read(key: str) -> None:
            buffer = memoryview(mmap.mmap(-1, _BLOCK_BYTES))
            with self._storage.open_ranges(key) as reader:
                for offset in range(0, reader.size_bytes, _BLOCK_BYTES):
                    self._stop()
                    if counts and time.perf_counter() > begin + seconds:
                        return
                    count = min(_BLOCK_BYTES, reader.size_bytes - offset)
                    reader.read_into(offset, buffer[:count])
                    counts.append(count)
                    self._progress(count)

        run_all(read, keys, threads, name="ckpt-bench")
        return sum(counts) / (time.perf_counter() - begin)

    def small_writes(self) -> float:
        """Return the median seconds of a small durable file."""
        content = bytes(self._block[:_SMALL_BYTES])

        def write(number: int) -> None:
            self._storage.write_bytes(f"{self._directory}/small-{number}", content)

        return self._median(write)

    def commits(self) -> float:
        """Return the median seconds of a commit: manifest, marker, rename."""
        content = bytes(self._block[:_SMALL_BYTES])

        def commit(number: int) -> None:
            working = f"{self._directory}/working-{number}"
            self._storage.make_directory(working)
            for name in ("metadata", "manifest", "marker"):
                self._storage.write_bytes(f"{working}/{name}", content)
            self._storage.sync_directory(working)
            if self._storage.supports_rename:
                self._storage.rename(working, f"{self._directory}/committed-{number}")
                self._storage.sync_directory(self._directory)

        return self._median(commit)

    def _median(self, act: Callable[[int], None]) -> float:
        found: list[float] = []
        for number in range(_REPEATS):
            self._stop()
            begin = time.perf_counter()
            act(number)
            found.append(time.perf_counter() - begin)
        return statistics.median(found)


def _forget(storage: Storage, key: str) -> None:
    """Drop a file from the page cache, where a filesystem refused direct writes."""
    if isinstance(storage, LocalStorage) and hasattr(os, "posix_fadvise"):
        with suppress(OSError), storage.local_path(key).open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
