"""What all saves of a run have cost together, and what one of them usually costs."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Generator, Iterable
from typing import Final, final

from ckpt_core.cadence import SaveCosts
from ckpt_core.measuring._measured_save import MeasuredSave

_LAST_SAVES: Final = 16
_MOST_LATE: Final = 8


@final
class CostLedger:
    """The costs of the saves of a run. Main thread only.

    Attributes:
        lost: seconds of training time that all saves have cost, as far as known.
    """

    def __init__(self) -> None:
        self.lost = 0.0
        self._saves = 0
        self._open: list[MeasuredSave] = []
        self._unreported: deque[MeasuredSave] = deque()
        self._last: deque[MeasuredSave] = deque(maxlen=_LAST_SAVES)
        self._shares: deque[float] = deque(maxlen=_LAST_SAVES)

    def add(self, save: MeasuredSave) -> None:
        """Add a save, whose call has returned."""
        self._unreported.append(save)
        if save.handle is None:
            save.slowdown = 0.0
        else:
            self._open.append(save)

    def conclude(self, save: MeasuredSave) -> None:
        """Fix the slowdown of a save."""
        share = save.conclude(statistics.median(self._shares) if self._shares else 0.0)
        if share is not None:
            self._shares.append(share)
        self.lost += save.slowdown or 0.0

    @property
    def unsettled(self) -> bool:
        """Whether something of a save is still to become known."""
        return bool(self._unreported)

    def reportable(self, *, closing: bool = False) -> Generator[MeasuredSave]:
        """Yield each save once, in order, when everything about it is known.

        An upload that takes longer than eight more saves is not waited for.
        """
        while self._unreported:
            first = self._unreported[0]
            late = closing or len(self._unreported) > _MOST_LATE
            if not (first.ended and (late or first.done)):
                return
            yield self._unreported.popleft()

    def summary(self, *, expected: bool, step: float) -> SaveCosts | None:
        """Return the costs; None until one save is committed and its slowdown known.

        Args:
            expected: whether to add the usual slowdown to `lost`, for a save in flight.
            step: seconds of a step without a save in flight.
        """
        for save in [each for each in self._open if each.ended]:
            self._open.remove(save)
            if save.durable is not None:
                self._last.append(save)
                self._saves += 1
        if not self._last:
            return None
        slowdown = max(0.0, _median(save.slowdown for save in self._last) or 0.0)
        return SaveCosts(
            stall=_median(save.stall for save in self._last) or 0.0,
            slowdown=slowdown,
            durable=_median(save.durable for save in self._last) or 0.0,
            uploaded=_median(save.uploaded for save in self._last),
            saves=self._saves,
            lost=max(0.0, self.lost + (slowdown if expected else 0.0)),
            step=step,
        )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
