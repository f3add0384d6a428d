"""How much memory a save or a load takes beyond what was there, in a fresh process."""

from __future__ import annotations

import ctypes
import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.buckets.clients import BucketClient, BucketTask, Way
from benchmarks.buckets.turns import empty
from benchmarks.fresh import in_fresh_process
from benchmarks.lineup import opened
from benchmarks.loading.peak import Memory
from benchmarks.loading.rounds import make_load_task
from benchmarks.s3 import Server
from benchmarks.state import StateShape

_MIB = 1 << 20


def peak_mib(
    each: type[BucketClient], shape: StateShape, server: Server, root: Path, *, timeout_seconds: float
) -> dict[Way, float] | str:
    """Return the MiB of the first save and the first load of a process; or why there are none."""
    order = {
        "module": each.__module__,
        "type": each.__name__,
        "shape": asdict(shape),
        "server": asdict(server),
        "root": str(root),
    }
    outcome = root / "outcome.json"
    found = in_fresh_process(__name__, order, outcome, timeout_seconds=timeout_seconds)
    return found if isinstance(found, str) else {way: found[way] for way in each.ways}


def main(order: dict[str, Any], outcome: Path) -> None:
    """In the fresh process: one save, one load."""
    torch.manual_seed(0)
    each = getattr(importlib.import_module(order["module"]), order["type"])
    shape = StateShape(**order["shape"])
    live = make_load_task(shape, torch.device("cpu"), Path(order["root"]))
    task = BucketTask(live=live, server=Server(**order["server"]))
    with opened([each], task, budgeted=False) as lineup:
        found = [lineup.attempt(client, partial(_measured, client)) for client in list(lineup.running)]
    outcome.write_text(json.dumps(found[0] if found and found[0] else {"not_run": lineup.not_run[each.key]}))


def _measured(client: BucketClient) -> dict[Way, float]:
    client.prepare()
    try:
        save = _beyond(lambda: client.save(0))
        client.poison()
        load = _beyond(lambda: client.load(0))
        client.check()
    finally:
        empty(client)
    return {"save": save, "load": load}


def _beyond(work: Callable[[], None]) -> float:
    # What an allocator has kept would hide as much.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = Memory.now()
    work()
    return (Memory.now().highest - before.resident) / _MIB


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
