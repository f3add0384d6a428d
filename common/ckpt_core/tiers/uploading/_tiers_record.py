"""The progress of uploads: in `tiers.json`, and in the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, final

from ckpt_core.disclosure import logger_of
from ckpt_core.options import Upload
from ckpt_core.storage import Storage
from ckpt_core.tiers import TierRecord, Uploading, write_tiers
from ckpt_core.tiers.uploading._upload_context import UploadProgress
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)

SAID_EVERY: Final = 5.0
"""Seconds between two lines of progress, and between two records of it in the root."""


@final
class TiersRecord:
    """The progress of uploads, in `tiers.json` and in the log. Coordinator only."""

    def __init__(
        self, storage: Storage, uploads: Sequence[Upload], due: Callable[[int], Sequence[str]]
    ) -> None:
        self._storage = storage
        self._uploads = uploads
        self._due = due
        self._guard = threading.Lock()
        self._running: dict[int, UploadProgress] = {}
        self._written_at = 0.0
        self._told = False

    def note(self, index: int, progress: UploadProgress | None) -> None:
        """Note the progress of one upload, or its end."""
        with self._guard:
            begins = progress is not None and index not in self._running
            if progress is None:
                self._running.pop(index, None)
            else:
                self._running[index] = progress
        if begins or progress is None or time.monotonic() - self._written_at > SAID_EVERY:
            self.write()

    def say(self, upload: Upload, unfinished: Sequence[CheckpointInfo]) -> None:
        """Log how far the upload to a tier is, and what waits for it."""
        with self._guard:
            running = self._running.get(self._uploads.index(upload))
        _logger.info(
            "waiting for step(s) %s to be in %s: %s",
            ", ".join(str(info.step) for info in unfinished),
            upload.url,
            "not begun, or to be tried again" if running is None else f"{running.name}, {running.text}",
        )

    def write(self) -> None:
        """Write the record; a failure is a warning, once."""
        with self._guard:
            self._written_at = time.monotonic()
            records = [
                TierRecord(
                    url=upload.url,
                    every=upload.every,
                    due=self._due(index),
                    uploading=_uploading(self._running.get(index)),
                )
                for index, upload in enumerate(self._uploads)
            ]
            try:
                write_tiers(self._storage, records)
            except OSError as error:
                if not self._told:
                    _logger.warning("the progress of uploads is not recorded: %s", error)
                self._told = True


def _uploading(progress: UploadProgress | None) -> Uploading | None:
    if progress is None:
        return None
    return Uploading(name=progress.name, done_bytes=progress.done_bytes, size_bytes=progress.size_bytes)
