"""Jobs that export, by a writer of the tests."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path

import torch

import ckpt_core.manager
from ckpt_core import CheckpointManager, Export
from ckpt_core.storage import LocalStorage
from ckpt_core.tiers import read_exports

_WRITER = "tests.guarantees.export_writers:write"


def dies(home: str) -> None:
    """Save, and die while that is exported."""
    ckpt_core.manager._EXPORTER = _WRITER
    export = Export(to="hf", place=Path(home, "place"), when={"every": 1})
    manager = CheckpointManager(Path(home, "root"), export=export)
    manager.save(1, {"w0": torch.ones(100)}).result(60)
    while not Path(home, "say", "begun").exists():
        threading.Event().wait(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def job(home: str, victim: int | None) -> tuple[list[str], list[str]]:
    """A rank that saves and ends; return what is exported when it has ended, and what it was told."""
    ckpt_core.manager._EXPORTER = _WRITER
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
    return list(read_exports(LocalStorage(place))[0]), told
