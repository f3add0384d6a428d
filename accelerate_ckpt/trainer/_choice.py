"""The choice for `resume_from_checkpoint=True`: the newest whole one of this run.

It may be ours or the stock Trainer's.

The stock Trainer takes the highest number, even of a directory that its own preemption save left
half-written, or of an earlier run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

from transformers.trainer import TRAINER_STATE_NAME

from ckpt_core import (
    CheckpointError,
    CheckpointInfo,
    CheckpointManager,
    CorruptCheckpointError,
    UntrustedCheckpointError,
)
from ckpt_core.commit import Catalog, require_trusted, verify
from ckpt_core.coordination import Coordinator
from ckpt_core.disclosure import logger_of
from ckpt_core.groups import local_part
from ckpt_core.hosting import Kind, kind_of
from ckpt_core.storage import Storage

_logger = logger_of(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_OURS = re.compile(rf"{_NAME.pattern}(\.run-[0-9a-f]{{8,32}})?")
"""In a bucket, where nothing is replaced, a step may be there several times."""
_SENTINEL = "checkpoint-is-incomplete.txt"


@final
@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Stock:
    """A checkpoint of the stock Trainer that looks finished."""

    step: int
    name: str
    written: float


def newest_of_tiers(manager: CheckpointManager, coordinator: Coordinator) -> str | None:
    """Return what `newest_to_resume` does, once further tiers have made it whole.

    Collective. Damage that is found on the way is made good, too.
    """
    manager.fetcher.fetch()
    while True:
        failure: CorruptCheckpointError | None = None
        checkpoint: str | None = None
        try:
            checkpoint = coordinator.run_on_coordinator(lambda: newest_to_resume(manager))
        except CorruptCheckpointError as error:
            failure = error
        if manager.fetcher.fetch() is None:
            if failure is not None:
                raise failure
            return checkpoint


def newest_to_resume(manager: CheckpointManager) -> str | None:
    """Return the path of the newest checkpoint that verifies; on one rank.

    Ours are those of the present lineage. Damage that is found is marked, and what `verify_manifest` does not
    accept is passed over, as is what stock wrote where there is such a function. So are leftovers of killed
    saves, and directories of others. Returns None if nothing was ever saved.

    Raises:
        CorruptCheckpointError: there are some, and none can be used.
        IncompatibleCheckpointError: one was written by a newer version.
        OSError: storage is unwell.
    """
    storage = manager.storage
    stock = max(_whole_stock(storage), default=None)
    survey = Catalog(storage).survey()
    passed = [
        _refused(storage, name, error) for name, error in survey.unreadable.items() if _OURS.fullmatch(name)
    ]
    if stock is not None and manager.options.verify_manifest is not None:
        passed.append(stock.name)
        _logger.error("%s/%s is passed over: it has no manifest to be judged", storage.url, stock.name)
        stock = None
    for info in reversed(survey.committed):
        if _OURS.fullmatch(info.name) is None:
            continue
        if stock is not None and stock.written > info.created:
            _logger.warning(
                "%s/%s is newer than %s and was written by the stock Trainer",
                storage.url,
                stock.name,
                info.name,
            )
            break
        problem = _untrusted(manager, info) or _problem(storage, info)
        if problem is None:
            return f"{storage.url}/{info.name}"
        passed.append(info.name)
        _logger.error("%s/%s is passed over: %s", storage.url, info.name, problem)
    if stock is not None:
        return f"{storage.url}/{stock.name}"
    if not passed:
        return None
    left = [info.name for info in survey.abandoned if info.usable]
    others = f"; of abandoned runs there are {', '.join(left)}, which can be named" if left else ""
    raise CorruptCheckpointError(
        f"no checkpoint in {storage.url} can be resumed from: {', '.join(passed)} are damaged, not trusted "
        f"or marked as bad{others}. Look at each with `ckpt verify`, or train into another output_dir"
    )


def _refused(storage: Storage, name: str, error: CheckpointError | OSError) -> str:
    """Pass over a checkpoint whose marker is damaged; raise any other error."""
    if not isinstance(error, CorruptCheckpointError):
        raise error
    _logger.error("%s/%s is passed over: it is damaged: %s", storage.url, name, error)
    return name


def _untrusted(manager: CheckpointManager, info: CheckpointInfo) -> str | None:
    """Return why a checkpoint is not trusted, or None; leave it unmarked."""
    try:
        require_trusted(manager.storage, info.name, manager.options.manifest_verifier)
    except UntrustedCheckpointError as error:
        return f"it is not trusted: {error.why}"
    except CorruptCheckpointError:
        return None  # what is wrong with it is found, and marked, when it is verified
    return None


def _problem(storage: Storage, info: CheckpointInfo) -> str | None:
    """Return why a checkpoint cannot be used, or None; mark or unmark it accordingly."""
    if info.bad is not None:
        return f"it is marked as bad: {info.bad}"
    failures = verify(storage, info.name)
    problem = f"it is damaged: {failures[0]}" if failures else None
    catalog = Catalog(storage)
    try:
        if problem is not None:
            catalog.mark_damaged(info.name, "; ".join(str(failure) for failure in failures[:5]))
        elif info.damaged is not None:
            catalog.unmark(info.name)
    except (CheckpointError, OSError) as error:
        _logger.warning("%s/%s: its mark could not be changed: %s", storage.url, info.name, error)
    return problem


def _whole_stock(storage: Storage) -> list[_Stock]:
    """Return the finished checkpoints of the stock Trainer; warn of unfinished ones."""
    whole: list[_Stock] = []
    for entry in storage.list(""):
        match = _NAME.fullmatch(entry.name)
        if match is None or not entry.is_directory:
            continue
        kind = kind_of(storage, entry.name)
        if kind is Kind.COMMITTED:
            continue
        names = {child.name for child in storage.list(entry.name)}
        if kind is Kind.STOCK and TRAINER_STATE_NAME in names and _SENTINEL not in names:
            whole.append(_Stock(step=int(match[1]), name=entry.name, written=_written(storage, entry.name)))
        else:
            _logger.warning("%s/%s was never finished, and is passed over", storage.url, entry.name)
    return whole


def _written(storage: Storage, name: str) -> float:
    local = local_part(storage)
    if local is None:
        return 0.0
    return local.local_path(f"{name}/{TRAINER_STATE_NAME}").stat().st_mtime
