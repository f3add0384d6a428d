"""Lightning's own checkpoints: recognised at a path, and read without pickle."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckpt_core.commit import Catalog
from ckpt_core.dcp import check_stock, load_plain, read_linked, without_pickle
from ckpt_core.errors import (
    ALLOW_PICKLE,
    CheckpointNotFoundError,
    ConfigError,
    UnsafeCheckpointError,
    UntrustedCheckpointError,
)
from ckpt_core.hosting import CheckpointPath, Kind, replaced, root_of
from ckpt_core.names import MARKER, METADATA
from ckpt_core.options import CheckpointOptions
from ckpt_core.storage import Storage

LIGHTNINGS_OWN = "meta.pt"
"""The file that marks a directory of Lightning's sharded strategies."""

_LAZY_LOADER = "_lazy_load"
"""How FSDP's strategies read a single file: by pickle, even with `weights_only=True`."""


def path_of(path: str | os.PathLike[str], kind: Kind | None = None) -> CheckpointPath:
    """Return the checkpoint that a path names, or the root if it is of that kind.

    Dots before the name, as a Tuner sets them, are left out: such names are those of saves in flight.

    Raises:
        ConfigError: it has no name.
    """
    if kind is Kind.ROOT:
        return CheckpointPath(root_of(path))
    found = CheckpointPath.of(path)
    return replace(found, name=found.name.lstrip(".") or found.name)


def kind_at(path: str, storage_at: Callable[[str], Storage]) -> Kind:
    """Return whether a path is a checkpoint, a root, or stock Lightning's.

    Raises:
        CheckpointNotFoundError: it is none of these.
    """
    try:
        place = CheckpointPath.of(path)
    except ConfigError:  # a bucket
        kind = None
    else:
        kind = _kind_below(storage_at(place.root), place.name)
    if kind is None and Catalog(storage_at(root_of(path))).committed():
        return Kind.ROOT
    if kind is None:
        raise CheckpointNotFoundError(
            f"Checkpoint file not found: {path} is neither a committed checkpoint ({MARKER} is missing), "
            "nor a directory that holds some, nor a file or directory that Lightning wrote; check ckpt_path"
        )
    return kind


def _kind_below(root: Storage, written: str) -> Kind | None:
    """Return the kind of a checkpoint in a root, by its name as written."""
    name = written.lstrip(".") or written
    if root.exists(f"{name}/{MARKER}"):
        return Kind.COMMITTED
    if root.exists(written) or root.exists(f"{written}/{LIGHTNINGS_OWN}"):
        return Kind.STOCK
    return Kind.COMMITTED if root.exists(f"{name}/{METADATA}") else None


def refuse_unjudged(path: str, options: CheckpointOptions, *, host: str) -> None:
    """Refuse what a host wrote if `verify_manifest` is given: it has no manifest."""
    if options.verify_manifest is not None:
        why = f"{host} wrote it, so that it has no manifest for verify_manifest to judge"
        raise UntrustedCheckpointError(f"{path} is not trusted: {why}. Nothing was loaded", why=why)


def load_stock(
    path: str,
    load: Callable[..., Any],
    strategy: type[Any],
    *,
    trusted: bool,
    once: Callable[[Callable[[], None]], None],
) -> dict[str, Any]:
    """Return what `load(weights_only=…)` does: without pickle, unless it is trusted.

    Files are read once; a directory of Lightning's sharded strategies is checked before, by one rank.

    Raises:
        UnsafeCheckpointError: it holds objects that only pickle can rebuild; `allow_pickle=True` is the way
            out.
        CorruptCheckpointError: it is not whole.
    """
    if trusted:
        return dict(load(weights_only=False))
    once(lambda: _check(Path(path)))
    try:
        with ExitStack() as held:
            held.enter_context(without_pickle())
            for module in {sys.modules[cls.__module__] for cls in strategy.__mro__}:
                if _LAZY_LOADER in vars(module):
                    held.enter_context(replaced(module, **{_LAZY_LOADER: _load_mapped}))
            return dict(load(weights_only=True))
    except pickle.UnpicklingError as error:
        raise UnsafeCheckpointError(
            f"{path} holds Python objects that only pickle can rebuild. If you trust who wrote it, give "
            f"{ALLOW_PICKLE}. ({str(error).strip().splitlines()[0]})"
        ) from error


def _check(path: Path) -> None:
    own = path / LIGHTNINGS_OWN
    if own.is_file():
        check_stock(path)
        load_plain(read_linked(own), str(own))


def _load_mapped(path: Any) -> Any:
    """Load a file lazily, as Lightning does: tensors stay on disk until copied."""
    return torch.load(path, mmap=True, map_location="cpu", weights_only=True)
