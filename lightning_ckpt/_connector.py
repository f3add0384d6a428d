"""Choice of the checkpoint that a run of the Trainer begins with."""

from __future__ import annotations

from typing import Any, Final

from ckpt_core.commit import Catalog, look_around
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CheckpointNotFoundError, ConfigError
from ckpt_core.hosting import root_of
from ckpt_core.validation import location
from lightning_ckpt._committed import committed_of
from lightning_ckpt._options import Settings
from lightning_ckpt.loops import continues, requeue_signal

_STOCK = ".ckpt"
_SHOWN = 4

_logger = logger_of(__name__)
_begun: Final = set[str]()
"""The roots of this process's fits so far."""


def chosen(ckpt_path: Any, settings: Settings, trainer: Any, *, last: bool) -> Any:
    """Return what to load instead of what Lightning has chosen; None to begin afresh.

    Args:
        ckpt_path: what Lightning has chosen.
        settings: of the run.
        trainer: the Trainer.
        last: whether `ckpt_path="last"` means the newest of the run's own root.

    Raises:
        ConfigError: it is no path.
        CheckpointNotFoundError: there is none, and this is no fit.
    """
    if last or (ckpt_path is None and _is_requeued(settings, trainer)):
        ckpt_path = settings.root
    elif ckpt_path is None:
        return None
    if (problem := location("ckpt_path", ckpt_path)) is not None:
        raise ConfigError(problem)
    if settings.root is None or root_of(ckpt_path) != settings.root or committed_of(settings, further=True):
        return ckpt_path
    _begin_afresh("last" if last else ckpt_path, settings, trainer)
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


def _begin_afresh(ckpt_path: Any, settings: Settings, trainer: Any) -> None:
    """Warn that a first fit starts afresh; refuse anything else without weights.

    Raises:
        CheckpointNotFoundError: it is not a fit.
    """
    verb = str(trainer.state.fn.value)
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
