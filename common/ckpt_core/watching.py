"""Wait for checkpoints that another process saves, and write numbers back."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, final

from ckpt_core.commit import Catalog, Inventory, forget_notes, in_use, note_measured, refuse_as_root, verify
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointNotFoundError, ConfigError, lost
from ckpt_core.hosting import CheckpointPath, root_of, step_in
from ckpt_core.storage import Storage, open_storage
from ckpt_core.types import CheckpointInfo, Lineage
from ckpt_core.validation import boolean, integer, mapping, positive, require, text

_logger = logger_of(__name__)
_MOST_FAILURES: Final = 20
_MOST_NAMED: Final = 3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedCheckpoint:
    """A committed checkpoint that verified, and that no prune removes for now.

    Attributes:
        path: path or URL of its directory.
        step: optimizer steps done.
        info: as listings see it, with its metrics.
    """

    path: str
    step: int
    info: CheckpointInfo


def watch(
    root: str | os.PathLike[str] | Storage,
    *,
    after: int | None = None,
    each: bool = False,
    poll: float = 5.0,
    timeout: float | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Generator[PinnedCheckpoint]:
    """Yield the checkpoints of a run as they are committed, each verified and pinned.

    One is pinned until the next is asked for, or the generator is closed. The pin is a lease, which a thread
    renews: it ends within 15 minutes if this process dies. Only checkpoints of the present lineage come: once
    training went back to an earlier step, those saved since. What is marked, does not verify or is pruned
    before its turn is passed over.

    Args:
        root: path, URL or `Storage` of the run; it need not exist yet.
        after: no checkpoint up to this step.
        each: every one that is there, in the order of steps, instead of the newest alone.
        poll: seconds between two listings.
        timeout: seconds without another checkpoint after which this ends; None for never.
        storage_options: as of `CheckpointManager`.

    Raises:
        ConfigError: `root` can be none, an argument is wrong, or no pin can be written there.
        OSError: storage has failed 20 times in a row.
    """
    require(
        "watch",
        None if after is None else integer("after", after, minimum=0),
        boolean("each", each),
        positive("poll", poll),
        None if timeout is None else positive("timeout", timeout),
    )
    storage = root if isinstance(root, Storage) else open_storage(root_of(root), storage_options)
    refuse_as_root(storage)
    watcher = _Watcher(storage, -1 if after is None else after, each=each)
    return _watched(watcher, poll, math.inf if timeout is None else timeout)


def _watched(watcher: _Watcher, poll: float, timeout: float) -> Generator[PinnedCheckpoint]:
    waits_since, failures = time.monotonic(), 0
    while True:
        with ExitStack() as pin:
            try:
                found, failures = watcher.next(pin), 0
            except OSError as error:
                failures += 1
                if failures > _MOST_FAILURES or isinstance(error, NotADirectoryError):
                    raise
                _logger.warning("%s is asked again, for it failed: %s", watcher.storage.url, error)
                found = None
            if found is not None:
                yield found
                waits_since = time.monotonic()
                continue
        left = waits_since + timeout - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(poll, left))


@final
class _Watcher:
    def __init__(self, storage: Storage, after: int, *, each: bool) -> None:
        self.storage, self._after, self._each = storage, after, each
        self._catalog = Catalog(storage)
        self._last: CheckpointInfo | None = None
        self._passed_over: set[str] = set()
        self._known: dict[str, CheckpointInfo] = {}

    def next(self, pin: ExitStack) -> PinnedCheckpoint | None:
        while (info := self._candidate()) is not None:
            place = CheckpointPath(self.storage.url, info.name)
            try:
                pin.enter_context(in_use(self.storage, info.step))
            except OSError as error:
                if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
                    raise
                raise ConfigError(f"{place} cannot be pinned for who watches the run: {error}") from error
            failures = lost(verify(self.storage, info.name))
            there = Inventory(self.storage).still_there(info)
            if there and not failures:
                self._last = info
                return PinnedCheckpoint(path=str(place), step=info.step, info=info)
            pin.close()
            self._passed_over.add(info.save_id)
            if there:
                _logger.warning("%s is passed over: %s", place, "; ".join(map(str, failures[:_MOST_NAMED])))
        return None

    def _candidate(self) -> CheckpointInfo | None:
        survey = self._catalog.survey(self._read)
        there = self._known.keys() & {info.name for info in survey.everything}
        self._known = {name: self._known[name] for name in there}
        floor = self._floor(survey.lineage)
        new = [info for info in survey.committed if info.step > floor and info.usable]
        found = [info for info in new if info.save_id not in self._passed_over]
        return next(iter(found if self._each else reversed(found)), None)

    def _read(self, name: str) -> CheckpointInfo:
        """Read a marker; in a bucket, where nothing is replaced, once."""
        if self.storage.supports_rename or name not in self._known:
            self._known[name] = self._catalog.info(name)
        return self._known[name]

    def _floor(self, present: Lineage) -> float:
        """Return the step up to which nothing is new: where the lines part, if they do."""
        if self._last is None:
            return self._after
        before, now = self._last.lineage.limits(), present.limits()
        shared = [min(before[each], now[each]) for each in before.keys() & now.keys()]
        return min(self._last.step, max(shared, default=-1.0))


def annotate(
    place: str | os.PathLike[str],
    metrics: Mapping[str, float],
    *,
    storage_options: Mapping[str, Any] | None = None,
) -> None:
    """Write numbers measured of a committed checkpoint back, beside its manifest.

    Listings and the retention of a running job see them at their next look, in the place of numbers of the
    same name that were given with the save. Any number of processes may do so at a time.

    Args:
        place: ROOT@STEP, or the path or URL of a checkpoint.
        metrics: name -> finite number.
        storage_options: as of `CheckpointManager`.

    Raises:
        CheckpointNotFoundError: it is not committed, or was pruned meanwhile.
        ConfigError: `place` names no checkpoint, or a value is not a finite number.
        OSError: nothing can be written there.
    """
    require("annotate", mapping("metrics", metrics) if metrics else "metrics must name at least one number")
    require("annotate", *(text("the name of a metric", name) for name in metrics))
    numbers = {name: _number(value) for name, value in metrics.items()}
    if wrong := [name for name, value in numbers.items() if not math.isfinite(value)]:
        raise ConfigError(
            f"metrics must be finite numbers, not {wrong[0]!r:.80}: {metrics[wrong[0]]!r:.40}; a checkpoint "
            "that is no good is marked instead: `ckpt mark`"
        )
    root, step = step_in(os.fspath(place)) or ("", None)
    path = CheckpointPath.of(place) if step is None else CheckpointPath(root_of(root))
    storage = open_storage(path.root, storage_options)
    info = Catalog(storage).find(step=step, name=path.name or None)
    note_measured(storage, info.save_id, numbers)
    if not Inventory(storage).still_there(info):
        forget_notes(storage, info.save_id)
        raise CheckpointNotFoundError(
            f"{storage.url}/{info.name} was pruned or replaced meanwhile, and nothing is noted of it: keep "
            "more (keep=), or let `watch` pin what is measured"
        )


def _number(value: Any) -> float:
    """Convert a number, or a tensor of one; NaN for anything else."""
    try:
        return math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
