"""Committed checkpoints as users and their loggers see them.

Loggers hear of each checkpoint once it is committed, on the thread that trains. Lightning's own look at
attributes of a `ModelCheckpoint`, and upload files that these name. A checkpoint of ours is a directory,
which they pass over; those that shall log models get a reference to it instead.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch

from ckpt_core.commit import Catalog
from ckpt_core.disclosure import logger_of, public_url
from ckpt_core.saving import SaveHandle
from ckpt_core.tiers import RunCatalog, open_tiers
from ckpt_core.types import CheckpointInfo
from lightning_ckpt._options import Settings

_UPLOADS_DIRECTORIES: Final = "NeptuneLogger"
_logger = logger_of(__name__)


def committed_of(settings: Settings, *, further: bool = False) -> Sequence[CheckpointInfo]:
    """Return the committed checkpoints of the run's own root, oldest first.

    With `further`, those of its further tiers, too: where one is chosen, not while a training runs.
    """
    if settings.root is None:
        return []
    storage = settings.storage_at(settings.root)
    if not further:
        return Catalog(storage).committed()
    return RunCatalog(open_tiers(storage, settings.options)).committed()


def best_of(settings: Settings, *, further: bool) -> CheckpointInfo | None:
    """Return the best committed checkpoint; of equals the newer, as in retention."""
    policy = settings.best
    committed = committed_of(settings, further=further)
    if policy is None:
        return committed[-1] if committed else None
    steps = policy.keep(committed, 0.0)
    sign = 1 if policy.mode == "min" else -1
    # Of one step there may be several, of which some were saved before the metric was measured.
    ranked = [info for info in committed if info.step in steps and policy.metric in info.metrics]
    return min(ranked, key=lambda info: (sign * info.metrics[policy.metric], -info.step), default=None)


class AsModelCheckpoint:
    """What users and loggers read of a `ModelCheckpoint`.

    Without a `KeepBest` the newest is the best, as for a `ModelCheckpoint` without a monitor.
    """

    settings: Settings
    save_top_k = -1
    save_weights_only = False

    @property
    def looks_further(self) -> bool:
        """Whether the best may be in a further tier only; not while a training runs."""
        return False

    @property
    def dirpath(self) -> str | None:
        """The run's root."""
        return self.settings.root

    @property
    def save_last(self) -> bool:
        """Whether the last step of a training is saved."""
        return self.settings.save_last

    @property
    def monitor(self) -> str | None:
        """The metric of `KeepBest`."""
        return None if self.settings.best is None else self.settings.best.metric

    @property
    def mode(self) -> str:
        """Whether the least or the greatest value is the best."""
        return "min" if self.settings.best is None else self.settings.best.mode

    @property
    def best_model_path(self) -> str:
        """Path of the best committed checkpoint, or ""."""
        best = best_of(self.settings, further=self.looks_further)
        return "" if best is None else f"{self.dirpath}/{best.name}"

    @best_model_path.setter
    def best_model_path(self, value: str) -> None:
        """Ignore what Lightning's spawn launcher hands over: storage has the same."""

    @property
    def best_model_score(self) -> torch.Tensor | None:
        """The metric of the best checkpoint."""
        best = best_of(self.settings, further=self.looks_further)
        return None if best is None else self._score(best.metrics)

    @property
    def best_k_models(self) -> dict[str, torch.Tensor | None]:
        """Path and score of the checkpoints that are there because they are the best."""
        policy, infos = self.settings.best, committed_of(self.settings)
        steps = frozenset[int]() if policy is None else policy.keep(infos, 0.0)
        return {f"{self.dirpath}/{i.name}": self._score(i.metrics) for i in infos if i.step in steps}

    @property
    def last_model_path(self) -> str:
        """Path of the newest committed checkpoint, or ""."""
        newest = self._newest()
        return "" if newest is None else f"{self.dirpath}/{newest.name}"

    @property
    def current_score(self) -> torch.Tensor | None:
        """The metric of the newest checkpoint."""
        newest = self._newest()
        return None if newest is None else self._score(newest.metrics)

    def _newest(self) -> CheckpointInfo | None:
        return next(reversed(committed_of(self.settings)), None)

    def _score(self, metrics: Mapping[str, float]) -> torch.Tensor | None:
        value = metrics.get(self.monitor or "")
        return None if value is None else torch.tensor(value)


