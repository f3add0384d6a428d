"""The claims of further tiers, made in the background: no tier may hold up a save.

The coordinator claims and lists every tier on a thread of its own when it takes the root. The first save
waits a moment for the answers, because what cannot be right is refused before it. A resume waits longer,
because a tier may hold the newest checkpoint. What answers later is heard at a later save.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import Final, final

from ckpt_core.commit import Survey, working_name
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, UploadError, failure_text
from ckpt_core.options import CheckpointOptions
from ckpt_core.root import Job
from ckpt_core.tiers import Asked, FurtherTier, unite
from ckpt_core.tiers.uploading._backlog import Backlog
from ckpt_core.tiers.uploading._due import DueRule
from ckpt_core.tiers.uploading._durable import DurableRoot
from ckpt_core.types import CheckpointInfo, Lineage

_logger = logger_of(__name__)

_MOMENT_SECONDS: Final = 2.0
"""The longest wait of a first save for all tiers together."""


@final
class TierClaims:
    """The claims of the further tiers of a manager.

    Coordinator only, on its main thread.

    Attributes:
        durable: the claimed tiers, in the order of the option; empty before the root is taken.
        patient: whether the next claims are waited for as a resume must.

    Args:
        job: storage, ranks and telemetry.
        options: of the manager.
        tiers: the further ones.
        until_idle: stops the uploads, for a later manager of this process that takes a tier over.
    """

    def __init__(
        self,
        job: Job,
        options: CheckpointOptions,
        tiers: Sequence[FurtherTier],
        until_idle: Callable[[], None],
    ) -> None:
        self.durable: list[DurableRoot] = []
        self.patient = False
        self._job = job
        self._options = options
        self._tiers = tiers
        self._until_idle = until_idle
        self._asked: list[Asked[Survey]] = []

    def make(self, nearest: Survey) -> tuple[Sequence[CheckpointInfo], Lineage]:
        """Claim the tiers, and list them.

        Args:
            nearest: what the root holds, which this job has taken.

        Returns:
            The checkpoints that only further tiers hold, and the present lineage of all tiers, as far as they
            have answered.

        Raises:
            ConfigError: a tier cannot be written.
            RootBusyError: another job uploads to one.
        """
        if not self._tiers:
            return (), nearest.lineage
        self.release()
        for upload, tier in zip(self._options.uploads, self._tiers, strict=True):
            durable = DurableRoot(
                upload,
                tier.storage,
                self._options,
                telemetry=self._job.telemetry,
                until_idle=self._until_idle,
                spared={working_name(tier.storage, info.name, info.save_id) for info in nearest.everything},
            )
            self.durable.append(durable)
            self._asked.append(durable.ask())
            tier.note(self._asked[-1])
        self._wait()
        try:
            surveys = [nearest, *filter(None, map(self._heard, range(len(self._tiers))))]
        except CheckpointError:
            self.release()
            raise
        union = unite(surveys)
        further = [held.info for held in union.everything if held.copies[0].tier or held.copies[0].part]
        return further, union.lineage

    def opened(self, rule: DueRule) -> tuple[str, list[list[CheckpointInfo]], bool]:
        """Return an id, what was left due for each, and whether all are claimed."""
        backlog = Backlog(self._job.storage, rule, self._options.uploads)
        surveys = [_survey(asked) for asked in self._asked]
        there = [() if survey is None else survey.everything for survey in surveys]
        due = list(map(backlog.due, self._options.uploads, there))
        for durable, found, whole in zip(self.durable, due, there, strict=True):
            durable.continues(found, whole)
        return secrets.token_hex(4), due, self._all_taken

    def settled(self) -> bool:
        """Return whether every tier has been claimed; never waits.

        Raises:
            UploadError: one was refused since; once for each time.
        """
        for durable in self.durable:
            if (refusal := durable.take_refusal()) is not None:
                raise UploadError(
                    f"nothing can be uploaded to {durable.url}: {refusal}. It had not answered before the "
                    f"first save; the saves to {self._job.storage.url} so far are whole",
                    lasting=True,
                ) from refusal
        return self._all_taken

    @property
    def _all_taken(self) -> bool:
        return all(durable.taken for durable in self.durable)

    def release(self) -> None:
        """Give every tier back, in the background."""
        for durable in self.durable:
            durable.release_soon()
        for tier in self._tiers:
            tier.note(None)
        self.durable, self._asked = [], []

    def _wait(self) -> None:
        if not self.patient:
            wait([asked.answer for asked in self._asked], _MOMENT_SECONDS)
            return
        self.patient = False
        for tier, asked in zip(self._tiers, self._asked, strict=True):
            with suppress(OSError, CheckpointError):
                asked.result(tier.label, tier.patience_seconds)

    def _heard(self, index: int) -> Survey | None:
        """Return what a tier holds; None, with a warning, if that is not known yet.

        Raises:
            CheckpointError: it is refused.
        """
        answer, label = self._asked[index].answer, self._tiers[index].label
        if not answer.done():
            why = "has not answered yet"
        else:
            try:
                return answer.result()
            except OSError as error:
                if isinstance(error, CheckpointError):
                    raise
                why = f"cannot be reached ({failure_text(error)})"
        _logger.warning(
            "%s %s: saves go on, uploads are tried later; checkpoints and lineages that only it has are not "
            "known to the first save",
            label,
            why,
        )
        return None


def _survey(asked: Asked[Survey]) -> Survey | None:
    answer = asked.answer
    return answer.result() if answer.done() and answer.exception() is None else None
