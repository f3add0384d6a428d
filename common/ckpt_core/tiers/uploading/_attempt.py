"""One attempt to upload a checkpoint, by all ranks together.

Every rank copies the files that it wrote. Meanwhile the ranks meet from time to time over the job's Store,
each with its progress or its failure, so that a failure of one ends the attempt of all. When all files are
there, the coordinator commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, final

from ckpt_core import messages
from ckpt_core.coordination import CommitChannel
from ckpt_core.errors import CoordinationError
from ckpt_core.options import Upload
from ckpt_core.tiers import CheckpointCopy, files_by_rank
from ckpt_core.tiers.uploading._transfer import RankProgress, Transfer
from ckpt_core.tiers.uploading._upload_context import UploadContext, UploadProgress, described, upload_error
from ckpt_core.types import CheckpointInfo, FileEntry

_SHORTEST: Final = 0.1
_LONGEST: Final = 10.0
_GROWTH: Final = 0.25
"""The ranks meet again after this share of the time that the upload has taken so far."""


class End(Enum):
    """What the ranks agree on when they meet."""

    GO_ON = b"go on"
    LEFT = b"left"
    COMMITTED = b"committed"


@final
class Attempt:
    """One attempt, on one rank.

    Args:
        info: of the checkpoint in the root.
        copy: returns the copy, on the thread that makes it; raises if that cannot be.
        upload: the option.
        context: of the uploads.
        commit: commits the copy; called on the coordinator alone.
    """

    def __init__(
        self,
        info: CheckpointInfo,
        copy: Callable[[], CheckpointCopy],
        upload: Upload,
        context: UploadContext,
        *,
        commit: Callable[[CheckpointCopy], object],
    ) -> None:
        self._info = info
        self._copy = copy
        self._upload = upload
        self._context = context
        self._commit = commit
        self._began = context.clock()
        self.transfer = Transfer(
            copy,
            self._share,
            bytes_per_second=upload.bytes_per_second,
            patience_seconds=context.deadline_seconds,
            process=context.process,
            clock=context.clock,
        )

    def run(self, channel: CommitChannel, topic: str, is_stopped: Callable[[], bool]) -> End:
        """Copy this rank's files, and meet the others until all are there, or one leaves.

        Args:
            channel: to the other ranks.
            topic: of this attempt, equal on all ranks and of no other.
            is_stopped: returns whether this rank leaves.

        Raises:
            UploadError: a rank has failed; the same on every rank.
            CheckpointError: the commit has failed; of the same type on every rank.
            DeadlineError: ranks did not come.
        """
        self.transfer.start()
        end, meetings = End.GO_ON, 0
        while end is End.GO_ON:
            taken = (self._context.clock() - self._began) * _GROWTH
            own = self.transfer.progress(min(max(taken, _SHORTEST), _LONGEST))
            if is_stopped():
                self.transfer.stop()
                own = self.transfer.progress(0)
            end = End(
                channel.commit_barrier(
                    f"{topic}/{meetings}",
                    messages.encode(own),
                    self._combine,
                    deadline_seconds=self._context.deadline_seconds,
                )
            )
            meetings += 1
        return end

    def _combine(self, reports: list[bytes]) -> bytes:
        """Decide, from the reports of all ranks; coordinator only."""
        ranks = list(map(_decoded, reports))
        failures = {rank: each.failure for rank, each in enumerate(ranks) if each.failure}
        if failures:
            named = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
            lasting = any(each.lasting for each in ranks)
            raise upload_error(self._info, self._upload.url, named, failures=failures, lasting=lasting)
        if any(each.left for each in ranks):
            return End.LEFT.value
        self._context.note(
            UploadProgress(
                name=self._info.name,
                done_bytes=sum(each.done_bytes for each in ranks),
                size_bytes=sum(each.size_bytes for each in ranks),
                seconds=self._context.clock() - self._began,
            )
        )
        if not all(each.ended for each in ranks):
            return End.GO_ON.value
        with described(self._info, self._upload.url, self._context.rank):
            self._commit(self._copy())
        return End.COMMITTED.value

    def _share(self, copy: CheckpointCopy) -> Sequence[FileEntry]:
        """Return the files that this rank wrote, and those of ranks that are not there."""
        rank, size = self._context.rank, self._context.world_size
        found = files_by_rank(copy.manifest)
        return [entry for writer, files in found.items() if writer % size == rank for entry in files]


def _decoded(report: bytes) -> RankProgress:
    found = messages.decode(report)
    if not isinstance(found, RankProgress):
        raise CoordinationError("a report of an upload that is none")
    return found


def refuse_hanging(hanging: Transfer | None, copy: Callable[[], CheckpointCopy]) -> CheckpointCopy:
    """Return a copy, unless the thread of an attempt before hangs in storage.

    Raises:
        TimeoutError: it does.
    """
    if hanging is not None and not hanging.end(0):
        raise TimeoutError("storage still hangs in an upload that was given up")
    return copy()
