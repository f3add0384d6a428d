"""Warnings about a file that every save reads: told once, until the file says something else."""

from __future__ import annotations

from typing import Final
from weakref import WeakKeyDictionary

from ckpt_core.disclosure import logger_of
from ckpt_core.storage import Storage

_logger = logger_of(__name__)

_told: Final[WeakKeyDictionary[Storage, dict[str, str]]] = WeakKeyDictionary()


def warn_once(storage: Storage, key: str, problem: str, *, so_that: str) -> None:
    """Log why a file of the root cannot be read, unless that was the last thing told of it.

    Args:
        storage: the root; one that is opened again is told of again.
        key: of the file.
        problem: what is wrong with its present content.
        so_that: what comes of it, and what to do.
    """
    told = _told.setdefault(storage, {})
    if told.get(key) != problem:
        told[key] = problem
        _logger.warning("%s/%s cannot be read, so that %s: %s", storage.url, key, so_that, problem)


def is_well(storage: Storage, key: str) -> None:
    """Note that a file can be read: should it be damaged once more, that is told again."""
    _told.get(storage, {}).pop(key, None)
