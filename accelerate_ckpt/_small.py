"""Schedulers, scaler, random states and registered objects: small, read by stock methods, able to refuse.

Their files are read before anything live changes, and compared with the manifest; what was compared is what
the stock `load_state` then reads. What it has changed is taken back if anything refuses, on any rank.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accelerate_ckpt._scratch import private_directory
from accelerate_ckpt._small_files import verified_files
from accelerate_ckpt._stock import StockMethods, small_things_only
from ckpt_core.errors import IncompatibleCheckpointError
from ckpt_core.state import load_rng_state, rng_state
from ckpt_core.storage import Storage
from ckpt_core.types import SavedState

_PATTERNS = ("scheduler*.bin", "scaler.pt", "custom_checkpoint_*.pkl")
_SCHEDULER = re.compile(r"scheduler(_\d+)?\.bin")
_OBJECT = re.compile(r"custom_checkpoint_\d+\.pkl")


def read_small(storage: Storage, saved: SavedState, rank: int) -> dict[str, bytes]:
    """The files that the stock `load_state` reads of a checkpoint, apart from anything large.

    Raises:
        CorruptCheckpointError: one of them is missing, or is not what was committed.
    """
    patterns = (*_PATTERNS, f"random_states_{rank}.pkl")

    def wanted(path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in patterns)

    if saved.world_size is not None:
        return verified_files(storage, saved.name, wanted)
    # Stock wrote it: there is no manifest to go by.
    return {
        entry.name: storage.read_bytes(f"{saved.name}/{entry.name}")
        for entry in storage.list(saved.name)
        if not entry.is_directory and wanted(entry.name)
    }


def check_small(accelerator: Accelerator, files: Mapping[str, bytes], name: str) -> None:
    """Whether there is a file for everything that is to be loaded.

    Raises:
        IncompatibleCheckpointError: there is not, or one belongs to nothing that is registered.
    """
    objects = sum(_OBJECT.fullmatch(path) is not None for path in files)
    if objects != len(accelerator._custom_objects):
        raise IncompatibleCheckpointError(
            f"checkpoint {name} was saved with {objects} registered objects, and "
            f"{len(accelerator._custom_objects)} are registered now: call "
            "accelerator.register_for_checkpointing() for the same objects before load_state()"
        )
    schedulers = sum(_SCHEDULER.fullmatch(path) is not None for path in files)
    if schedulers < len(accelerator._schedulers):  # stock loads the first of them and says nothing, too
        raise IncompatibleCheckpointError(
            f"checkpoint {name} was saved with {schedulers} schedulers, and {len(accelerator._schedulers)} "
            "are prepared now: give accelerator.prepare() those that it was saved with"
        )
    if accelerator.scaler is not None and "scaler.pt" not in files:
        raise IncompatibleCheckpointError(
            f"checkpoint {name} was saved without the gradient scaler of mixed_precision='fp16', which is "
            "on now"
        )


def load_small(
    accelerator: Accelerator, stock: StockMethods, files: Mapping[str, bytes], arguments: Mapping[str, Any]
) -> Callable[[], None]:
    """Let the stock method load `files`; returns what takes it back.

    Raises:
        IncompatibleCheckpointError: something refuses its state; everything is as it was before.
    """
    take_back = _as_it_is(accelerator)
    try:
        with private_directory() as directory, small_things_only(accelerator):
            write_files(files, directory)
            stock.load_state(str(directory), **arguments)
    except Exception as error:  # what users' objects raise is told, as the cause
        take_back()
        raise IncompatibleCheckpointError(
            f"a scheduler, the scaler or a registered object refuses its state: {error!r}"
        ) from error
    return take_back


def write_files(files: Mapping[str, bytes], directory: Path) -> None:
    """Put files into a directory, for stock methods and hooks that read from one."""
    for path, content in files.items():
        target = directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)


def _as_it_is(accelerator: Accelerator) -> Callable[[], None]:
    scaler = [] if accelerator.scaler is None else [accelerator.scaler]
    holders: list[Any] = [*accelerator._schedulers, *scaler, *accelerator._custom_objects]
    before = [(each, copy.deepcopy(each.state_dict())) for each in holders]
    generators, step = rng_state(), accelerator.step

    def take_back() -> None:
        for each, state in before:
            each.load_state_dict(state)
        load_rng_state(generators)
        accelerator.step = step

    return take_back
