"""Wait for checkpoints of a run that another process writes, and write numbers back to it."""

from __future__ import annotations

import errno
import math
import os
import time
from collections.abc import Generator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final, final

from ckpt_core.commit import (
    Catalog,
    in_use,
    is_same,
    note_measured,
    refuse_as_root,
    verify,
)
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, ConfigError, lost
from ckpt_core.hosting import CheckpointPath, root_of
from ckpt_core.names import MARKER
from ckpt_core.storage import Storage, open_storage
from ckpt_core.types import CheckpointInfo, Lineage
from ckpt_core.validation import boolean, integer, mapping, positive, require, text

_logger = logger_of(__name__)
_MOST_FAILURES: Final = 20
"""Of storage, one after another, before a watch ends with its error."""
_MOST_NAMED: Final = 3


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PinnedCheckpoint:
    """A committed checkpoint that verified, and that no prune removes for now.

    Attributes:
        path: path or URL of its directory.
        step: optimizer steps done.
        info: as listings see it.
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

    One is pinned until the next is asked for, or the generator is closed. The pin is a lease that a thread
    renews: if this process dies, it ends within 15 minutes. Only checkpoints of the present lineage come:
    once training went back to an earlier step, those saved since. What is marked as bad or damaged, does not
    verify or is pruned before its turn is passed over.

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
    return _watched(_Watcher(storage, after, each=each), poll, math.inf if timeout is None else timeout)


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
    """What was handed out of a root, and what comes next."""

    def __init__(self, storage: Storage, after: int | None, *, each: bool) -> None:
        self.storage = storage
        self._catalog = Catalog(storage)
        self._after, self._each = -1 if after is None else after, each
        self._last: CheckpointInfo | None = None
        self._passed_over: set[str] = set()
        self._known: dict[str, CheckpointInfo] = {}

    def next(self, pin: ExitStack) -> PinnedCheckpoint | None:
        """Return the next checkpoint, pinned in `pin`; None if there is none yet."""
        while (info := self._candidate()) is not None:
            try:
                pin.enter_context(in_use(self.storage, info.step))
            except OSError as error:
                if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
                    raise
                raise ConfigError(
                    f"{self.storage.url} cannot be watched: what is handed out is pinned there, and this "
                    f"user may not write: {error}"
                ) from error
            failures = lost(verify(self.storage, info.name))
            there = self._is_there(info)
            if there and not failures:
                self._last = info
                path = CheckpointPath(self.storage.url, info.name)
                return PinnedCheckpoint(path=str(path), step=info.step, info=info)
            pin.close()
            self._passed_over.add(info.save_id)
            if there:
                problems = "; ".join(map(str, failures[:_MOST_NAMED]))
                _logger.warning("%s/%s is passed over: %s", self.storage.url, info.name, problems)
        return None

    def _candidate(self) -> CheckpointInfo | None:
        survey = self._catalog.survey(self._read)
        names = {info.name for info in survey.everything}
        self._known = {name: info for name, info in self._known.items() if name in names}
        floor = self._floor(survey.lineage)
        found = [
            info
            for info in survey.committed
            if info.usable and info.step > floor and info.save_id not in self._passed_over
        ]
        return next(iter(found if self._each else reversed(found)), None)

    def _read(self, name: str) -> CheckpointInfo:
        """Read a marker; in a bucket, where nothing is replaced, once."""
        if self.storage.supports_rename:
            return self._catalog.info(name)
        if name not in self._known:
            self._known[name] = self._catalog.info(name)
        return self._known[name]

    def _floor(self, present: Lineage) -> float:
        """Return the step up to which nothing is new on the present line.

        Where training went back behind what was handed out last, it is where the lines part.
        """
        if self._last is None:
            return self._after
        before, now = self._last.lineage.limits(), present.limits()
        shared = [min(before[each], now[each]) for each in before.keys() & now.keys()]
        return min(self._last.step, max(shared, default=-1.0))

    def _is_there(self, info: CheckpointInfo) -> bool:
        try:
            return is_same(self._catalog.marker(info.name).info(info.name), info)
        except CheckpointNotFoundError:
            return False
        except CheckpointError:
            return True


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
    numbers = _numbers(metrics)
    storage, info = _located(place, storage_options)
    key = note_measured(storage, info.save_id, numbers)
    try:
        is_there = is_same(Catalog(storage).marker(info.name).info(info.name), info)
    except CheckpointNotFoundError:
        is_there = False
    if not is_there:
        storage.delete(key)
        raise CheckpointNotFoundError(f"{storage.url}/{info.name} was pruned or replaced meanwhile{_KEEP_IT}")


_KEEP_IT: Final = (
    "; nothing was written. What is to be measured must stay until then: keep more (keep=), or let `watch` "
    "pin it"
)


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    require("annotate", mapping("metrics", metrics) if metrics else "metrics must name at least one number")
    require("annotate", *(text("the name of a metric", name) for name in metrics))
    numbers = {name: _number(value) for name, value in metrics.items()}
    if wrong := [
        f"{name!r:.80}: {metrics[name]!r:.40}" for name in numbers if not math.isfinite(numbers[name])
    ]:
        raise ConfigError(
            f"metrics must be finite numbers by name, not {', '.join(wrong)}; a checkpoint that is no good "
            "is marked instead: `ckpt mark`"
        )
    return numbers


def _number(value: Any) -> float:
    """Convert a number, or a tensor of one; NaN for anything else."""
    try:
        return math.nan if isinstance(value, str | bytes | bool) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _located(
    place: str | os.PathLike[str], options: Mapping[str, Any] | None
) -> tuple[Storage, CheckpointInfo]:
    """Find the checkpoint that ROOT@STEP or a path names."""
    root, _, digits = os.fspath(place).rpartition("@")
    is_step = bool(root) and digits.isascii() and digits.isdecimal()
    try:
        path = CheckpointPath.of(place)
    except ConfigError:  # a bucket has nothing above it
        if not is_step:
            raise
    else:
        storage = open_storage(path.root, options)
        if not is_step or storage.exists(f"{path.name}/{MARKER}"):
            return storage, Catalog(storage).find(name=path.name)
    storage = open_storage(root_of(root), options)
    try:
        return storage, Catalog(storage).find(step=int(digits))
    except CheckpointNotFoundError as error:
        raise CheckpointNotFoundError(f"{error}{_KEEP_IT}") from None
