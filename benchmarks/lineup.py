"""Which contenders there are, which of them can run here, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, final

import psutil
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.contenders import Contender, Entrant, NotRunError
from benchmarks.limits import Memcpy, RawDirect, RawDirectChecksums, RawDirectOneThread, RawDirectProcess
from benchmarks.others import TorchCheckpointing, TorchSnapshot
from benchmarks.ours import (
    OursBlocking,
    OursBlockingReplicas,
    OursBlockingSha256,
    OursOverlapped,
    OursOverlappedAlike,
    OursWaves,
)
from benchmarks.stock import (
    StockAsyncDefault,
    StockAsyncProcess,
    StockAsyncReused,
    StockSaveOneThread,
    StockSaveTwoThreads,
    TorchSave,
)

ContenderType = type[Contender]
_Result = TypeVar("_Result")
_Entrant = TypeVar("_Entrant", bound=Entrant)

SAVE: Sequence[ContenderType] = (
    OursOverlapped, OursBlocking, StockSaveOneThread, StockSaveTwoThreads, StockAsyncDefault,
    StockAsyncReused, StockAsyncProcess, TorchSnapshot, TorchCheckpointing, TorchSave, Memcpy, RawDirect,
)  # fmt: skip
INTERFERENCE: Sequence[ContenderType] = (
    *SAVE, OursOverlappedAlike, RawDirectOneThread, RawDirectChecksums, RawDirectProcess,
)  # fmt: skip
CHECKSUMS: Sequence[ContenderType] = (OursBlocking, OursBlockingSha256, RawDirect)
REPLICAS: Sequence[ContenderType] = (OursBlocking, OursBlockingReplicas, RawDirect)
WAVES: Sequence[ContenderType] = (OursBlocking, OursWaves, RawDirect)
RANKS: Sequence[ContenderType] = (
    OursOverlapped, OursBlocking, StockSaveOneThread, StockAsyncDefault, StockAsyncReused,
)  # fmt: skip
ALL: Mapping[str, ContenderType] = {
    contender.key: contender for contender in (*INTERFERENCE, *CHECKSUMS, *REPLICAS, *WAVES)
}


@final
@dataclass(kw_only=True, slots=True)
class Lineup(Generic[_Entrant]):
    """Those who run; whoever fails is out, with the reason kept."""

    running: list[_Entrant]
    not_run: dict[str, str] = field(default_factory=dict[str, str])

    def attempt(self, contender: _Entrant, work: Callable[[], _Result]) -> _Result | None:
        """Do `work` in the contender's turn; None if it failed, and then it is out."""
        try:
            with contender.turn():
                return work()
        # Whatever it is goes into the table; DCP's errors are no Exceptions.
        except (Exception, CheckpointException) as error:  # noqa: BLE001
            self.not_run[contender.key] = _reason(error)
            self.running.remove(contender)
            return None


def chosen(types: Sequence[ContenderType], only: Sequence[str]) -> list[ContenderType]:
    """Those that were asked for; all if none was."""
    return [ALL[key] for key in only] if only else list(types)


@contextmanager
def opened(
    types: Sequence[type[_Entrant]], task: Any, *, budgeted: bool = True
) -> Generator[Lineup[_Entrant], None, None]:
    """Construct the contenders, and close them in the end.

    Args:
        types: whom.
        task: what all of them are given; it has `size_bytes`.
        budgeted: leave those out for whose copies memory is short. Not among ranks, which might decide
            differently.
    """
    lineup: Lineup[_Entrant] = Lineup(running=[])
    everyone: list[_Entrant] = []
    fitting = affordable(types, psutil.virtual_memory().available // task.size_bytes) if budgeted else types
    try:
        for each in types:
            if each not in fitting:
                lineup.not_run[each.key] = "memory would not do for all contenders: name a few by --only"
                continue
            try:
                contender = each(task)
            except NotRunError as error:
                lineup.not_run[each.key] = str(error)
                continue
            everyone.append(contender)
            lineup.running.append(contender)
        yield lineup
    finally:
        for contender in everyone:
            try:
                contender.close()
            # A contender that failed before may fail again; the report of the others must not be lost.
            except (Exception, CheckpointException) as error:  # noqa: BLE001
                lineup.not_run.setdefault(contender.key, f"while closing: {_reason(error)}")


def affordable(types: Sequence[type[_Entrant]], copies: int) -> list[type[_Entrant]]:
    """Those who can run together when `copies` of the state have room; ours and the floors come first."""
    order = ("ours", "limit", "stock", "other")
    chosen: list[type[_Entrant]] = []
    for each in sorted(types, key=lambda one: order.index(one.kind)):
        candidates = [*chosen, each]
        kept = sum(one.copies for one in candidates)
        if kept + max(one.passing_copies for one in candidates) <= copies:
            chosen = candidates
    return chosen


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}" if text else type(error).__name__
