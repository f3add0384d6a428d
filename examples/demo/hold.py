"""Hold one write of a storage, so that the kill meets a save in flight."""

from __future__ import annotations

import threading
from pathlib import Path

from ckpt_core.names import DATA_SUFFIX
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage, Operation
from examples.demo.plan import Task


class Hold:
    """Blocks for ever once bytes of the held checkpoint are on disk; creates a file.

    Only the background thread that writes is held: training continues.
    """

    def __init__(self, storage: LocalStorage, announcement: Path) -> None:
        self._storage = storage
        self._announcement = announcement

    def __call__(self, operation: Operation) -> None:
        held = threading.Event()
        # At `close` every byte has been handed over, but the writer threads may not have written any.
        while operation.method == "close" and not self._storage.size(operation.key):
            held.wait(0.01)
        if self._storage.size(operation.key):
            self._announcement.write_text(operation.key)
            held.wait()


def open_root(task: Task, rank: int, held_directory: str | None) -> Storage:
    """Open the checkpoint root; hold writes below `held_directory`, a pattern."""
    storage = LocalStorage(task.root)
    if held_directory is None:
        return storage
    hold = Hold(storage, task.file("held", rank))
    key = f".incomplete-*-{held_directory}~/*{DATA_SUFFIX}"
    # `close`, in case the first write covers the whole file.
    return FaultyStorage(
        storage, [Fault(method=method, key=key, before=hold) for method in ("write", "close")]
    )
