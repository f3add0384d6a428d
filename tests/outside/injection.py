"""A pytest plugin that puts ours into every Trainer or Accelerator that a host's own tests make.

`CKPT_OUTSIDE` names the door. Nothing else of the host or of its tests is changed.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch.distributed.checkpoint.state_dict_saver import save as stock_save


def _after_init(owner: type, attach: Callable[[Any], object]) -> None:
    stock = owner.__init__

    @functools.wraps(stock)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        # Subclasses call it, too.
        if type(self).__init__ is made or owner is type(self):
            attach(self)

    owner.__init__ = made  # type: ignore[method-assign]


def _lightning(given: Callable[[], dict[str, Any]]) -> None:
    """Add to the arguments of every Trainer what is given, where the test has none of its own kind."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.plugins import CheckpointIO

    stock = Trainer.__init__

    @functools.wraps(stock)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        for name, ours in given().items() if kwargs.get("enable_checkpointing") is not False else ():
            theirs = kwargs.get(name)
            listed = (
                list(theirs) if isinstance(theirs, list | tuple) else [theirs] if theirs is not None else []
            )
            if not any(isinstance(each, CheckpointIO) for each in listed):
                kwargs[name] = [*listed, ours]
        stock(self, *args, **kwargs)

    Trainer.__init__ = made  # type: ignore[method-assign]


def _plugin() -> dict[str, Any]:
    return {"plugins": import_module("lightning_ckpt").ShardedCheckpointIO()}


def _callback() -> dict[str, Any]:
    from ckpt_core import EverySteps

    folder = tempfile.mkdtemp(prefix="outside-")
    return {"callbacks": import_module("lightning_ckpt").ShardedCheckpoint(folder, save=EverySteps(3))}


def _trainer() -> None:
    from transformers import Trainer

    import accelerate_ckpt

    _after_init(Trainer, accelerate_ckpt.enable_trainer)


def _accelerator() -> None:
    import accelerate_ckpt

    _after_init(Accelerator, accelerate_ckpt.enable)


def _dcp_save() -> None:
    """Every `dcp.save` into a directory is made by `CheckpointManager`; stock loads it."""
    from torch.distributed import checkpoint

    from ckpt_core import CheckpointManager

    def save(state_dict: dict[str, Any], *args: Any, checkpoint_id: Any = None, **kwargs: Any) -> Any:
        if args or kwargs.get("planner") or kwargs.get("process_group") or checkpoint_id is None:
            return stock_save(state_dict, *args, checkpoint_id=checkpoint_id, **kwargs)
        place = Path(checkpoint_id).absolute()
        with CheckpointManager(place.parent) as checkpoints:
            checkpoints.save(0, state_dict, name=place.name).result()
        return None

    checkpoint.save = save


DOORS = {
    "plugin": lambda: _lightning(_plugin),
    "callback": lambda: _lightning(_callback),
    "accelerate": _accelerator,
    "trainer": _trainer,
    "dcp": _dcp_save,
}

# Tests of former versions import what they no longer use; the module is made anew by them, its class is not.
for _gone in ("GlueDataset", "GlueDataTrainingArguments"):
    if find_spec("transformers") and not hasattr(import_module("transformers"), _gone):
        setattr(type(import_module("transformers")), _gone, None)

if _door := os.environ.get("CKPT_OUTSIDE"):
    DOORS[_door]()
