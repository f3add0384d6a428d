"""Entry points through which a plugin given without the callback reaches Lightning's life cycle.

Every Trainer of an environment with this package calls these, so they import nothing: a process that holds a
plugin of ours has imported its module, and for all others there is nothing to do.
"""

from __future__ import annotations

import sys
from typing import Any


def lightning_callbacks() -> list[Any]:
    """The callback that attaches a `ShardedCheckpointIO` of the `lightning` package, if there can be one."""
    return _attachers("lightning_ckpt.lightning")


def pytorch_lightning_callbacks() -> list[Any]:
    """The callback that attaches a `ShardedCheckpointIO` of the `pytorch_lightning` package likewise."""
    return _attachers("lightning_ckpt.pytorch_lightning")


def _attachers(module: str) -> list[Any]:
    loaded = sys.modules.get(module)
    return [loaded.PluginAttacher()] if loaded is not None and loaded.plugins_alive() else []
