"""A storage that stops in the middle of one write, so that the kill surely meets a save in flight."""

from __future__ import annotations

import threading
from pathlib import Path

from ckpt_core.names import DATA_SUFFIX
from ckpt_core.storage import LocalStorage, Storage
from ckpt_core.testing import Fault, FaultyStorage, Operation
from examples.demo.plan import Task


class Hold:
    """Never returns once some bytes of the held checkpoint have reached the disk; tells by a file.

    Only the background thread that writes is held: training goes on.
    """

    def __init__(self, storage: LocalStorage, announcement: Path) -> None:
        self._storage = storage
        self._announcement = announcement

    def __call__(self, operation: Operation) -> None:
        held = threading.Event()
        # At `close` every byte has been handed over, but the threads that write may not have written any.
        while operation.method == "close" and not self._storage.size(operation.key):
            held.wait(0.01)
        if self._storage.size(operation.key):
            self._announcement.write_text(operation.key)
            held.wait()


def open_root(task: Task, rank: int, held_directory: str | None) -> Storage:
    """The checkpoint root; with `held_directory`, a pattern, the write of that checkpoint is held."""
    storage = LocalStorage(task.root)
    if held_directory is None:
        return storage
    hold = Hold(storage, task.file("held", rank))
    key = f".incomplete-*-{held_directory}/*{DATA_SUFFIX}"
    # `close` for the case that all of a file goes out in its first write.
    return FaultyStorage(
        storage, [Fault(method=method, key=key, before=hold) for method in ("write", "close")]
    )
