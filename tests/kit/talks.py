"""Ranks that are threads of the test, with talks between them over a store of this process and gloo."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist

from ckpt_core.coordination import Talks

LONG = 20.0
_JOBS = itertools.count()


@cache
def _store() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def talks_of(count: int, patience_seconds: float = LONG) -> list[Talks]:
    """The talks of the ranks of a job."""
    job, limit, server = f"job-{next(_JOBS)}", timedelta(seconds=LONG), _store()

    def connect(timeout: timedelta) -> Any:
        clone = server.clone()
        clone.set_timeout(timeout)
        return dist.PrefixStore(job, clone)

    def made(rank: int) -> Talks:
        group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", connect(limit)), rank, count, limit)
        return Talks(connect, group, rank, patience_seconds)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(made, range(count)))
