"""Calls of Accelerate's own methods and of users' hooks, each for one part only.

Under `large_things_only` an accelerator has neither schedulers nor scaler nor registered objects, so that the
stock method loads none of them.

The user's pre-hooks (`register_save_state_pre_hook`) see the models that stock would give them. Those of
diffusers write a model themselves and take its weights out of the list, on the main process only; whether a
model was taken over is therefore the coordinator's word.
"""

from __future__ import annotations

import fcntl
import functools
import io
import os
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.other import clean_state_dict_for_safetensors
from safetensors.torch import save as safetensors_bytes

from ckpt_core import hosting
from ckpt_core.coordination import Coordinator

UNSUPPORTED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)
"""Engines that keep their shards to themselves; their checkpoints stay what they are."""


def large_things_only(accelerator: Accelerator) -> AbstractContextManager[None]:
    return hosting.replaced(accelerator, _schedulers=[], _custom_objects=[], scaler=None)


def files_in(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def weight_files(weights: Sequence[Mapping[str, Any]], *, safe: bool) -> dict[str, bytes]:
    """Return files such as `model.safetensors`, as stock `load_state` expects them."""
    name, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")
    return {
        f"{name}_{index}.{suffix}" if index else f"{name}.{suffix}": torch_bytes(dict(state))
        if not safe
        else safetensors_bytes(clean_state_dict_for_safetensors(dict(state)), metadata={"format": "pt"})
        for index, state in enumerate(weights)
    }


def optimizer_files(optimizers: Sequence[Any]) -> dict[str, bytes]:
    return {
        f"optimizer_{index}.bin" if index else "optimizer.bin": torch_bytes(optimizer.state_dict())
        for index, optimizer in enumerate(optimizers)
    }


def torch_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def run_save_hooks(
    accelerator: Accelerator, weights: list[Mapping[str, Any]], directory: Path, coordinator: Coordinator
) -> list[int]:
    """Call the save hooks; return the indices of the models left to us.

    Collective if there are hooks.

    Args:
        accelerator: whose hooks and models.
        weights: state dicts of the models, as stock passes them; none under FSDP. Hooks take theirs out.
        directory: where hooks may write.
        coordinator: the ranks of the job.
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


@contextmanager
def private_directory() -> Generator[Path]:
    """Make a directory of this rank alone.

    Stock Accelerate lets ranks write to the same file.

    It is locked while in use. One without a lock was left by a killed process; the next process with the same
    temporary directory removes it.
    """
    _remove_abandoned(os.getpid())
    path, descriptor = _locked_directory()
    try:
        yield path
    finally:
        shutil.rmtree(path)
        os.close(descriptor)


def _locked_directory() -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        # Until it is locked, another process takes it for abandoned: then it is gone, and the next is tried.
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            with suppress(OSError):  # a filesystem without locks: no other process can lock it either
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if path.exists():
                return path, descriptor
            os.close(descriptor)


@functools.cache
def _remove_abandoned(_process: int) -> None:
    """Remove what killed processes left, once per process: there may be many entries."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # of another user, in use, or gone by now
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)
