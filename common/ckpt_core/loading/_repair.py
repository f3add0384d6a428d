"""Repair of the nearest tier: the checkpoint resumed is made whole there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, final

from ckpt_core.commit import abandon, plain_storage
from ckpt_core.crew import give_way
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, HalfRenamedError, failure_text
from ckpt_core.groups import GroupedStorage
from ckpt_core.loading._loader import Loaded
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job, Ownership, Pruner
from ckpt_core.storage import Storage, Throttle
from ckpt_core.tiers import CheckpointCopy, CopyTerms, Tier
from ckpt_core.tiers.repairing import CannotRepairError, PartsRepair
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)
_ROOM: Final = 2
"""A repair leaves room for a save of the same size."""


class _GivenUpError(Exception):
    """The repair has become pointless; the message says why."""


def note_copied(ownership: Ownership, info: CheckpointInfo) -> None:
    """Note in a root that a checkpoint was copied there, and verified on the way."""
    ownership.inventory.note_written(info)
    ownership.inventory.vouch(info)
    ownership.note_sound(info.name)


@final
class Repairer:
    """Makes the checkpoint resumed whole in the nearest tier.

    If it is damaged or missing there, it is copied in the background, on the coordinator, from the files that
    the load was made from. A save never waits for it: the copy is written into a working directory of its
    own, and then takes the name in one step. Where each node has a disk of its own, the disks get what they
    lack; see `PartsRepair`.

    Concurrency: methods on the main thread. One thread of its own, which `close` stops.
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
        self._working = ""

    def begin(self, loaded: Loaded) -> None:
        """Begin the repair that a resume calls for, if any, or remove a wrong mark.

        The root is this job's.
        """
        if loaded.wrongly_marked and self._reads_every_byte:
            self._ownership.note_sound(loaded.info.name)
        if not (self._job.coordinator.is_coordinator and self._nearest.shared):
            return
        if self._thread is not None or loaded.nearest_name not in {"", loaded.copy.info.name}:
            return  # the tiers have it by different names
        storage = self._job.storage
        if isinstance(storage, GroupedStorage) and storage.num_disks > 1:
            # Damage to what every disk has is no damage to the load: only a look finds it.
            self._start(loaded.copy.info, partial(self._copy_lacking, storage, loaded))
            return
        missing = not loaded.nearest_name
        if not (missing or 0 in loaded.damaged):
            return
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
        info = loaded.copy.info
        self._start(info, partial(self._copy_all, loaded.storage, info))

    def _start(self, info: CheckpointInfo, repair: Callable[[], bool]) -> None:
        self._thread = threading.Thread(
            target=self._run, args=(info, repair), name="ckpt-repair", daemon=True
        )
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
        free, total, _ = self._job.storage.space()
        needed = _ROOM * info.size_bytes + self._headroom.of(total)
        if free is not None and free < needed:
            return f"it would take room that the next save needs ({free} of {needed} bytes are free)"
        return self._reason_not_kept(info) if missing else ""

    def _reason_not_kept(self, info: CheckpointInfo) -> str:
        """Return that retention would soon remove what is not there yet, or ""."""
        newer = replace(info, step=info.step + 1, name=f"{info.name}+1", created=time.time())
        return "keep= would not keep it beside a newer one" if self._would_drop(info, newer) else ""

    def _would_drop(self, info: CheckpointInfo, *newer: CheckpointInfo) -> bool:
        """Return whether retention would remove what is not there yet, beside newer ones."""
        history = self._ownership.inventory.history()
        if any(each.name == info.name for each in history):
            return False
        history = [*history, info, *newer]
        last = max(newer or history, key=lambda each: each.step)
        return any(each.name == info.name for each in self._pruner.plan(history, newest=last.step).drop)

    def _run(self, info: CheckpointInfo, repair: Callable[[], bool]) -> None:
        """Run a repair that returns whether it was needed, and tell how it ended."""
        give_way()
        place = f"{self._job.storage.url}/{info.name}"
        try:
            if repair():
                _logger.info("%s is whole again: what it lacked was copied in the background", place)
        except (_GivenUpError, CannotRepairError) as reason:
            _logger.info("%s was not repaired: %s", place, reason)
        except (CheckpointError, OSError) as error:
            _logger.warning("%s could not be repaired: %s", place, failure_text(error))
            if isinstance(error, HalfRenamedError):
                self._working = ""  # the next start of the job finishes it
        else:
            return
        if self._working:
            abandon(self._job.storage, self._working)

    def _copy_all(self, source: Storage, info: CheckpointInfo) -> bool:
        with self._job.telemetry.span("repair", name=info.name, step=info.step, bytes=info.size_bytes):
            copy = CheckpointCopy.of(plain_storage(source, info.name), self._job.storage, info.name)
            self._working = copy.working
            self._ownership.check()
            copy.begin(repair=True)
            copy.copy_files(copy.manifest.files, self._terms)
            self._require_kept(info)
            note_copied(self._ownership, copy.finish(check=self._ownership.check, repair=True))
        return True

    def _copy_lacking(self, root: GroupedStorage, loaded: Loaded) -> bool:
        info = loaded.copy.info
        repair = PartsRepair(root, info, loaded.sources, self._stop)
        repair.look(loaded.suspects if self._reads_every_byte else None)
        if not repair.is_needed:
            if 0 in loaded.damaged:
                self._ownership.note_sound(info.name)
            return False
        if reason := repair.crowded(self._headroom.of) or self._reason_not_kept(info):
            raise CannotRepairError(reason)
        _logger.info("%s/%s is not whole on the disk of each node, and is repaired", root.url, info.name)
        with self._job.telemetry.span("repair", name=info.name, step=info.step, bytes=repair.size_bytes):
            self._working = repair.working
            self._check(info)
            repair.run(self._terms, check=partial(self._check, info))
            note_copied(self._ownership, info)
        return True

    @property
    def _terms(self) -> CopyTerms:
        return CopyTerms(pace=self._pace, stop=self._stop)

    def _check(self, info: CheckpointInfo) -> None:
        self._stop()
        self._ownership.check()
        self._require_kept(info)

    def _require_kept(self, info: CheckpointInfo) -> None:
        if self._would_drop(info):
            raise _GivenUpError("keep= would remove it beside the checkpoints saved meanwhile")

    def _stop(self) -> None:
        if self._closing.is_set():
            raise _GivenUpError("the job has ended before")
