"""A small run with a local tier and a durable one, both directories."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from ckpt_core import CheckpointManager, Upload
from ckpt_core.commit import Catalog
from ckpt_core.storage import LocalStorage

ONE, TWO, THREE = (f"step-{step:09d}" for step in (1, 2, 3))


class Two:
    """A run with a local tier and a durable one."""

    def __init__(self, path: Path) -> None:
        self.local, self.durable = path / "local", path / "durable"
        self.local.mkdir()
        self.durable.mkdir()
        self.events: list[dict[str, object]] = []
        self.repairs: list[str] = []
        self.repaired = threading.Event()

    @contextmanager
    def manager(self, *, local=None, durable=None, **options) -> Generator[CheckpointManager]:
        """A manager that uploads nothing by itself."""
        upload = Upload(durable or self.durable, every=1000)
        checkpoints = CheckpointManager(local or self.local, upload=upload, sinks=[self], **options)
        try:
            yield checkpoints
        finally:
            checkpoints.close(wait_for_uploads=False)

    def emit(self, event) -> None:
        if event.name == "load.rejected":
            self.events.append(dict(event.attributes))
        if event.name == "repair" and event.phase in {"finished", "failed"}:
            self.repairs.append(event.phase)
            self.repaired.set()

    def save(self, *steps: int, root: Path | None = None, **options) -> None:
        """Save some steps whose state is their number, after a resume of what is there."""
        with CheckpointManager(root or self.local, **options) as checkpoints:
            if checkpoints.checkpoints():
                checkpoints.resume(state())
            for step in steps:
                checkpoints.save(step, state(step))

    def upload(self, *names: str) -> None:
        for name in names:
            shutil.copytree(self.local / name, self.durable / name)

    def lose_local(self) -> None:
        shutil.rmtree(self.local)
        self.local.mkdir()

    def resumed(self, **options) -> tuple[int | None, float]:
        with self.manager(**options) as checkpoints:
            loaded = state()
            return checkpoints.resume(loaded), loaded["model"]["w"][0].item()


def state(value: float = -1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((5000,), float(value)), "v": torch.full((3000,), float(value))}}


def marks(root: Path) -> dict[str, str]:
    infos = Catalog(LocalStorage(root)).committed(abandoned=True)
    return {info.name: info.damaged for info in infos if info.damaged is not None}
