"""One turn: save, load, verify, delete; with what each of the two took."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from benchmarks.buckets.bare import obstore_of
from benchmarks.buckets.clients import BucketClient, Way
from benchmarks.others import imported


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Seconds of time and of CPU in the client's processes, and bytes over the wire per byte of the state."""

    seconds: float
    cpu_seconds: float
    sent: float
    received: float


Turn = Mapping[Way, Cost]


def one_turn(client: BucketClient, number: int) -> Turn:
    """Save, load and verify, and delete.

    Raises:
        WrongValuesError: the load has not brought what was saved.
    """
    try:
        found: dict[Way, Cost] = {"save": measured(client, lambda: client.save(number))}
        client.poison()
        found["load"] = measured(client, lambda: client.load(number))
        client.check()
        return {way: found[way] for way in client.ways}
    finally:
        empty(client)


def measured(client: BucketClient, work: Callable[[], None]) -> Cost:
    """Do `work`, and return what it took."""
    server = client.task.server
    before, cpu, start = server.counters(), _cpu_seconds(), time.perf_counter()
    work()
    seconds, cpu_seconds = time.perf_counter() - start, _cpu_seconds() - cpu
    after = server.counters()

    def per_byte(counter: str) -> float:
        return float(after[counter] - before[counter]) / client.task.size_bytes

    return Cost(
        seconds=seconds, cpu_seconds=cpu_seconds, sent=per_byte("bytes_in"), received=per_byte("bytes_out")
    )


def empty(client: BucketClient) -> None:
    """Delete the contents of a client's saves."""
    library: Any = imported("obstore")
    store = obstore_of(client.task.server)
    for page in library.list(store, f"{client.key}/"):
        library.delete(store, [path for found in page if client.is_content(path := found["path"])])


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime
