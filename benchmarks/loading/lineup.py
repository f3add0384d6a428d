"""Which loaders there are, and which take part in what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.loading.limits import (
    ChecksumOneThread,
    ChecksumTwoThreads,
    MemcpyChecksumOneThread,
    MemcpyChecksumTwoThreads,
    MemcpyOneThread,
    MemcpyTwoThreads,
    RawBuffered,
    RawDirect,
)
from benchmarks.loading.loader import LoaderType
from benchmarks.loading.others import SafetensorsFile, SafetensorsOpen, TorchCheckpointing
from benchmarks.loading.ours import (
    OursFull,
    OursOff,
    OursOnStock,
    OursRead,
    OursReadOnce,
    OursReadOnceUnverified,
)
from benchmarks.loading.stock import StockLoad, TorchLoad

LIMITS: Sequence[LoaderType] = (
    RawBuffered, RawDirect, MemcpyOneThread, MemcpyTwoThreads, ChecksumOneThread, ChecksumTwoThreads,
    MemcpyChecksumOneThread, MemcpyChecksumTwoThreads,
)  # fmt: skip
LOAD: Sequence[LoaderType] = (
    OursFull, OursRead, OursOff, OursOnStock, StockLoad, TorchLoad, TorchCheckpointing, SafetensorsFile,
    SafetensorsOpen, *LIMITS,
)  # fmt: skip
PEAK: Sequence[LoaderType] = tuple(each for each in LOAD if each not in LIMITS)
RANKS: Sequence[LoaderType] = (OursReadOnce, OursReadOnceUnverified, StockLoad)
ALL: Mapping[str, LoaderType] = {each.key: each for each in (*LOAD, *RANKS)}


def chosen(types: Sequence[LoaderType], only: Sequence[str]) -> list[LoaderType]:
    """Those that were asked for; all if none was."""
    return [ALL[key] for key in only] if only else list(types)
