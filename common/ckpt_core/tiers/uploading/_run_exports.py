"""The exports of a manager: what is due for which place, and the end.

A thread for each follows the root on the coordinator, and has a process of its own write what is due. The
training takes no part and waits for none; a failure is logged, and fails nothing else.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Final, final

from ckpt_core.commit import Catalog
from ckpt_core.crew import give_way
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, CoordinationError, failure_text
from ckpt_core.options import CheckpointOptions, Export
from ckpt_core.retention import best_by
from ckpt_core.root import Job
from ckpt_core.storage import LocalStorage, ObjectStorage, open_storage
from ckpt_core.tiers import ExportTerms, WorkProcess
from ckpt_core.tiers.uploading._due import DueCheckpoint, DueRule, SaveNumber, UploadLine
from ckpt_core.types import CheckpointInfo
from ckpt_core.validation import require

_logger = logger_of(__name__)
_SAID_EVERY: Final = 5.0


@final
class ExportThread:
    """Has what is due written to one place, the newest first."""

    def __init__(self, export: Export, terms: ExportTerms, job: Job) -> None:
        self.export, self.line = export, UploadLine("overtake")
        self._job, self._last = job, ""
        self._process = WorkProcess("ckpt_core.tiers._export_service:exporting", terms, nice=19)
        self._left = threading.Event()
        # A daemon: the process must be able to end while storage hangs.
        self.thread = threading.Thread(target=self._run, name="ckpt-export", daemon=True)

    def add(self, info: CheckpointInfo | None) -> None:
        """Let a checkpoint be exported, unless it was the last one."""
        if info is not None and info.save_id != self._last:
            self.line.add(DueCheckpoint(info))

    def finish(self, until: float) -> None:
        """Wait until nothing is due; leave the rest at `until`, monotonic seconds."""
        self.line.close()
        while self.thread.is_alive() and (rest := until - time.monotonic()) > 0:
            self.thread.join(min(_SAID_EVERY, rest))
            if steps := ", ".join(str(info.step) for info in self.line.unfinished):
                _logger.info("waiting for the export of step %s to %s", steps, self.export.url)
        left = self.line.unfinished
        self._left.set()
        self._process.close()
        if left:
            _logger.warning(
                "step %d is not exported to %s: `ckpt export` does it; a next run exports what is due then",
                left[-1].step,
                self.export.url,
            )

    def _run(self) -> None:
        give_way()
        while (due := self.line.next()) is not None:
            if not self.line.is_waited_for and not self._left.is_set():
                self._write(due.info)
            self.line.done(due)
        self._process.close()

    def _write(self, info: CheckpointInfo) -> None:
        url = self.export.url
        try:
            with self._job.telemetry.span("export", step=info.step, name=info.name, to=url):
                self._process.do(info, self._raise_if_left)
        except (CheckpointError, OSError) as error:
            if not self._left.is_set():
                what = failure_text(error)
                _logger.error("step %d was not exported to %s: %s", info.step, url, what)  # noqa: TRY400
        else:
            self._last = info.save_id
            _logger.info("step %d is exported to %s", info.step, url)

    def _raise_if_left(self) -> None:
        if self._left.is_set():
            raise CheckpointError("the export was left")


@final
class RunExports:
    """The exports of one manager; without an `Export` every method returns at once.

    Concurrency: the main thread of every rank, where only the coordinator exports; `finish` is collective.
    `held` on any thread. `writer` is "package.module:function" that writes an export.

    Raises:
        ConfigError: another process cannot reach the root or a place, or what is the best is not said.
    """

    def __init__(self, job: Job, options: CheckpointOptions, writer: str) -> None:
        self._job, self._rule, self._deadline = job, DueRule.of(options.save), options.deadline_seconds
        self._best, self._session = best_by(options.keep), ""
        places = [each.url for each in options.exports]
        twice = sorted({url for url in places if places.count(url) > 1})
        require("export", *(f"two have the place {url}; give each its own" for url in twice))
        self._threads = [
            ExportThread(each, self._terms(each, options, writer), job) for each in options.exports
        ]

    def begin(self) -> None:
        """Begin to export, also what an earlier run has left. Collective.

        Raises:
            ConfigError: the nodes have disks of their own.
        """
        if not self._threads or self._session:
            return
        if self._job.storage.num_disks > 1:
            raise ConfigError(
                f"export= needs a root that all nodes share; {self._job.storage.url} is on a disk of each: "
                "give upload= a place that they share, and export from there, by `ckpt export`"
            )
        self._session = self._job.coordinator.broadcast(secrets.token_hex(4), what="beginning to export")
        if self._job.coordinator.is_coordinator:
            for each in self._threads:
                each.add(None if each.export.when == "final" else self._due(each.export))
                each.thread.start()

    def follow(self, committed: Future[CheckpointInfo], number: SaveNumber) -> None:
        """Export a save once it is committed, where it is due."""
        if self._threads and self._job.coordinator.is_coordinator:
            committed.add_done_callback(partial(self._committed, number))

    @property
    def held(self) -> Collection[str]:
        """The names of checkpoints that must not be removed for now."""
        return set[str]().union(*(each.line.held for each in self._threads))

    def finish(self, *, leave: bool) -> None:
        """Export the last one if due, and wait for exports; on every rank.

        Other ranks wait for the coordinator, which may be at it for longer than a collective may last. With
        `leave`, nobody waits.
        """
        if not self._session:
            return
        if leave:
            for each in self._threads:
                each.finish(0)
            return
        longest = max(each.export.deadline_seconds for each in self._threads) + self._deadline
        # Not a collective: a rank that has died holds nothing up.
        channel = self._job.coordinator.background_channel(f"export/{self._session}")
        try:
            channel.broadcast("end", self._last, longest)
        except CoordinationError as error:
            _logger.warning("how the exports have ended is not known here: %s", error)
        finally:
            channel.close()

    def _last(self) -> None:
        """Export what is due at the end, and wait; on the coordinator."""
        began = time.monotonic()
        for each in self._threads:
            each.add(None if each.export.every else self._due(each.export))
        for each in self._threads:
            each.finish(began + each.export.deadline_seconds)

    def _committed(self, number: SaveNumber, done: Future[CheckpointInfo]) -> None:
        """Put a committed save in the lines that it is due for. On the save thread."""
        if Future.exception(done) is not None:  # looked at without taking it from the user
            return
        info = done.result()
        for each in self._threads:
            every = each.export.every
            if every is not None and self._rule.is_due(info.step, number, every):
                each.add(info)
            elif each.export.when == "best":
                each.add(self._due(each.export))

    def _due(self, export: Export) -> CheckpointInfo | None:
        """Return the newest checkpoint that is due, exported or not."""
        catalog = Catalog(self._job.storage)
        try:
            history = [info for info in catalog.committed() if info.usable]
            if export.when == "best" and self._best is not None:
                best = self._best.keep(history, 0)
                history = [info for info in history if info.step in best]
            for info in reversed(history):
                if export.every is None:
                    return info
                number = SaveNumber.read(catalog.manifest(info.name).annotations)
                if self._rule.is_due(info.step, number, export.every):
                    return info
        except (CheckpointError, OSError) as error:
            _logger.warning("what is to be exported to %s is not known: %s", export.url, failure_text(error))
        return None

    def _terms(self, export: Export, options: CheckpointOptions, writer: str) -> ExportTerms:
        """Return the terms of its process; refuse what cannot work."""
        root, url = self._job.storage.own, os.fspath(export.place)
        like = None if export.like is None else os.fspath(export.like)
        local = isinstance(root, LocalStorage)
        terms = ExportTerms(
            source=root.url,
            source_options={} if local else dict(options.storage_options),
            place=url if "://" in url else export.url,
            place_options=dict(export.storage_options),
            keep=export.keep,
            writer=writer,
            words={
                "to": export.to,
                "dtype": export.dtype,
                "like": like if like is None or "://" in like else str(Path(like).absolute()),
                "adapters": export.adapters,
            },
        )
        place = open_storage(terms.place, terms.place_options)
        reached = (local or isinstance(root, ObjectStorage)) and WorkProcess.can_do(terms)
        require(
            "export",
            None if reached else f"a process of its own cannot read {root.url}: give the root by path or URL",
            "memory:// is in this process alone" if place.url.startswith("memory:") else None,
            f"{export.url} is the root" if place.url == root.url else None,
            'when="best" needs keep=KeepBest(…), by whose metric it is the best'
            if export.when == "best" and self._best is None
            else None,
        )
        return terms
