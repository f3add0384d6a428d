"""Which checkpoint `resume_from_checkpoint=True` means.

The stock Trainer takes the highest number, whole or not: also a directory that its own preemption save left
behind half-written.
"""

from __future__ import annotations

import logging
import re

from transformers.trainer import TRAINER_STATE_NAME

from accelerate_ckpt._places import kind_of
from ckpt_core import CheckpointManager, CorruptCheckpointError
from ckpt_core.commit import verify
from ckpt_core.storage import Storage

_logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_SENTINEL = "checkpoint-is-incomplete.txt"


def newest_to_resume(manager: CheckpointManager) -> str | None:
    """Path of the newest checkpoint that verifies, ours or a whole one of the stock Trainer; on one rank.

    None if nothing was ever saved: what a killed save left behind, and other people's directories, are
    passed over.

    Raises:
        CorruptCheckpointError: all are damaged.
    """
    storage = manager.storage
    whole = _whole_stock(storage)
    damaged: list[str] = []
    for info in reversed(manager.checkpoints()):
        if _NAME.fullmatch(info.name) is None:
            continue
        failures = verify(storage, info.name)
        if not failures:
            return f"{storage.url}/{info.name}"
        damaged.append(info.name)
        _logger.error("%s/%s is damaged and is passed over: %s", storage.url, info.name, failures[0])
    if whole:
        return f"{storage.url}/{max(whole)[1]}"
    if damaged:
        raise CorruptCheckpointError(
            f"every checkpoint in {storage.url} is damaged: {', '.join(damaged)}; look at each "
            "with `ckpt verify`"
        )
    return None


def _whole_stock(storage: Storage) -> list[tuple[int, str]]:
    """The stock Trainer's checkpoints, by step; those that were never finished are passed over."""
    whole: list[tuple[int, str]] = []
    for entry in storage.list(""):
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_directory or kind_of(storage, entry.name) == "committed":
            continue
        names = {child.name for child in storage.list(entry.name)}
        if kind_of(storage, entry.name) == "stock" and TRAINER_STATE_NAME in names and _SENTINEL not in names:
            whole.append((int(match[1]), entry.name))
        else:
            _logger.warning("%s/%s was never finished, and is passed over", storage.url, entry.name)
    return whole
