"""Other people's checkpointing, where it is installed: `pip install --group bench`."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, final

from benchmarks.contenders import Contender, InFlight, Kind, NotRunError, Task


class _Other(Contender):
    """Neither of them fsyncs, so that is done for it, and counted."""

    kind: ClassVar[Kind] = "other"
    fsync: ClassVar[str] = "the benchmark's"

    def made_durable(self, number: int, written: Callable[[], Any]) -> Future[None]:
        """Wait for `written` in the background, then fsync all files of save `number`."""

        def finish() -> None:
            written()
            fsync_tree(self.directory(number))

        return in_background(finish)


@final
class TorchSnapshot(_Other):
    """`torchsnapshot.Snapshot.async_take`."""

    key = "torchsnapshot"
    name = "torchsnapshot, async_take"
    passing_copies = 1

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._library = imported("torchsnapshot")

    def start(self, number: int) -> InFlight:
        """Take; it returns when the state is staged."""
        state = self._library.StateDict(**self.task.tensors)
        taken = self._library.Snapshot.async_take(str(self.directory(number)), {"model": state})
        return InFlight(durable=self.made_durable(number, taken.wait))


@final
class TorchCheckpointing(_Other):
    """`torch_checkpointing`: overlapped staging into shared memory, written by a process.

    Without direct I/O: with it, its default, it can save nothing at all on ext4 or XFS.
    """

    key = "torch-checkpointing"
    name = "torch_checkpointing, async"
    copies = 1

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        library = imported("torch_checkpointing")
        files = imported("torch_checkpointing.storage.filesystem")
        storage = files.LocalFileSystemStorageConfig(use_direct_io=False)
        self._manager: Any = library.CheckpointManager.Config(storage_config=storage).build()

    def start(self, number: int) -> InFlight:
        """Save; that it is staged, only its lock tells."""
        written = self._manager.save(str(self.directory(number)), {"model": dict(self.task.tensors)})
        return InFlight(
            durable=self.made_durable(number, written.result), staged=in_background(self._wait_staged)
        )

    def step_guard(self) -> AbstractContextManager[Any]:
        """Its lock, which waits for a staging in progress."""
        guard: AbstractContextManager[Any] = self._manager.lock()
        return guard

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()

    def _wait_staged(self) -> None:
        with self._manager.lock():
            return


def imported(module: str) -> Any:
    """A package that need not be there.

    Raises:
        NotRunError: it is not.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise NotRunError(f"not installed ({error}): pip install --group bench") from error


def in_background(work: Callable[[], None]) -> Future[None]:
    """Run `work` on a thread of its own."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
        # Told to whoever waits for the future; DCP's errors are no Exceptions.
        except BaseException as error:  # noqa: BLE001
            future.set_exception(error)
        else:
            future.set_result(None)

    threading.Thread(target=run, name="bench-write").start()
    return future


def fsync_tree(directory: Path) -> None:
    """Fsync every file under `directory`, and the directories."""
    for folder, _, files in os.walk(directory):
        for path in [*(Path(folder) / name for name in files), Path(folder)]:
            file = os.open(path, os.O_RDONLY)
            try:
                os.fsync(file)
            finally:
                os.close(file)
