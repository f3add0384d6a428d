"""Which step each tier of a simulated run holds at any moment."""

from __future__ import annotations

from collections import deque
from typing import final


@final
class TiersOfRun:
    """The newest step in the root and in the upload tier.

    One upload runs at a time; a checkpoint that waits for it is overtaken by a newer one.

    Args:
        upload_seconds: of one upload; None without an upload tier.
        commits: collects (time, step) of every commit, if given.
    """

    def __init__(self, upload_seconds: float | None, commits: list[tuple[float, int]] | None) -> None:
        self.root = self.upload = 0
        self._seconds = upload_seconds
        self._commits = commits
        self._in_flight: deque[tuple[float, int]] = deque()
        self._uploading: tuple[float, int] | None = None
        self._waiting: int | None = None

    def begin(self, durable_at: float, step: int) -> None:
        """Note a save that will be durable in the root."""
        self._in_flight.append((durable_at, step))

    def settle(self, now: float) -> None:
        """Take in all that has happened by now."""
        while self._in_flight and self._in_flight[0][0] <= now:
            durable_at, self.root = self._in_flight.popleft()
            if self._commits is not None:
                self._commits.append((durable_at, self.root))
            if self._seconds is not None:
                self._offer(durable_at, self.root)
        self._finish_uploads(now)

    def fail(self, now: float, *, node_lost: bool) -> int:
        """Return the step that is left, which the root then holds, too."""
        self.settle(now)
        self._in_flight.clear()
        self._uploading = self._waiting = None
        if node_lost:
            self.root = self.upload
        return self.root

    def resume(self, now: float) -> None:
        """Upload what the failure interrupted."""
        if self._seconds is not None and self.root > self.upload:
            self._offer(now, self.root)

    def skip(self, seconds: float, steps: int) -> None:
        """Let equal saves follow one another for so long."""
        self._in_flight = deque((at + seconds, step + steps) for at, step in self._in_flight)
        self.root += steps
        if self._uploading is not None:
            self._uploading = (self._uploading[0] + seconds, self._uploading[1] + steps)
        if self._seconds is not None:
            self.upload += steps

    def _offer(self, now: float, step: int) -> None:
        self._finish_uploads(now)
        if self._uploading is None:
            self._uploading = (now + (self._seconds or 0.0), step)
        else:
            self._waiting = step

    def _finish_uploads(self, now: float) -> None:
        while self._uploading is not None and self._uploading[0] <= now:
            ended, self.upload = self._uploading
            following, self._waiting = self._waiting, None
            self._uploading = None if following is None else (ended + (self._seconds or 0.0), following)
