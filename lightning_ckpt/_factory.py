"""Entry points that every Trainer calls where this package is installed.

They attach a plugin that was given without the callback, and give advice where a Trainer without either is
given a checkpoint of ours. They import nothing heavy: a process that holds a plugin of ours has imported its
module already.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from ckpt_core.errors import ConfigError
from ckpt_core.names import MARKER

_GUARDED = "_ckpt_guarded"


def lightning_callbacks() -> list[Any]:
    """Return the callback that attaches plugins of the `lightning` package, if any."""
    return _attachers("lightning_ckpt.lightning", "lightning.pytorch")


def pytorch_lightning_callbacks() -> list[Any]:
    """Return the callback that attaches plugins of the `pytorch_lightning` package."""
    return _attachers("lightning_ckpt.pytorch_lightning", "pytorch_lightning")


def _attachers(module: str, package: str) -> list[Any]:
    connectors = sys.modules.get(f"{package}.trainer.connectors.checkpoint_connector")
    if connectors is not None:
        _explain_our_directories(connectors._CheckpointConnector)
    loaded = sys.modules.get(module)
    return [loaded.PluginAttacher()] if loaded is not None and loaded.plugins_alive() else []


def _explain_our_directories(connector: type[Any]) -> None:
    """Wrap the choice of `ckpt_path`: give advice where a Trainer cannot read ours."""
    stock = connector._select_ckpt_path
    if hasattr(stock, _GUARDED):
        return

    @functools.wraps(stock)
    def select(self: Any, *arguments: Any, **keywords: Any) -> Any:
        path = stock(self, *arguments, **keywords)
        if path is not None and not _reads_ours(self.trainer) and _is_ours(path):
            root = Path(path).parent if (Path(path) / MARKER).is_file() else path
            raise ConfigError(
                f"{path} holds checkpoints of ckpt-suite, which this Trainer does not read: add "
                f"lightning_ckpt.ShardedCheckpoint({str(root)!r}) to its callbacks. For the weights alone, "
                f"without a Trainer: lightning_ckpt.load_from_checkpoint(Model, {str(path)!r})"
            )
        return path

    setattr(select, _GUARDED, True)
    connector._select_ckpt_path = select


def _reads_ours(trainer: Any) -> bool:
    # A Trainer may have our callback only if the module that knows of it has been imported.
    hooks = sys.modules.get("lightning_ckpt._hooks")
    return hooks is not None and any(each.settings_for(trainer) for each in hooks.life_cycles(trainer))


def _is_ours(path: Any) -> bool:
    """Return whether a local path is a committed checkpoint, or holds one."""
    try:
        directory = Path(path)
        return (directory / MARKER).is_file() or any(directory.glob(f"*/{MARKER}"))
    except (OSError, TypeError, ValueError):
        return False
