"""`AcceleratorCheckpoints`: what `enable` attaches to an accelerator."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from accelerate import Accelerator

from accelerate_ckpt._places import Place, clear_for, kind_of, newest_stock
from accelerate_ckpt._progress import Progress
from accelerate_ckpt._roots import Roots
from accelerate_ckpt._state import AcceleratorState, CallArguments, model_part
from accelerate_ckpt._steps import steps_made
from accelerate_ckpt._stock import StockMethods
from ckpt_core import (
    CheckpointInfo,
    CheckpointManager,
    CheckpointNotFoundError,
    CheckpointOptions,
    CorruptCheckpointError,
    SaveHandle,
)
from ckpt_core.names import METADATA
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink

_logger = logging.getLogger(__name__)


@final
class AcceleratorCheckpoints:
    """The checkpoints of one accelerator.

    - Threads: all methods on the thread that trains.
    - Ranks: every method but `latest` and `note_metrics` is collective: call it on every process, never only
      on the main one.

    Attributes:
        progress: follows optimizers and data loaders.
        stock: the accelerator's own methods.
        implicit: whether nobody asked for it in the script, so that `enable` may still be called.
    """

    implicit = False

    def __init__(
        self,
        accelerator: Accelerator,
        root: str | os.PathLike[str] | Storage | None,
        *,
        options: CheckpointOptions,
        stock_files: bool = True,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.progress = Progress.of(accelerator)
        self.stock = StockMethods(
            save_state=accelerator.save_state,
            load_state=accelerator.load_state,
            end_training=accelerator.end_training,
        )
        self._accelerator = accelerator
        self._gated = options.save is not None
        self._stock_files = stock_files
        self._metrics: dict[str, float] = {}
        self._batches_seen = -1
        self._roots = Roots(accelerator, root, options, sinks)
        self._ahead = self._roots.continue_numbering()

    @property
    def manager(self) -> CheckpointManager:
        """The manager of the root for automatic names, or of the only root in use.

        Raises:
            ConfigError: there is neither.
        """
        return self._roots.only()

    @property
    def step(self) -> int:
        """Optimizer steps done, those before the last load included."""
        return self.progress.steps.step

    @property
    def preempted(self) -> bool:
        """Whether training is to stop for a preemption announced to any rank, as of the last look for one."""
        return self._roots.preempted

    def check_preemption(self) -> bool:
        """Look for a preemption where `save_state` is not called, as in an evaluation; returns `preempted`.

        Collective where the save policy has an `OnPreemption`; the next `save_state` then saves.
        """
        return self._roots.check_preemption()

    def directory(self, output_dir: str | os.PathLike[str] | None = None) -> str:
        """Path or URL that `save(output_dir)` would save to now.

        Raises:
            ConfigError: there is no directory to save to.
        """
        place = self._roots.place(output_dir)
        return f"{place.root}/{place.name}"

    def save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        safe_serialization: bool = True,
    ) -> SaveHandle | None:
        """Save now, whatever the save policy says; None if a save is in flight and `back_pressure` is `skip`.

        Args:
            output_dir: directory or URL; the next automatic name if None, or if automatic naming is on.
            metrics: numbers for `KeepBest`, beside those that went through `accelerator.log`.
            safe_serialization: as in the stock `save_state`.

        Raises:
            SaveError: it could not start, or the save before has failed.
            ConfigError: there is no directory to save to.
        """
        place = self._roots.place(output_dir)
        return self._save(place, metrics or {}, "call", safe=safe_serialization)

    def maybe_save(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        safe_serialization: bool = True,
        total_steps: int | None = None,
    ) -> SaveHandle | None:
        """Save if the save policy says so, or if there is none: what `save_state` does. See `save`.

        Where it is called for every batch, the save policy is only asked when an optimizer step is complete.
        """
        place = self._roots.place(output_dir)
        if self._gated and self._within_window():
            return None
        reason: str | None = "call"
        if self._gated:
            reason = self._roots.at(place.root).due(self.step + self._ahead, total_steps=total_steps)
        if reason is None:
            return None
        return self._save(place, metrics or {}, reason, safe=safe_serialization)

    def load(
        self,
        input_dir: str | os.PathLike[str] | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **load_model_func_kwargs: Any,
    ) -> None:
        """Load a checkpoint of ours, of any strategy and any number of ranks, or one of stock Accelerate.

        Args:
            input_dir: directory or URL; the newest that verifies if None.
            load_kwargs: as in the stock `load_state`.
            load_model_func_kwargs: as in the stock `load_state`.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: it is damaged or torn; nothing was touched.
            IncompatibleCheckpointError: it does not fit what was prepared; nothing was touched.
        """
        arguments = {"load_kwargs": dict(load_kwargs) if load_kwargs else None, **load_model_func_kwargs}
        self.wait()
        if input_dir is None:
            self._load_newest(arguments)
        else:
            self._load_place(Place.of(input_dir), arguments)
        newest = self._roots.continue_numbering()
        # Who goes back to an older one on purpose leaves newer ones behind, which must not count as newer
        # than what is saved from now on. Who got an older one because newer ones are damaged does not.
        self._ahead = 0 if input_dir is None else max(0, newest - self.step)

    def latest(self) -> CheckpointInfo | None:
        """The newest committed checkpoint of `manager`; it is not verified here."""
        return self.manager.latest()

    def wait(self) -> None:
        """Wait for every save in flight.

        Raises:
            SaveError: one failed.
        """
        self._roots.wait()

    def note_metrics(self, values: Mapping[str, Any]) -> None:
        """Remember numbers that were logged, for `KeepBest`."""
        for name, value in values.items():
            number = value.item() if isinstance(value, torch.Tensor | np.generic) else value
            if type(number) in {int, float}:
                self._metrics[name] = float(number)

    def close(self) -> None:
        """Wait for every save in flight and give the roots back; harmless when repeated.

        Raises:
            SaveError: a save in flight failed.
        """
        self._roots.close()

    def _within_window(self) -> bool:
        """Whether gradients are being accumulated, and the end of that will be seen, as the last one was."""
        accelerator, seen = self._accelerator, self._batches_seen
        self._batches_seen = accelerator.step
        return not accelerator.sync_gradients and accelerator.step - seen in {0, 1}

    def _save(
        self, place: Place, metrics: Mapping[str, float], reason: str, *, safe: bool
    ) -> SaveHandle | None:
        accelerator, manager = self._accelerator, self._roots.at(place.root)
        if not accelerator.sync_gradients and accelerator.gradient_accumulation_steps > 1:
            _logger.warning(
                "saving %s within an accumulation window: the gradients accumulated so far are not saved, so "
                "a resumed run is not exact; save when accelerator.sync_gradients is true",
                place.name,
            )
        self._roots.coordinator.once(lambda: clear_for(manager.storage, place.name))
        handle = manager.save(
            self.step + self._ahead,
            self._state(manager, CallArguments(safe=safe, stock_files=self._stock_files)),
            metrics={**self._metrics, **metrics},
            annotations={
                "framework": "accelerate",
                "strategy": accelerator.distributed_type.value,
                "reason": reason,
            },
            name=place.name,
        )
        if handle is not None:
            accelerator.project_configuration.iteration += 1
        return handle

    def _load_newest(self, arguments: Mapping[str, Any]) -> None:
        manager = self.manager
        if manager.resume(self._state(manager, CallArguments(load=arguments))) is not None:
            return
        name = self._roots.coordinator.once(lambda: newest_stock(manager.storage))
        if name is None:
            raise CheckpointNotFoundError(f"nothing has been committed to {manager.storage.url} yet")
        self._load_stock(manager, name, arguments)

    def _load_place(self, place: Place, arguments: Mapping[str, Any]) -> None:
        manager = self._roots.at(place.root)
        where = f"{manager.storage.url}/{place.name}"
        kind = self._roots.coordinator.once(lambda: kind_of(manager.storage, place.name))
        if kind == "missing":
            raise CheckpointNotFoundError(f"there is no checkpoint at {where}")
        if kind == "torn":
            raise CorruptCheckpointError(
                f"{where} was never committed: its save was interrupted, and nothing was loaded. Load "
                "another one, or call load_state() without a directory to get the newest that is whole"
            )
        if kind == "stock":
            self._load_stock(manager, place.name, arguments)
            return
        manager.load(self._state(manager, CallArguments(load=arguments)), name=place.name)

    def _load_stock(self, manager: CheckpointManager, name: str, arguments: Mapping[str, Any]) -> None:
        """Load what stock Accelerate wrote: its shards ourselves, for it loses FSDP1's optimizer state."""
        _logger.info("%s/%s was written by stock Accelerate", manager.storage.url, name)
        if manager.storage.exists(f"{name}/{model_part(0)}/{METADATA}"):
            manager.load(self._state(manager, CallArguments(load=arguments)), name=name)
        else:
            self.stock.load_state(f"{manager.storage.url}/{name}", **arguments)
        self.progress.steps.restore(steps_made(self._accelerator._optimizers))

    def _state(self, manager: CheckpointManager, arguments: CallArguments) -> AcceleratorState:
        return AcceleratorState(
            self._accelerator,
            self.stock,
            self.progress,
            coordinator=self._roots.coordinator,
            storage=manager.storage,
            arguments=arguments,
        )
