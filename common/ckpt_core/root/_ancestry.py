"""The lineage of saves, from the root's checkpoints and the live state's origin."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from ckpt_core.commit import next_lineage, on_present_line
from ckpt_core.disclosure import logger_of
from ckpt_core.types import CheckpointInfo, Lineage, Parent

_logger = logger_of(__name__)


@final
class Ancestry:
    """The lineage of the live state.

    Concurrency: `record_commit` on any thread, but not during another call for the first save after a load;
    the other methods on the main thread.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: dict[str, CheckpointInfo] = {}
        self._further: list[CheckpointInfo] = []
        self._origin: CheckpointInfo | None = None
        self._elsewhere: Parent | None = None
        self._root = Lineage()
        self._own: Lineage | None = None
        self._on_purpose = self._branch = False

    def survey(
        self, infos: Sequence[CheckpointInfo], present: Lineage, further: Sequence[CheckpointInfo] = ()
    ) -> None:
        """Record the content of the root, which this job has taken, and of further tiers.

        Args:
            infos: its committed checkpoints, of any lineage.
            present: the present lineage of all tiers.
            further: checkpoints of which only further tiers have copies.
        """
        self._known, self._root = {info.name: info for info in infos}, present
        self._further = list(further)

    def continue_from(self, info: CheckpointInfo, *, branch: bool = False) -> None:
        """Note that the live state is that of this checkpoint: it was loaded as a whole.

        Args:
            info: the checkpoint.
            branch: whether the training differs from now on, so that its saves begin a lineage of their own.
        """
        self._origin, self._elsewhere = info, None
        self._own = None
        self._on_purpose, self._branch = False, branch

    def start_afresh(self) -> None:
        """Note that the live state continues no checkpoint, as the user intends."""
        self._origin = self._own = None
        self._on_purpose = True

    def begin_from(self, parent: Parent | None) -> None:
        """Note that the live state was loaded from another root, if it was.

        That is the parent of the next commit, and changes nothing in the lineages of this root.
        """
        if parent is not None:
            self._elsewhere = replace(parent, elsewhere=True)

    @property
    def parent(self) -> Parent | None:
        """The checkpoint that a commit made now continues; None if training began here."""
        own = None if self._origin is None else Parent.of(self._origin)
        return self._elsewhere or own

    def lineage_of(self, step: int) -> Lineage:
        """Return the lineage of a save made now; a new one unless it continues the newest."""
        if self._own is None:
            known = [*self._known.values(), *self._further]
            self._own, begun = next_lineage(known, self._root, self._origin, step, branch=self._branch)
            if begun and known:
                self._log(step, self._own, known)
        return self._own

    def record_commit(self, info: CheckpointInfo) -> None:
        """Record a committed save of this job, which the live state continues."""
        self._known[info.name] = info
        self._origin, self._root, self._elsewhere = info, info.lineage, None

    def is_committed(self, info: CheckpointInfo, step: int) -> bool:
        """Return whether the checkpoint `info` is already this lineage's save of `step`."""
        return info.usable and self.lineage_of(step).includes(info.lineage, info.step)

    def _log(self, step: int, lineage: Lineage, known: Sequence[CheckpointInfo]) -> None:
        abandoned = [info for info in on_present_line(known, lineage) if info.abandoned]
        if self._origin is None:
            _logger.log(
                logging.INFO if self._on_purpose else logging.WARNING,
                "starting afresh in %s, which holds %d checkpoint(s) of an earlier run, up to step %d: they "
                "are abandoned from the commit of step %d on, and stay, or are removed one by one with "
                'abandoned="prune". To continue from them instead, stop, and resume the newest before the '
                "first save",
                self._url,
                len(known),
                max(info.step for info in known),
                step,
            )
        elif abandoned:
            _logger.warning(
                "going back to step %d of %s: %d checkpoint(s) that are not before it (%s) are abandoned "
                "from the commit of step %d on",
                self._origin.step,
                self._url,
                len(abandoned),
                ", ".join(info.name for info in abandoned[-5:]),
                step,
            )
