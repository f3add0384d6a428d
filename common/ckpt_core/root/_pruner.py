"""Retention applied: the checkpoints to remove, and their order. Coordinator only."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, Self, final

from ckpt_core.commit import (
    Catalog,
    Inventory,
    Manifest,
    abandon,
    commit_copy,
    note_measured,
    read_notes,
    remove,
    working_name,
    write_signature,
)
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, SaveError, failure_text
from ckpt_core.journal import MOST_STEPS
from ckpt_core.names import MARKER, SIGNATURE, WEIGHTS_SUFFIX, run_name
from ckpt_core.options import CheckpointOptions, SignManifest
from ckpt_core.retention import (
    Abandoned,
    KeepAll,
    PrunePlan,
    as_it_is,
    plan_prune,
    unknown_metrics,
    withheld,
)
from ckpt_core.root._ownership import Ownership
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Telemetry
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)
_MOST_TRIES: Final = 3
_LOOK_SECONDS: Final = 0.2
_END_SECONDS: Final = 2.0


class WeightsDraft(NamedTuple):
    """Where the weights of a checkpoint go: the same for the same, in every tier."""

    name: str
    save_id: str
    working: str

    @classmethod
    def of(cls, storage: Storage, info: CheckpointInfo, dtype: str | None) -> Self:
        """Return where, which is another name if an earlier lineage's have its own."""
        save_id = hashlib.sha256(f"{info.save_id} {dtype}".encode()).hexdigest()[:24]
        name = info.name + WEIGHTS_SUFFIX
        if storage.exists(f"{name}/{MARKER}"):
            name = run_name(info.name, info.lineage.id) + WEIGHTS_SUFFIX
        return cls(name, save_id, working_name(storage, name, save_id))


