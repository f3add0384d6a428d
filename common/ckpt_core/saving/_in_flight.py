"""Requests and handles of saves, which run in order on a watched thread."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Final, TypeVar, cast, final

from typing_extensions import override

from ckpt_core.collective import checked_step
from ckpt_core.coordination import Coordinator, require_same_process
from ckpt_core.crew import give_way, settle
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import (
    CheckpointError,
    ConfigError,
    CoordinationError,
    DeadlineError,
    SaveError,
    SavePhase,
    failure_text,
)
from ckpt_core.names import parse_step_name, step_name
from ckpt_core.options import CheckpointOptions
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import mapping, require, text

_DOING: Final[Mapping[SavePhase, str]] = {
    "plan": "planning",
    "stage": "staging",
    "open": "opening",
    "write": "writing",
    "commit": "committing",
}
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveRequest:
    """The step and name of a save, with its metrics and annotations.

    Attributes:
        replace: whether `name` may be committed already.
        progress: the counts that the manifest names: `epochs`, `total_steps`.
        refusal: why this rank cannot ask for a save; reported to the ranks that can.
    """

    step: int
    name: str
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    annotations: Mapping[str, Any] = field(default_factory=dict[str, Any])
    replace: bool = False
    progress: Mapping[str, int] = field(default_factory=dict[str, int])
    refusal: CheckpointError | None = None

    @classmethod
    def checked(
        cls,
        step: Any,
        name: str | None,
        *,
        metrics: Mapping[str, float] | None,
        annotations: Mapping[str, Any] | None,
        progress: Mapping[str, int],
    ) -> SaveRequest:
        """Return the request of a call of `save`.

        Raises:
            ConfigError: an argument is invalid.
        """
        number = checked_step("save", step)
        require(
            "save",
            None if name is None or name == "" else text("name", name),
            None if metrics is None else mapping("metrics", metrics),
            None if annotations is None else mapping("annotations", annotations),
        )
        return cls(
            step=number,
            name=step_name(number) if name is None else name,
            metrics=dict(metrics or {}),
            annotations=dict(annotations or {}),
            replace=name is not None,
            progress=dict(progress),
        )

    def __post_init__(self) -> None:
        named = parse_step_name(self.name)
        if named not in {None, self.step}:
            raise ConfigError(
                f"{self.name!r} is the name of step {named}, which would find it taken: give this "
                f"step, {self.step}, another name"
            )
        # Now, for the commit would find out only after everything has been written.
        try:
            json.dumps(self.annotations, allow_nan=False, ensure_ascii=False).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"annotations of step {self.step} must be plain JSON: {error}") from error
        try:
            # A metric is often a tensor of one element, which no listing could show.
            numbers = {str(name): _number(value) for name, value in self.metrics.items()}
        except (TypeError, ValueError, OverflowError, RuntimeError, AttributeError) as error:
            raise ConfigError(f"metrics of step {self.step} must be numbers by name: {error}") from error
        object.__setattr__(self, "metrics", numbers)

    def digest(self) -> int:
        """Hash the request to [0, 2**62): equal on ranks that ask for the same save."""
        asked = f"{self.step} {self.replace} {self.name}".encode()
        return int.from_bytes(hashlib.blake2b(asked, digest_size=8).digest(), "big") >> 2


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | bool):
        raise TypeError(f"{value!r:.40} is a {type(value).__name__}")
    return float(value)


@final
class _OutcomeFuture(Future[CheckpointInfo]):
    """The outcome of a save; `taken` once somebody has received its error."""

    taken = False

    @override
    def result(self, timeout: float | None = None) -> CheckpointInfo:
        self.exception(timeout)
        return super().result()

    @override
    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.taken = error is not None
        return error


@final
class SaveHandle:
    """A save in flight.

    Attributes:
        step: the step saved.
        name: directory name of the checkpoint under its root.
        created: when it was agreed on, Unix seconds on the coordinator's clock.
        staged: resolves when training may change the state.
        committed: resolves when the checkpoint exists, or raises the same `SaveError` on every rank. Who gets
            the error here, or from `result`, has it: the manager does not raise it again.
        uploaded: resolves with the checkpoint when every further tier that it was due for has it; with None
            if it was due for none, a newer one has overtaken it, or it was left to the next run; raises
            `UploadError` if it could not be uploaded in time. Without an `Upload` it is `committed`.

    Concurrency: futures may be waited for on any thread of any rank; nothing here is collective.
    """

    def __init__(self, step: int, name: str, created: float) -> None:
        self.step = step
        self.name = name
        self.created = created
        self._pid = os.getpid()
        self.staged: Future[None] = Future()
        self.committed: Future[CheckpointInfo] = _OutcomeFuture()
        self.uploaded = cast("Future[CheckpointInfo | None]", self.committed)
        for future in (self.staged, self.committed):
            future.set_running_or_notify_cancel()  # a caller that waits must not cancel the save

    def done(self) -> bool:
        """Return whether the save has ended, successfully or not."""
        return self.committed.done()

    @property
    def error(self) -> BaseException | None:
        """Why the save has failed, None if it has not; the manager raises it all the same."""
        return Future.exception(self.committed) if self.committed.done() else None

    @property
    def taken(self) -> bool:
        """Whether its error has been received."""
        return cast("_OutcomeFuture", self.committed).taken

    def result(self, timeout_seconds: float | None = None) -> CheckpointInfo:
        """Wait for the commit.

        Raises:
            ConfigError: this process was forked from the one that saves.
            SaveError: the save failed on some rank.
            TimeoutError: the save has not ended in time.
        """
        require_same_process(self._pid)
        return self.committed.result(timeout_seconds)


def failed_in(phase: SavePhase, error: BaseException) -> SaveError:
    """Make the error that a rank reports to the others when a phase fails on it."""
    if isinstance(error, SaveError):
        reported = error if error.phase else error.retold(str(error), phase=phase)
    else:
        reported = SaveError(f"while {_DOING[phase]}: {failure_text(error)}", phase=phase)
    if reported is not error:
        reported.__cause__ = error
    return reported


def save_error(url: str, step: int, phase: SavePhase, error: CoordinationError) -> SaveError:
    """Make the one error that every rank raises for a failed save."""
    # Nothing is written while ranks plan, whether or not this rank learned the result.
    in_doubt = error.in_doubt and phase != "plan"
    if isinstance(error, DeadlineError):
        remedy = "find out what stopped those ranks"
    else:
        full = any(cause.errno in _FULL for cause in error.causes.values())
        remedy = "free space there" if full else "remove the cause"
    verdict = f"it is not known whether step {step} was" if in_doubt else f"step {step} was not"
    return SaveError(
        f"{verdict} saved to {url} (phase {phase}): {error}. "
        f"Every checkpoint committed before is untouched; {remedy}, then save again",
        step=step,
        phase=phase,
        failures=error.failures,
        in_doubt=in_doubt,
    )


_logger = logger_of(__name__)

TaskT = TypeVar("TaskT", bound="Task")


@final
@dataclass(frozen=True, slots=True)
class _Heartbeat:
    """The last progress of the thread, its present activity, and the limit for that."""

    doing: str
    limit_seconds: float
    since: float = field(default_factory=time.monotonic)

    @property
    def remaining_seconds(self) -> float:
        return self.since + self.limit_seconds - time.monotonic()


class Task:
    """One piece of work for the save thread; it is `over` when `ended` or given up."""

    handle: SaveHandle

    def __init__(self) -> None:
        self.over = threading.Event()
        self.ended = threading.Event()

    def run(self) -> None:
        """Do the work, and resolve the handle."""
        raise NotImplementedError

    def give_up(self, reason: str) -> None:
        """Resolve the handle, because the work hangs; called once, on another thread."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        """Take an exception that `run` raised."""
        if not settle(self.handle.committed, error):
            _logger.error("after the commit of step %d: %s", self.handle.step, error, exc_info=error)


@final
class SaveThread:
    """The background thread of saves, with a watchdog; as nice as `priority`.

    Concurrency: `submit`, `stuck` and `close` on the main thread, `heartbeat` on the save thread.
    """

    def __init__(self, deadline_seconds: float, priority: int = 0) -> None:
        self.deadline_seconds, self._priority = deadline_seconds, priority
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._heartbeat = _Heartbeat("nothing", deadline_seconds)
        self._thread: threading.Thread | None = None
        self._last: Task | None = None
        self._watchers: list[threading.Thread] = []

    def submit(self, task: TaskT) -> TaskT:
        """Run `task` after every task submitted before; return it."""
        if self._thread is None:
            # A daemon: the process must be able to end while the thread hangs.
            self._thread = threading.Thread(target=self._loop, name="ckpt-save", daemon=True)
            self._thread.start()
        if self._last is None or self._last.ended.is_set():
            self.heartbeat("beginning")
        self._last = task
        # Not a daemon: a process whose main thread ends waits for its last save, but not forever.
        watcher = threading.Thread(target=self._watch, args=(task,), name="ckpt-save-watch")
        try:
            watcher.start()
            self._watchers = [*(each for each in self._watchers if each.is_alive()), watcher]
        finally:
            # Last: from now on the two threads need the interpreter lock.
            self._tasks.put(task)
        return task

    def heartbeat(self, doing: str, limit_seconds: float | None = None) -> None:
        """Record what the thread does next, in words.

        By default it counts as hanging after the deadline.
        """
        self._heartbeat = _Heartbeat(doing, self.deadline_seconds if limit_seconds is None else limit_seconds)

    @property
    def waiting(self) -> bool:
        """Whether more tasks wait for the thread."""
        return not self._tasks.empty()

    @property
    def idle(self) -> bool:
        """Whether every task has ended or was given up."""
        return (last := self._last) is None or last.over.is_set()

    def until_idle(self) -> None:
        """Block until every task has ended or was given up. On any thread."""
        if (last := self._last) is not None:
            last.over.wait()

    def stuck(self) -> str:
        """Describe where the thread still hangs after a give-up; "" if it does not."""
        last = self._last
        hangs = last is not None and last.over.is_set() and not last.ended.is_set()
        return self._described() if hangs else ""

    def close(self) -> None:
        """Take no more tasks, end the thread unless it hangs. All tasks must be over."""
        self._tasks.put(None)
        if self._thread is not None and self._last is not None and self._last.ended.is_set():
            self._thread.join()
        for watcher in self._watchers if self.idle else ():
            watcher.join()

    def _loop(self) -> None:
        give_way(self._priority)
        while (task := self._tasks.get()) is not None:
            try:
                task.run()
            except BaseException as error:  # noqa: BLE001 - `fail` delivers it with the handle
                task.fail(error)
            finally:
                self.heartbeat("beginning")
                task.ended.set()
                task.over.set()

    def _watch(self, task: Task) -> None:
        while not task.over.wait(max(0.0, (last := self._heartbeat).remaining_seconds)):
            if self._heartbeat is last and last.remaining_seconds <= 0:
                task.give_up(self._described())
                task.over.set()

    def _described(self) -> str:
        last = self._heartbeat
        return f"{last.doing} has made no progress for {time.monotonic() - last.since:.3g} s"


@final
class InFlightSaves:
    """The saves in flight: back-pressure, and exactly-once delivery of every outcome.

    At most `options.arenas` saves are in flight. A save counts until its outcome is delivered, which happens
    at the same calls on every rank. A save without progress for longer than the deadline has failed (see
    `SaveThread`), so every wait here is bounded.

    Concurrency: all methods on the main thread; `ready` is collective.

    Attributes:
        latest: the last save started, unless it is known to have failed.
    """

    def __init__(self, coordinator: Coordinator, thread: SaveThread, options: CheckpointOptions) -> None:
        self._coordinator = coordinator
        self._thread = thread
        self._options = options
        self._undelivered: deque[SaveHandle] = deque()
        self._closed = False
        self.latest: SaveHandle | None = None

    def ready(self) -> bool:
        """Return whether a new save may start; wait for the oldest if so configured.

        Raises:
            SaveError: the oldest save has failed, and `on_error` is `raise`.
        """
        if self._options.back_pressure == "skip":
            flying = sum(not handle.done() for handle in self._undelivered)
            full = [int(flying >= self._options.arenas)]
            if self._coordinator.all_reduce_max(full, what="deciding whether to save")[0]:
                return False
        # The number of handles is equal on every rank, so all ranks raise at the same call.
        while len(self._undelivered) >= self._options.arenas:
            self._deliver(together=True)
        return True

    def start(self, save: Task) -> None:
        if self._closed:
            raise RuntimeError("cannot start a save after shutdown")
        self.latest = save.handle
        self._undelivered.append(save.handle)
        self._thread.submit(save)

    def wait(self, *, together: bool = False) -> None:
        """Wait for every save in flight and its prune, and deliver the first failure.

        With `together` all ranks wait, and the next thing that they do is collective.

        Raises:
            SaveError: a save failed, and `on_error` is `raise`. If several did, the next call raises the
                next error.
        """
        self._thread.until_idle()
        while self._undelivered:
            self._deliver(together=together)

    def until_committed(self) -> None:
        """Wait for the outcome of every save in flight, without its delivery."""
        wait_for([handle.committed for handle in self._undelivered])

    def settle(self) -> None:
        """Wait for every save in flight, ahead of a mandatory one; only log failures."""
        self._thread.until_idle()
        while self._undelivered:
            try:
                self._deliver()
            except SaveError as error:
                _logger.error("%s", error)  # noqa: TRY400 - the next save replaces it

    def forget(self) -> None:
        """Forget the last save: after a load, a save of the same name is a different one."""
        self.latest = None

    def close(self) -> None:
        self._closed = True
        try:
            self.wait()
        finally:
            self._thread.close()
            for handle in self._undelivered:
                _log_failure(handle)
            self._undelivered.clear()

    def _deliver(self, *, together: bool = False) -> None:
        """Wait for the oldest save; raise or log its failure unless it was taken."""
        handle = self._undelivered[0]
        wait_for([handle.committed])
        self._undelivered.popleft()
        error = handle.error
        if error is None:
            return
        if self.latest is handle:
            self.latest = None  # a later save of the same name is a new attempt
        taken = handle.taken
        if together:  # no rank may go on to what is collective without one that raises
            (lacking,) = self._coordinator.all_reduce_max([int(not taken)], what="delivering a failed save")
            taken = not lacking
        if taken:
            return
        # Training may continue after a failed save, but not when the root belongs to another job.
        if self._options.on_error == "raise" or not isinstance(error, SaveError):
            raise error
        _log_failure(handle)


def _log_failure(handle: SaveHandle) -> None:
    error = handle.error
    if error is not None and not handle.taken:
        _logger.error("training continues without the checkpoint of step %d: %s", handle.step, error)