@final
class Announcements(AsModelCheckpoint):
    """Tells the loggers of a Trainer about commits. The thread that trains, on rank 0.

    For them it is the `ModelCheckpoint`, whose newest checkpoint is the one that they hear of. An exception
    of a logger is logged, once for each, and changes nothing else.
    """

    def __init__(self, trainer: Any, settings: Settings) -> None:
        self.settings = settings
        self._trainer = trainer
        self._saves: list[SaveHandle] = []
        self._announced: CheckpointInfo | None = None
        self._broken = set[int]()

    def _newest(self) -> CheckpointInfo | None:
        return self._announced

    def saved(self, handle: SaveHandle) -> None:
        """Announce a save once it is committed."""
        if self._trainer.is_global_zero and self._trainer.loggers:
            self._saves.append(handle)

    def make(self) -> None:
        """Announce what was committed since the last call; cheap if nothing was."""
        while self._saves and self._saves[0].done():
            handle = self._saves.pop(0)
            if handle.error is None:
                self._announced = handle.result()
                self._announce(self._announced, last=False)

    def end(self) -> None:
        """Announce what is left, after the last save; and the last as the last."""
        self.make()
        if self._announced is not None:
            self._announce(self._announced, last=True)

    def _announce(self, info: CheckpointInfo, *, last: bool) -> None:
        for logger in self._trainer.loggers:
            try:
                kinds = {cls.__name__ for cls in type(logger).__mro__}
                if not last and _UPLOADS_DIRECTORIES not in kinds:
                    logger.after_save_checkpoint(self)
                refer = next((_REFERENCES[name] for name in _REFERENCES if name in kinds), None)
                if refer is None:
                    continue
                wanted = logger._log_model == (True if last else "all")
                if wanted and _is_there(self.last_model_path):
                    refer(logger, self, info)
            except Exception as error:  # noqa: BLE001 - logged; training does not depend on a logger
                # What retention removes meanwhile, a logger cannot look at.
                if id(logger) not in self._broken and _is_there(self.last_model_path):
                    self._broken.add(id(logger))
                    _logger.warning(
                        "%s failed when it heard of checkpoint %s, which is committed: %r. Training "
                        "continues; further failures of this logger are not reported",
                        type(logger).__name__, info.name, error,
                    )  # fmt: skip


def _is_there(path: str) -> bool:
    """Return whether retention has left a checkpoint, as far as is cheap to see."""
    return "://" in path or Path(path).exists()


def _described(logged: AsModelCheckpoint, info: CheckpointInfo) -> tuple[str, list[str], dict[str, Any]]:
    """Return the URL of a checkpoint, its aliases, and what it is."""
    path = f"{logged.dirpath}/{info.name}"
    url = public_url(path) if "://" in path else Path(path).as_uri()
    aliases = ["latest", "best"] if path == logged.best_model_path else ["latest"]
    return url, aliases, {"step": info.step, "metrics": dict(info.metrics), "bytes": info.size_bytes}


def _refer_in_wandb(logger: Any, logged: AsModelCheckpoint, info: CheckpointInfo) -> None:
    """Log an artifact that holds the URL only, and no checksums of what it names."""
    url, aliases, described = _described(logged, info)
    name = logger._checkpoint_name or f"model-{logger.experiment.id}"
    artifact = sys.modules["wandb"].Artifact(name=name, type="model", metadata=described)
    artifact.add_reference(url, name=info.name, checksum=False)
    logger.experiment.log_artifact(artifact, aliases=aliases)


def _refer_in_mlflow(logger: Any, logged: AsModelCheckpoint, info: CheckpointInfo) -> None:
    """Log a small file that names the URL."""
    url, aliases, described = _described(logged, info)
    content = {"url": url, "aliases": aliases, **described}
    logger.experiment.log_dict(logger.run_id, content, f"checkpoints/{info.name}.json")


_REFERENCES: Final = {"WandbLogger": _refer_in_wandb, "MLFlowLogger": _refer_in_mlflow}
