"""Checkpoints that stock Lightning wrote, read by its own loaders without running code that they hold."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ckpt_core.dcp import check_stock, load_plain, read_linked, without_pickle
from ckpt_core.errors import UnsafeCheckpointError
from lightning_ckpt._places import LIGHTNINGS_OWN

_LAZY_LOADER = "_lazy_load"
"""What FSDP's strategies read a single file with: a pickle, whatever `weights_only` says."""


def check_stock_checkpoint(path: str) -> None:
    """Check that a directory of Lightning's sharded strategies can be loaded without running code from it.

    Files are read once, by `load_without_pickle`.

    Raises:
        UnsafeCheckpointError: it cannot; `allow_pickle=True` is the way out.
        CorruptCheckpointError: it is not whole.
    """
    own = Path(path) / LIGHTNINGS_OWN
    if own.is_file():
        check_stock(path)
        load_plain(read_linked(own), str(own))


def load_without_pickle(path: str, strategy: type[Any], load: Callable[..., Any]) -> dict[str, Any]:
    """Return `load(weights_only=True)`, a method of the stock `strategy`, for what is at `path`.

    Raises:
        UnsafeCheckpointError: it holds objects that only pickle can rebuild.
    """
    try:
        with ExitStack() as held:
            held.enter_context(without_pickle())
            held.enter_context(_without_lazy_pickle(strategy))
            return dict(load(weights_only=True))
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{path} holds Python objects that only pickle can rebuild. If you trust who wrote it, load it "
            f"with ShardedCheckpoint(..., allow_pickle=True). ({str(error).strip().splitlines()[0]})"
        ) from error


@contextmanager
def _without_lazy_pickle(strategy: type[Any]) -> Generator[None]:
    modules = [sys.modules[cls.__module__] for cls in strategy.__mro__]
    lazy = {module: vars(module)[_LAZY_LOADER] for module in modules if _LAZY_LOADER in vars(module)}
    for module in lazy:
        setattr(module, _LAZY_LOADER, _load_mapped)
    try:
        yield
    finally:
        for module, stock in lazy.items():
            setattr(module, _LAZY_LOADER, stock)


def _load_mapped(path: Any) -> Any:
    """Load a file as lazily as Lightning's own loader: its tensors stay on the disk until they are copied."""
    return torch.load(path, mmap=True, map_location="cpu", weights_only=True)
