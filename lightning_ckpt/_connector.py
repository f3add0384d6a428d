"""`ckpt_path="last"` and `"best"`: Lightning looks for them in its own ModelCheckpoint only.

No hook of a callback or plugin runs before Lightning has chosen the path, so the choice itself is wrapped,
once per Lightning package; for Trainers without a callback or plugin of ours it does what it always did.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from lightning_ckpt._hooks import LifeCycle, committed_of, life_cycles, path_of_best
from lightning_ckpt._options import Settings
from lightning_ckpt._places import real_root

_WRAPPED = "_ckpt_wrapped"

_logger = logging.getLogger(__name__)


def find_our_checkpoints(connector: type[Any]) -> None:
    """Let the Trainers of this connector's package find our checkpoints; harmless when repeated."""
    stock = connector._select_ckpt_path
    if hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def select(self: Any, state_fn: Any, ckpt_path: Any, *arguments: Any, **keywords: Any) -> Any:
        found = _active(self.trainer)
        if found is None:
            return stock(self, state_fn, ckpt_path, *arguments, **keywords)
        callback, settings = found
        if not self._user_managed:
            ckpt_path = _find(ckpt_path, settings) or ckpt_path
        if _is_yet_to_be(ckpt_path, settings, self.trainer):
            _logger.warning("nothing is committed to %s yet: starting afresh", settings.root)
            path = None
        else:
            path = stock(self, state_fn, ckpt_path, *arguments, **keywords)
        callback.selected_path = None if path is None else os.fspath(path)
        return path

    setattr(select, _WRAPPED, True)
    connector._select_ckpt_path = select


def _active(trainer: Any) -> tuple[LifeCycle, Settings] | None:
    for callback in life_cycles(trainer):
        settings = callback.settings_for(trainer)
        if settings is not None:
            return callback, settings
    return None


def _find(ckpt_path: Any, settings: Settings) -> str | None:
    """The path that the word stands for, if we have one; the newest is the root, which load chooses from."""
    if ckpt_path == "last" and committed_of(settings):
        return settings.root
    if ckpt_path == "best":
        return path_of_best(settings) or None
    return None


def _is_yet_to_be(ckpt_path: Any, settings: Settings, trainer: Any) -> bool:
    """Whether the newest checkpoint of a run is asked for that has none yet, as a first run does.

    Where Lightning's own callbacks may know one, or are to be told what is missing, that is left to them.
    """
    if settings.root is None or ckpt_path is None:
        return False
    if ckpt_path == "last":
        return all(isinstance(each, LifeCycle) for each in trainer.checkpoint_callbacks)
    return real_root(ckpt_path) == settings.root and not committed_of(settings)
