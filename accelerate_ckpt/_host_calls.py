"""Calls of Accelerate's own methods and of users' hooks, each for one part only.

The user's pre-hooks (`register_save_state_pre_hook`) see the models that stock would give them. Those of
diffusers write a model themselves and take its weights out of the list, on the main process only; whether a
model was taken over is therefore the coordinator's word.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator
from accelerate.utils import DistributedType

from ckpt_core.coordination import Coordinator

UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
"""Engines that keep their shards to themselves; their checkpoints stay what they are."""


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def run_save_hooks(
    accelerator: Accelerator, weights: list[Mapping[str, Any]], directory: Path, coordinator: Coordinator
) -> list[int]:
    """Call the save hooks; return the indices of the models left to us.

    Collective if there are hooks, which write to the directory. `weights` are state dicts of the models, as
    stock passes them, none under FSDP; hooks take theirs out.
    """
    every = list(range(len(accelerator._models)))
    hooks = accelerator._save_model_state_pre_hook
    if not hooks:
        return every
    offered = list(weights)
    error: BaseException | None = None
    try:
        for hook in hooks.values():
            hook(accelerator._models, weights, str(directory))
    except Exception as failure:  # noqa: BLE001 - the exchange carries it to every rank
        error = failure
    left = [index for index, state in enumerate(offered) if any(state is each for each in weights)]
    own = left if offered else every
    return coordinator.gather_scatter(
        own if error is None else cast("list[int]", error), lambda of: [of[0]] * len(of)
    )


def run_load_hooks(accelerator: Accelerator, models: Sequence[Any], directory: Path) -> list[int]:
    """Call the load hooks; return the indices of the models left to us."""
    remaining = list(models)
    for hook in accelerator._load_model_state_pre_hook.values():
        hook(remaining, str(directory))
    if not models:
        return list(range(len(accelerator._models)))
    return [
        index for index, model in enumerate(accelerator._models) if any(model is each for each in remaining)
    ]


_PREFIX = "accelerate-ckpt-"
_NEW_SECONDS = 60.0


@contextmanager
def private_directory() -> Generator[Path]:
    """Make a directory of this rank alone.

    Stock Accelerate lets ranks write to the same file. It is locked while in use. One without a lock was left
    by a killed process, or is just being made: if it is not new, the next process with the same temporary
    directory removes it.
    """
    _remove_abandoned(os.getpid())
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as path:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # a filesystem without locks: no other process can lock it either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(path)
        finally:
            os.close(descriptor)


@functools.cache
def _remove_abandoned(_process: int) -> None:
    """Remove what killed processes left, once per process: there may be many entries."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, in use, or gone by now
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(descriptor).st_mtime > _NEW_SECONDS:
                    shutil.rmtree(path)
            finally:
                os.close(descriptor)
