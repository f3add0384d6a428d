"""A rank of a job that exports at its end."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import torch

from ckpt_core import CheckpointManager, Export
from ckpt_core.storage import LocalStorage
from ckpt_core.tiers import read_exports


def job(home: str, victim: int | None) -> tuple[list[str], list[str]]:
    """A rank that saves and ends; return what is exported when it has ended, and what it was told."""
    import ckpt_core.manager

    ckpt_core.manager._EXPORTER = "tests.guarantees.export_writers:write"
    told: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_core").addHandler(handler)
    rank, place = torch.distributed.get_rank(), Path(home, "place")
    manager = CheckpointManager(Path(home, "root"), export=Export(to="hf", place=place))
    manager.save(1, {f"w{rank}": torch.ones(100)}).result(60)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        threading.Timer(1.0, Path(home, "say", "hold").unlink).start()
    manager.close()
    return [each.name for each in read_exports(LocalStorage(place)) if each.whole], told
