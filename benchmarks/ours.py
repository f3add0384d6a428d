"""ckpt-suite among the contenders: checksums, manifest and commit included."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, final

from benchmarks.contenders import Contender, InFlight, Kind, NotRunError, Task
from ckpt_core import CheckpointManager
from ckpt_core.options import Checksums, Staging
from ckpt_core.types import CapturedState

_LEAST_BYTES = 288 << 20


class _Ours(Contender):
    """`CheckpointManager.save`, every tensor said to change in optimizer steps only."""

    kind: ClassVar[Kind] = "ours"
    copies: ClassVar[int] = 1
    staging: ClassVar[Staging]
    checksum: ClassVar[Checksums] = "crc32"
    replicas: ClassVar[int] = 1
    priority: ClassVar[int] = 10
    waves: ClassVar[int] = 1

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._manager = CheckpointManager(
            task.root / self.key,
            staging=self.staging,
            checksum=self.checksum,
            replicas=self.replicas,
            priority=self.priority,
            staging_memory=None if self.waves == 1 else task.size_bytes // self.waves,
        )
        self._captured = CapturedState(
            sharded={"": {"model": task.tensors}},
            stable=list(task.tensors.values()),
            optimizers=list(task.optimizers),
        )
        self._names: dict[int, str] = {}

    def start(self, number: int) -> InFlight:
        """Save; durable is the commit."""
        handle = self._manager.save(number, self._captured)
        if handle is None:
            raise RuntimeError("a save was skipped although the one before had ended")
        self._names[number] = handle.name
        return InFlight(durable=handle.committed, staged=handle.staged)

    def clean(self, number: int) -> None:
        """Delete the checkpoint."""
        self._manager.wait()
        if number in self._names:
            shutil.rmtree(
                Path(self._manager.storage.url) / self._names.pop(number),
                ignore_errors=True,  # every rank is asked to
            )

    def prewarm(self) -> None:
        """Allocate and fault in the arena."""
        self._manager.prewarm(self._captured)

    def close(self) -> None:
        """Close the manager."""
        self._manager.close()


class OursBlocking(_Ours):
    """Returns when the state is copied."""

    key = "ours-blocking"
    name = "ckpt-suite, blocking"
    staging = "blocking"


@final
class OursBlockingSha256(OursBlocking):
    """The same, with the SHA-256 of every file in the manifest."""

    key = "ours-blocking-sha256"
    name = "ckpt-suite, blocking, SHA-256"
    checksum = "sha256"


@final
class OursBlockingReplicas(OursBlocking):
    """The same, with a second file for every file, by the next rank if there are several."""

    key = "ours-blocking-replicas"
    name = "ckpt-suite, blocking, replicas=2"
    replicas = 2


@final
class OursWaves(OursBlocking):
    """The same, with memory for half of the state."""

    key = "ours-waves"
    name = "ckpt-suite, in two waves"
    waves = 2

    def __init__(self, task: Task) -> None:
        if task.size_bytes < _LEAST_BYTES:
            raise NotRunError(f"a state of less than {_LEAST_BYTES >> 20} MiB has not even memory for waves")
        super().__init__(task)


class OursOverlapped(_Ours):
    """Returns at once; the next optimizer step waits for the copy."""

    key = "ours-overlapped"
    name = "ckpt-suite, overlapped"
    staging = "overlapped"


@final
class OursOverlappedAlike(OursOverlapped):
    """The same, with threads that do not give way to the training."""

    key = "ours-overlapped-alike"
    name = "ckpt-suite, overlapped, priority=0"
    priority = 0


@final
class OursBlockingPrewarmed(OursBlocking):
    """For first saves: after `prewarm`."""

    key = "ours-blocking-prewarmed"
    name = "ckpt-suite, blocking, prewarmed"


@final
class OursOverlappedPrewarmed(OursOverlapped):
    """For first saves: after `prewarm`."""

    key = "ours-overlapped-prewarmed"
    name = "ckpt-suite, overlapped, prewarmed"


PREWARMED: Sequence[type[Contender]] = (OursBlockingPrewarmed, OursOverlappedPrewarmed)
