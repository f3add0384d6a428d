"""How a Trainer comes by the state of a checkpoint: chosen, verified, then loaded."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, final

import torch
from transformers.trainer import SCHEDULER_NAME

from accelerate_ckpt._places import Place, kind_of
from accelerate_ckpt._small_files import verified_files
from accelerate_ckpt._trainer_choice import newest_to_resume
from accelerate_ckpt._trainer_session import TrainerSession
from accelerate_ckpt._trainer_state import StockTrainer, TrainingState
from ckpt_core import CheckpointError, CheckpointManager, ConfigError, CorruptCheckpointError
from ckpt_core.commit import Catalog, require_trusted
from ckpt_core.storage import open_storage

_logger = logging.getLogger(__name__)

_NOT_READ = (
    "*.distcp", "*/*", "model*.safetensors", "pytorch_model*.bin", "adapter_model*", "optimizer.pt",
    "rng_state_*.pth", "rank-*.json", "local-*.json", "chunks-*.json",
)  # fmt: skip
"""What is verified when it is loaded, or is not read at all: single files for others, other ranks' files."""


@final
class TrainerResume:
    """Loads checkpoints into a Trainer; every method is collective."""

    def __init__(
        self, trainer: Any, stock: StockTrainer, session: TrainerSession, *, stock_files: bool
    ) -> None:
        self._trainer = trainer
        self._stock = stock
        self._session = session
        self._stock_files = stock_files
        self._small_files: Mapping[str, bytes] = {}

    def choose(self, wanted: str | os.PathLike[str] | bool | None) -> Any:  # noqa: FBT001 - as in stock
        """What to resume from, for the Trainer; what it reads there by itself has been verified.

        Raises:
            CorruptCheckpointError: what was named is damaged or was never committed, or everything is.
            UntrustedCheckpointError: `verify_manifest` does not accept it.
            ConfigError: what was named holds checkpoints, but is none.
        """
        self._small_files = {}
        chosen: Any = wanted
        if wanted is True:
            manager = self._session.manager
            chosen = self._session.coordinator.once(lambda: newest_to_resume(manager))
            if chosen is None:
                _logger.warning(
                    "resume_from_checkpoint=True: there is none in %s yet; training begins at step 0",
                    manager.storage.url,
                )
        if chosen is None or isinstance(chosen, bool):
            return chosen
        ours = self._is_ours(chosen)
        self._require_trusted(chosen)
        if ours:
            self._small_files = self._verified(chosen)
        return os.fspath(chosen)

    def load_model(self, checkpoint: str, model: Any = None) -> None:
        """Load what stock wrote; ours is loaded once, with its optimizer, when both are wrapped."""
        if not self._is_ours(checkpoint):
            self._stock.load_from_checkpoint(checkpoint, model)

    def load_rest(self, checkpoint: str | None) -> None:
        """Load model, optimizer and scheduler of ours, or what stock wrote beside the model."""
        if checkpoint is None or not self._is_ours(checkpoint):
            self._stock.load_optimizer_and_scheduler(checkpoint)
            return
        self._load(checkpoint, with_optimizer=True)
        scheduler = self._small_files.get(SCHEDULER_NAME)
        if scheduler is not None and self._trainer.lr_scheduler is not None:
            state = torch.load(io.BytesIO(scheduler), weights_only=True)
            self._trainer.lr_scheduler.load_state_dict(state)

    def load_best(self) -> None:
        """Load the model of the best checkpoint."""
        self._session.manager.wait()
        best = self._trainer.state.best_model_checkpoint
        if best is not None and self._is_ours(best):
            self._load(best, with_optimizer=False)
        else:
            if best is not None:
                self._require_trusted(best)
            self._stock.load_best_model()

    def _load(self, checkpoint: str, *, with_optimizer: bool) -> None:
        state = TrainingState(
            self._trainer, self._stock, stock_files=self._stock_files, with_optimizer=with_optimizer
        )
        place, manager = Place.of(checkpoint), self._session.manager
        items = None if with_optimizer else ["model"]
        if os.path.realpath(place.root) == os.path.realpath(manager.storage.url):
            manager.load(state, name=place.name, items=items)
            if with_optimizer:
                self._session.saved_step = None
            return
        options = replace(manager.options, save=None, keep=None)
        with CheckpointManager(place.root, coordinator=self._session.coordinator, options=options) as other:
            other.load(state, name=place.name, items=items)

    def _require_trusted(self, checkpoint: str | os.PathLike[str]) -> None:
        """Refuse what `verify_manifest` does not accept; of what stock wrote, it cannot accept anything."""
        verify = self._session.manager.options.manifest_verifier
        place = Place.of(checkpoint)
        if verify is not None:
            storage = open_storage(place.root)
            self._session.coordinator.once(lambda: require_trusted(storage, place.name, verify))

    def _is_ours(self, checkpoint: str | os.PathLike[str]) -> bool:
        place = Place.of(checkpoint)
        storage = open_storage(place.root)
        kind, inside = self._session.coordinator.once(
            lambda: (kind_of(storage, place.name), _checkpoints_in(checkpoint))
        )
        if kind == "torn":
            raise CorruptCheckpointError(
                f"{checkpoint} was never committed: its save was interrupted, and nothing was loaded. Use "
                "resume_from_checkpoint=True to get the newest that is whole"
            )
        if kind != "committed" and inside:
            raise ConfigError(
                f"{checkpoint} is no checkpoint, but holds {len(inside)}: resume from one of them, such as "
                f"{checkpoint}/{inside[-1]}, or set output_dir to it and resume_from_checkpoint=True"
            )
        return bool(kind == "committed")

    def _verified(self, checkpoint: str | os.PathLike[str]) -> Mapping[str, bytes]:
        """What the Trainer reads by path, on every rank as it finds it there."""
        place, coordinator = Place.of(checkpoint), self._session.coordinator
        found: Mapping[str, bytes] = {}
        told: str | BaseException = ""
        try:
            found = verified_files(open_storage(place.root), place.name, self._is_read)
        except CorruptCheckpointError as error:
            told = f"rank {coordinator.rank}: {error}"
        except (CheckpointError, OSError) as error:
            told = error  # carried to every rank below
        problems = [str(each) for each in coordinator.gather(told, what="verifying small files") if each]
        if problems:
            raise CorruptCheckpointError(f"{checkpoint} cannot be resumed from. {'; '.join(problems)}")
        return found

    def _is_read(self, path: str) -> bool:
        if path == f"rng_state_{self._trainer.args.process_index}.pth":
            return True
        return not any(fnmatchcase(path, pattern) for pattern in _NOT_READ)


def _checkpoints_in(directory: str | os.PathLike[str]) -> list[str]:
    if not Path(directory).is_dir():
        return []
    return [info.name for info in Catalog(open_storage(directory)).committed()]
