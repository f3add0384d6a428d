"""Repair of the nearest tier: the checkpoint resumed is made whole there."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial
from typing import Final, final

from ckpt_core.commit import abandon
from ckpt_core.crew import give_way
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, failure_text
from ckpt_core.loading._tiered import Loaded
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job, Ownership, Pruner
from ckpt_core.storage import Storage, Throttle
from ckpt_core.tiers import CheckpointCopy, CopyTerms, Tier
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)
_ROOM: Final = 2
"""A repair leaves room for a save of the same size."""


class _GivenUpError(Exception):
    """The repair has become pointless; the message says why."""


def note_copied(ownership: Ownership, info: CheckpointInfo) -> None:
    """Note in a root that a checkpoint was copied there, and verified on the way."""
    ownership.inventory.note_written(info)
    ownership.soundness.vouch(info)
    ownership.note_sound(info.name)


@final
class Repairer:
    """Makes the checkpoint resumed whole in the nearest tier.

    If it is damaged or missing there, it is copied in the background, on the coordinator, from the files that
    the load was made from. A save never waits for it: the copy is written into a working directory of its
    own, and then takes the name in one step.

    Concurrency: methods on the main thread. One thread of its own, which `close` stops.

    Args:
        job: storage, ranks and telemetry.
        nearest: the nearest tier.
        options: of the manager.
        ownership: of the nearest tier's root.
        pruner: says what retention would keep there.
    """

    def __init__(
        self, job: Job, nearest: Tier, options: CheckpointOptions, *, ownership: Ownership, pruner: Pruner
    ) -> None:
        self._job = job
        self._nearest = nearest
        self._ownership = ownership
        self._pruner = pruner
        self._reads_every_byte = job.storage.rereads_from_memory or options.verification == "full"
        self._headroom = options.free_headroom
        rate = options.write_bytes_per_second
        self._pace = None if rate is None else Throttle(rate)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, loaded: Loaded) -> None:
        """Begin the repair that a resume calls for, if any, or remove a wrong mark.

        The root is this job's.
        """
        if loaded.wrongly_marked and self._reads_every_byte:
            self._ownership.note_sound(loaded.info.name)
        if not (self._job.coordinator.is_coordinator and self._nearest.shared):
            return
        if self._job.storage.num_disks > 1:
            return  # it would write all files to the disk of each node
        missing = not loaded.nearest_name
        if not (missing or 0 in loaded.damaged) or self._thread is not None:
            return
        if loaded.nearest_name not in {"", loaded.copy.info.name}:
            return  # the tiers have it by different names
        why = "not there" if missing else "damaged"
        place = f"{self._job.storage.url}/{loaded.copy.info.name}"
        try:
            reason = self._reason_against(loaded.info, missing=missing)
        except (CheckpointError, OSError) as error:
            reason = failure_text(error)
        if reason:
            _logger.info("%s is %s, and is not copied there from the next tier: %s", place, why, reason)
            return
        _logger.info("%s is %s: it is copied there from the next tier, in the background", place, why)
        repair = partial(self._run, loaded.storage, loaded.copy.info)
        self._thread = threading.Thread(target=repair, name="ckpt-repair", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the repair, if one is running."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Stop the repair and remove what it has copied; the next resume begins again."""
        self._closing.set()
        self.wait()

    def _reason_against(self, info: CheckpointInfo, *, missing: bool) -> str:
        """Return why not to repair, in words; "" to do it."""
        storage = self._job.storage
        free = storage.free_bytes()
        needed = _ROOM * info.size_bytes + self._headroom.of(storage.total_bytes())
        if free is not None and free < needed:
            return f"it would take room that the next save needs ({free} of {needed} bytes are free)"
        if missing:
            newer = replace(info, step=info.step + 1, name=f"{info.name}+1", created=time.time())
            if self._would_drop(info, newer):
                return "keep= would not keep it beside a newer one"
        return ""

    def _would_drop(self, info: CheckpointInfo, *newer: CheckpointInfo) -> bool:
        """Return whether retention would remove what is not there yet, beside newer ones."""
        history = self._ownership.inventory.history()
        if any(each.name == info.name for each in history):
            return False
        history = [*history, info, *newer]
        last = max(newer or history, key=lambda each: each.step)
        dropped = self._pruner.plan(history, newest=last.step).drop
        return any(each.name == info.name for each in dropped)

    def _run(self, source: Storage, info: CheckpointInfo) -> None:
        give_way()
        target, place = self._job.storage, f"{self._job.storage.url}/{info.name}"
        working = ""
        try:
            with self._job.telemetry.span("repair", name=info.name, step=info.step, bytes=info.size_bytes):
                copy = CheckpointCopy.of(source, target, info.name)
                working = copy.working
                self._ownership.check()
                copy.begin(repair=True)
                copy.copy_files(copy.manifest.files, CopyTerms(pace=self._pace, stop=self._stop))
                if self._would_drop(info):
                    raise _GivenUpError("keep= would remove it beside the checkpoints saved meanwhile")
                note_copied(self._ownership, copy.finish(check=self._ownership.check, repair=True))
        except _GivenUpError as reason:
            _logger.info("%s was not repaired: %s", place, reason)
        except (CheckpointError, OSError) as error:
            _logger.warning("%s could not be repaired from the next tier: %s", place, failure_text(error))
        else:
            _logger.info("%s is whole again: it was copied from the next tier", place)
            return
        if working:
            abandon(target, working)

    def _stop(self) -> None:
        if self._closing.is_set():
            raise _GivenUpError("the job has ended before")