@final
class Demoter:
    """Makes weights of checkpoints, one at a time, for the owner of a root.

    A draft is written beside the training. The owner commits it under the name of the checkpoint and
    `.weights`; only then does a prune remove the whole one, also the next one after a kill.

    Concurrency: the thread that prunes, but for `close`; drafts are written on a thread of their own.

    Args:
        draft: writes a draft, and calls its last argument again and again, which raises to leave it.
        size: returns how many bytes the weights will have.
        close: ends what writes drafts, also in the middle of one.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        draft: Callable[[CheckpointInfo, str | None, Callable[[], None]], None],
        size: Callable[[CheckpointInfo, str | None], int],
        close: Callable[[], None],
        sign: SignManifest | None = None,
    ) -> None:
        self._storage, self._write, self._size, self._sign = storage, draft, size, sign
        self._close = close
        self._tries, self._sizes = Counter[str](), dict[tuple[str, str | None], int]()
        self._running: tuple[CheckpointInfo, WeightsDraft, threading.Thread] | None = None
        self._error: CheckpointError | OSError | None = None
        self._left = threading.Event()

    def weights_bytes(self, info: CheckpointInfo, dtype: str | None) -> int:
        """Return what a checkpoint will take, as far as is known; see `plan_prune`."""
        key = info.save_id, dtype
        if key not in self._sizes and self._tries[info.save_id] < _MOST_TRIES:
            with suppress(CheckpointError, OSError):
                self._sizes[key] = info.size_bytes if self.refusal(info) else self._size(info, dtype)
        given_up = self._tries[info.save_id] >= _MOST_TRIES
        return info.size_bytes if given_up else self._sizes.get(key, info.size_bytes)

    def refusal(self, info: CheckpointInfo) -> str | None:
        """Say why a checkpoint stays whole here in spite of the rules, or None."""
        if self._storage.num_disks > 1:
            return "is on disks of several nodes, where nothing is demoted: give the rule to an Upload"
        if self._sign is None and self._storage.exists(f"{info.name}/{SIGNATURE}"):
            return "is signed, and its weights would not be: demote it in a run, with sign_manifest="
        return None

    def begin(self, wanted: Sequence[tuple[CheckpointInfo, str | None]]) -> bool:
        """Begin a draft of the first that has not failed; return whether one is under way."""
        todo = [each for each in wanted if self._tries[each[0].save_id] < _MOST_TRIES]
        if todo and self._storage.num_disks > 1:
            self._tries.update({info.save_id: _MOST_TRIES for info, _ in wanted})
            _logger.warning("%s %s", self._storage.url, self.refusal(todo[0][0]))
            return False
        if self._running is None and todo and not self._left.is_set():
            info, dtype = todo[0]
            draft = WeightsDraft.of(self._storage, info, dtype)
            # A daemon: the process must be able to end while storage hangs.
            thread = threading.Thread(
                target=self._run, args=(info, dtype, draft), name="ckpt-demote", daemon=True
            )
            self._running = info, draft, thread
            thread.start()
        return self._running is not None

    @property
    def is_busy(self) -> bool:
        return self._running is not None and self._running[2].is_alive()

    def wait(self) -> None:
        if self._running is not None:
            self._running[2].join(_LOOK_SECONDS)

    def take(
        self, check: Callable[[], None], note: Callable[[CheckpointInfo], None] = lambda _: None
    ) -> CheckpointError | OSError | None:
        """Commit the draft if it is finished, and `note` it; return why it could not be.

        That is logged, and harms nothing.

        Raises:
            CheckpointError: from `check`: another job has taken the root.
        """
        if self._running is None or self._running[2].is_alive():
            return None
        check()
        (info, draft, _), self._running = self._running, None
        error, self._error = self._error, None
        storage = self._storage
        try:
            if error is not None:
                raise error
            manifest = Manifest.read(storage, draft.working)
            note_measured(storage, draft.save_id, read_notes(storage).measured(info.save_id))
            if self._sign is not None:
                write_signature(storage, draft.working, manifest, partial(self._sign, draft.name))
            note(commit_copy(storage, draft.working, draft.name, manifest, check=check))
        except (CheckpointError, OSError) as failure:
            self._tries[info.save_id] += _MOST_TRIES if isinstance(failure, ConfigError) else 1
            if not (isinstance(failure, SaveError) and failure.in_doubt):
                abandon(storage, draft.working)
            _logger.warning(
                "%s/%s stays whole for now, because its weights could not be written: %s",
                storage.url,
                info.name,
                failure_text(failure),
            )
            return failure
        _logger.info("%s/%s has its weights in %s", storage.url, info.name, draft.name)
        return None

    def close(self) -> None:
        """Leave the draft under way; what it has written is removed by the next job."""
        self._left.set()
        self._close()
        if self._running is not None:
            self._running[2].join(_END_SECONDS)

    def _run(self, info: CheckpointInfo, dtype: str | None, draft: WeightsDraft) -> None:
        try:
            if (refusal := self.refusal(info)) is not None:
                raise ConfigError(f"it {refusal}")
            abandon(self._storage, draft.working)  # of an attempt that was killed
            self._write(info, dtype, self._raise_if_left)
        except (CheckpointError, OSError) as error:
            self._error = error

    def _raise_if_left(self) -> None:
        if self._left.is_set():
            raise CheckpointError("it was left")


_ENOUGH: Final = 2
"""The first checkpoint of a run is often saved before the first evaluation."""


@final
class Pruner:
    """Removal of checkpoints that a manager's retention policy does not keep.

    Concurrency: one thread at a time. `behind` says whether the last prune has left something to be made
    weights of.
    """

    def __init__(
        self,
        storage: Storage,
        options: CheckpointOptions,
        *,
        ownership: Ownership,
        telemetry: Telemetry,
        demoter: Demoter | None = None,
    ) -> None:
        self._demoter = demoter
        self.weights_bytes = as_it_is if demoter is None else demoter.weights_bytes
        self.behind = False
        self._storage = storage
        self._policy = options.keep or KeepAll()
        self._abandoned: Abandoned = options.abandoned
        self._ownership = ownership
        self._warned = False
        self._kept: Mapping[str, Sequence[int]] = {}
        self._telemetry = telemetry

    def plan(
        self, history: Sequence[CheckpointInfo] | None = None, *, newest: int | None = None
    ) -> PrunePlan:
        """Apply the policy to a history, by default that of the root, without removals.

        `newest` is the step committed last. Timestamps are not enough: a clock may have been set back.
        """
        if history is None:
            history = Inventory(self._storage, lambda: self._ownership.held).history()
        self._check_metrics(history)
        return self._plan(history, newest)

    def _plan(self, history: Sequence[CheckpointInfo], newest: int | None) -> PrunePlan:
        return plan_prune(
            self._policy,
            history,
            time.time(),
            abandoned=self._abandoned,
            last=newest,
            weights_bytes=self.weights_bytes,
        )

    def apply(
        self,
        *,
        newest: int | None = None,
        go_on: Callable[[], bool] = lambda: True,
        until: float = 0.0,
    ) -> PrunePlan:
        """Remove checkpoints that the policy does not keep, oldest first.

        Weights are made in the background, and waited for `until` then, in monotonic seconds; what they
        replace is removed by the first prune after that.

        One that stays must be known to be whole first (see `Inventory.droppable`, also for `go_on`). Parts of
        checkpoints, where the disks of nodes that are gone had the rest, are removed likewise. The root is
        listed again, so that pins and marks set meanwhile are seen. Marked checkpoints are neither counted
        nor removed.

        Returns:
            The plan as carried out.

        Raises:
            RootBusyError: another job has taken the root.
        """
        self._ownership.check()
        while True:
            if self._demoter is not None:
                self._demoter.take(self._ownership.check, self._ownership.inventory.note_written)
            plan = self._remove_dropped(newest, go_on)
            demoter, self.behind = self._demoter, False
            if demoter is None or not demoter.begin(plan.demote):
                return plan
            self.behind = True
            while demoter.is_busy and go_on() and time.monotonic() < until:
                demoter.wait()
            if not go_on() or time.monotonic() >= until:
                return plan

    def close(self) -> None:
        if self._demoter is not None:
            self._demoter.close()

    def _remove_dropped(self, newest: int | None, go_on: Callable[[], bool]) -> PrunePlan:
        ownership, plans = self._ownership, list[PrunePlan]()

        def choose(history: Sequence[CheckpointInfo]) -> Sequence[CheckpointInfo]:
            plans.append(self.plan(history, newest=newest))
            return [*plans[-1].drop, *self._parts_to_drop(history, newest)]

        drop = ownership.inventory.droppable(choose, go_on=go_on)
        removed: list[CheckpointInfo] = []
        for info in drop:
            ownership.check()
            # Another process may have deleted or replaced it meanwhile, or begun to use it.
            taken = info.step in read_notes(self._storage).in_use
            if not taken and ownership.inventory.still_there(info):
                self.drop(info)
                removed.append(info)
        lighter = [info for info in removed if info.name in plans[-1].superseded]
        self.report(lighter, "demoted: the weights of each stay")
        self.report([info for info in removed if info not in lighter], f"not kept by {self._policy!r}")
        planned = {info.name for info in plans[-1].drop}
        plan = withheld(plans[-1], [info for info in drop if info.name in planned])
        found = defaultdict[str, list[int]](list)
        for step, reasons in plan.keep.items():
            for reason in reasons:
                found[reason].append(step)
        for info in plan.abandoned:
            found["abandoned, and not pruned"].append(info.step)
        kept = {reason: steps[-MOST_STEPS:] for reason, steps in found.items()}
        if kept != self._kept:
            self._kept = kept
            self._telemetry.point("retention", kept=kept, tier=self._storage.url)
        return plan

    def remove(self, name: str) -> None:
        """Remove one committed checkpoint on behalf of its host, regardless of the policy."""
        self._ownership.check()
        info = Catalog(self._storage).find(name=name)
        if info.pinned is not None:
            raise ConfigError(f"it is pinned ({info.pinned}); unpin it first")
        if info.name in self._ownership.held:
            raise ConfigError("its upload has not ended; remove it afterwards")
        self.drop(info)
        self.report([info], "removed by its host")

    def drop(self, info: CheckpointInfo, **why: str) -> None:
        """Remove a checkpoint that retention may drop; `report` follows."""
        with self._telemetry.span("prune.remove", step=info.step, name=info.name, **why):
            remove(self._storage, info)
        self._ownership.inventory.forget(info.name)

    def report(self, removed: Sequence[CheckpointInfo], why: str) -> None:
        """Report removals to telemetry, if there were any."""
        if removed:
            size = sum(info.size_bytes for info in removed)
            names = [info.name for info in removed]
            self._telemetry.point("prune", names=names, size_bytes=size, why=why, tier=self._storage.url)

    def _parts_to_drop(
        self, history: Sequence[CheckpointInfo], newest: int | None
    ) -> Sequence[CheckpointInfo]:
        """Return the parts to remove: retention would not keep them if they were whole.

        None is the newest. The rest of a part may come back with its node, and nothing is removed that would
        be kept then. Where the step was saved again, that checkpoint stands for it, also of the newest.
        """
        parts = self._ownership.inventory.parts
        if not parts:
            return ()
        held, plan = self._ownership.held, self._plan([*history, *parts], newest)
        drop = {(info.name, info.save_id) for info in plan.drop}
        whole = {info.step for info in history if info.usable and not info.abandoned}
        return [
            info
            for info in parts
            if (info.step in whole or (info.name, info.save_id) in drop)
            and info.step <= max(whole, default=-1)
            and info.pinned is None
            and info.usable
            and info.name not in held
        ]

    def _check_metrics(self, history: Sequence[CheckpointInfo]) -> None:
        """Warn once if the policy ranks by a metric that no checkpoint has."""
        ranks_by = unknown_metrics(self._policy, ())
        if self._warned or not ranks_by:
            return
        history = [info for info in history if not info.abandoned]
        unknown = () if len(history) < _ENOUGH else unknown_metrics(self._policy, history)
        if unknown:
            self._warned = True
            _logger.warning(
                "none of the %d checkpoints in %s has a number for the metric %s, so that none is kept as "
                "the best, and all stay where nothing else in keep= keeps any; metrics there: %s. Measure "
                "it where checkpoints are saved, write it back (`ckpt annotate`), or correct keep=",
                len(history),
                self._storage.url,
                " or ".join(map(repr, unknown)),
                ", ".join(sorted({metric for info in history for metric in info.metrics})) or "none",
            )
