"""Which lineage a save belongs to: what the coordinator knows of the root, and where the state comes from."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import final

from ckpt_core.commit import next_lineage, on_present_line
from ckpt_core.disclosure import logger_of
from ckpt_core.types import CheckpointInfo, Lineage

_logger = logger_of(__name__)


@final
class Ancestry:
    """The line of saves that the live state is on.

    Concurrency: `committed` on any thread, while no other call is under way for the first save after a load;
    all else on the main thread.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._known: list[CheckpointInfo] = []
        self._origin: CheckpointInfo | None = None
        self._root = Lineage()
        self._own: Lineage | None = None
        self._on_purpose = False

    def surveyed(self, infos: Sequence[CheckpointInfo], present: Lineage) -> None:
        """The root is this job's, and holds these committed checkpoints, of whatever lineage.

        Args:
            infos: all of them.
            present: the root's present lineage.
        """
        self._known, self._root = list(infos), present

    def goes_on_from(self, info: CheckpointInfo) -> None:
        """The live state is that of this checkpoint: it was loaded as a whole."""
        self._origin = info
        self._own = None
        self._on_purpose = False

    def starts_afresh(self) -> None:
        """The live state goes on from no checkpoint of the root, which whoever trains knows."""
        self._origin = self._own = None
        self._on_purpose = True

    def lineage_of(self, step: int) -> Lineage:
        """The lineage of a save of that step, made now; a new one where the state is not the newest's."""
        if self._own is None:
            self._own, begun = next_lineage(self._known, self._root, self._origin, step)
            if begun and self._known:
                self._tell(step, self._own)
        return self._own

    def committed(self, info: CheckpointInfo) -> None:
        """A save of this job is committed, and the live state goes on from it."""
        self._known = [known for known in self._known if known.name != info.name]
        self._known.append(info)
        self._origin, self._root = info, info.lineage

    def is_committed(self, info: CheckpointInfo, step: int) -> bool:
        """Whether a save of `step` would be made twice, `info` being the one there is."""
        return info.usable and self.lineage_of(step).includes(info.lineage, info.step)

    def _tell(self, step: int, lineage: Lineage) -> None:
        left = [info for info in on_present_line(self._known, lineage) if info.abandoned]
        if self._origin is None:
            _logger.log(
                logging.INFO if self._on_purpose else logging.WARNING,
                "starting afresh in %s, which holds %d checkpoint(s) of an earlier run, up to step %d: they "
                'are abandoned from the commit of step %d on, and stay, or with abandoned="prune" go one by '
                "one. To go on from them instead, stop, and resume the newest before anything is saved",
                self._url,
                len(self._known),
                max(info.step for info in self._known),
                step,
            )
        elif left:
            _logger.warning(
                "going back to step %d of %s: %d checkpoint(s) that do not lie before it (%s) are abandoned "
                "from the commit of step %d on",
                self._origin.step,
                self._url,
                len(left),
                ", ".join(info.name for info in left[-5:]),
                step,
            )
