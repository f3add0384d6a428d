"""Resolution of `ckpt_path="last"` and `"best"` to checkpoints of ours.

Lightning looks for them in its own ModelCheckpoint only.

No hook of a callback or plugin runs before Lightning has chosen the path, so the choice itself is wrapped,
once per Lightning package. For Trainers without a callback or plugin of ours it is unchanged.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Final

from ckpt_core.commit import Catalog, look_around
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from ckpt_core.hosting import root_of
from ckpt_core.validation import location
from lightning_ckpt._committed import committed_of, path_of_best
from lightning_ckpt._hooks import LifeCycle, life_cycles
from lightning_ckpt._options import Settings
from lightning_ckpt.loops import continues, requeue_signal

_WRAPPED = "_ckpt_wrapped"
_STOCK = ".ckpt"
_SHOWN = 4

_logger = logger_of(__name__)
_begun: Final = set[str]()
"""The roots of this process's fits so far."""


def find_our_checkpoints(connector: type[Any]) -> None:
    """Wrap the choice of `ckpt_path` in one Lightning package; idempotent."""
    stock = connector._select_ckpt_path
    if hasattr(stock, _WRAPPED):
        return

    @functools.wraps(stock)
    def select(self: Any, state_fn: Any, ckpt_path: Any, *arguments: Any, **keywords: Any) -> Any:
        found = _active(self.trainer)
        if found is None:
            return stock(self, state_fn, ckpt_path, *arguments, **keywords)
        callback, settings = found
        if ckpt_path is not None and (problem := location("ckpt_path", ckpt_path)) is not None:
            raise ConfigError(problem)
        if ckpt_path is None and _is_requeued(settings, self.trainer):
            ckpt_path = "last"
        if not self._user_managed:
            given = keywords.get("model_provided", True)
            ckpt_path = _resolved(ckpt_path, settings, self.trainer, module_is_given=given)
        if _is_yet_to_be(ckpt_path, settings, self.trainer):
            _begin_afresh(ckpt_path, settings, self.trainer)
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


def _is_requeued(settings: Settings, trainer: Any) -> bool:
    """Return whether SLURM has started again the job that saved the newest checkpoint.

    Only for the first fit of a process: later ones, such as the folds of a cross-validation, begin afresh.
    """
    root = settings.root
    if root is None or root in _begun or str(trainer.state.fn.value) != "fit":
        return False
    _begun.add(root)
    if requeue_signal(trainer) is None:
        return False
    committed = committed_of(settings, further=True)
    if not committed or not continues(
        Catalog(settings.readable_at(root)).manifest(committed[-1].name).annotations
    ):
        return False
    _logger.warning("requeued by SLURM: this fit continues from the newest checkpoint of %s", root)
    return True


def _resolved(ckpt_path: Any, settings: Settings, trainer: Any, *, module_is_given: bool) -> Any:
    """Resolve a word to a path; an evaluation without one takes the best or newest."""
    if ckpt_path is None and not module_is_given and settings.root is not None:
        ckpt_path = "best" if settings.best is not None or _others(trainer) else "last"
    return _find(ckpt_path, settings, trainer) or ckpt_path


def _others(trainer: Any) -> list[Any]:
    """Return the checkpoint callbacks of a Trainer that are not ours."""
    return [each for each in trainer.checkpoint_callbacks if not isinstance(each, LifeCycle)]


def _find(ckpt_path: Any, settings: Settings, trainer: Any) -> str | None:
    """Return the path that a word stands for, if any; for the newest it is the root."""
    if ckpt_path == "last" and committed_of(settings, further=True):
        return settings.root
    if ckpt_path == "best":
        # Lightning asks the first callback only, which may be ours although it ranks nothing.
        theirs = () if settings.best is not None else _others(trainer)
        known = (getattr(each, "best_model_path", "") for each in theirs)
        return path_of_best(settings, further=True) or next(filter(None, known), None)
    return None


def _is_yet_to_be(ckpt_path: Any, settings: Settings, trainer: Any) -> bool:
    """Return whether `ckpt_path` means a checkpoint of a run that has none yet.

    As in a first run. Where Lightning's own callbacks may know one, or raise their own error, they decide.
    """
    if settings.root is None or ckpt_path is None:
        return False
    if ckpt_path in {"last", "best"}:
        return not _others(trainer)
    return root_of(ckpt_path) == settings.root and not committed_of(settings, further=True)


def _begin_afresh(ckpt_path: Any, settings: Settings, trainer: Any) -> None:
    """Warn that a first fit starts afresh; refuse anything else without weights.

    Raises:
        CheckpointNotFoundError: it is not a fit, or it asks for the best.
    """
    verb = str(trainer.state.fn.value)
    if ckpt_path == "best" and settings.best is None:
        raise CheckpointNotFoundError(
            f'ckpt_path="best": nothing ranks the checkpoints of {settings.root}. Give ShardedCheckpoint '
            'keep=KeepBest("val_loss"), or take ckpt_path="last", which is the newest'
        )
    if ckpt_path == "best" and settings.best is not None:
        raise CheckpointNotFoundError(
            f'ckpt_path="best": no checkpoint in {settings.root} has the metric {settings.best.metric!r}. '
            'Log it in the validation and train on, or take ckpt_path="last", which is the newest'
        )
    if verb != "fit":
        raise CheckpointNotFoundError(
            f"ckpt_path={str(ckpt_path)!r}: nothing is committed to {settings.root}, so there are no weights "
            f"to {verb} with. Correct dirpath= or ckpt_path, or train first; without ckpt_path a module that "
            "you give is taken as it is"
        )
    if trainer.is_global_zero:
        there = "".join(f"; but {each}" for each in _meant_perhaps(settings))
        _logger.warning("nothing is committed to %s yet: starting afresh%s", settings.root, there)


def _meant_perhaps(settings: Settings) -> list[str]:
    """List what lies in the root besides our checkpoints that may have been meant."""
    storage = settings.storage_at(str(settings.root))
    try:
        stock = sorted(entry.name for entry in storage.list("") if entry.name.endswith(_STOCK))
        runs = look_around(storage).runs
    except (CheckpointError, OSError):
        return []  # the first save will raise it
    found = []
    if stock:
        found.append(
            f"Lightning wrote {', '.join(stock[-_SHOWN:])} there: to go on from one, stop, and call "
            f"fit(..., ckpt_path={f'{settings.root}/{stock[-1]}'!r})"
        )
    if runs:
        found.append(
            f"{', '.join(runs[:_SHOWN])} there hold checkpoints: to go on from one, give it as dirpath="
        )
    return found
