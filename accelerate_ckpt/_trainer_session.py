"""The manager of a Trainer's checkpoints, which claims the output directory only while the Trainer trains."""

from __future__ import annotations

import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import final

from transformers import Trainer

from accelerate_ckpt._settings import Settings
from accelerate_ckpt._small_files import Pickles
from accelerate_ckpt._trainer_retention import retention
from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError
from ckpt_core.coordination import coordinator_for_job
from ckpt_core.storage import open_storage
from ckpt_core.telemetry import Sink


@final
class TrainerSession:
    """Gives every training a manager of its own. All but attributes is collective.

    A manager that saves by a policy hears signals. Between trainings nobody would act on them, and another
    Trainer of this process may want the directory: then there is one that hears and claims nothing.

    Attributes:
        coordinator: how ranks agree.
        manager: of the training that runs, or one to look with.
        pickles: reads small files, and tells of those that need pickle.
        preempted: whether the last training was stopped for a preemption.
        saved_step: the last step saved, if what is live now goes on from it.
    """

    def __init__(self, trainer: Trainer, settings: Settings, sinks: Sequence[Sink]) -> None:
        self._trainer = trainer
        self._settings = settings
        self._sinks = sinks
        self._closed = False
        self.pickles = Pickles(allowed=settings.options.allow_pickle)
        deadline = settings.options.deadline_seconds
        self.coordinator = coordinator_for_job(deadline_seconds=deadline)
        # As paths of checkpoints are spelled, too.
        root = os.path.abspath(os.path.expanduser(trainer.args.output_dir or "."))  # noqa: PTH100, PTH111
        self._storage = open_storage(root, settings.options.storage_options, deadline_seconds=deadline)
        self._options = self._at_rest()
        self.manager = self._manager(self._options)
        self.preempted = False
        self.saved_step: int | None = None

    @contextmanager
    def training(self) -> Generator[CheckpointManager]:
        """Claim the output directory and hear signals until the training ends, well or not.

        Raises:
            SaveError: the save in flight at the end has failed.
        """
        if self._closed:
            raise ConfigError("the checkpoints of this Trainer are closed: call enable_trainer() again")
        self.preempted = False
        self._options = self._in_training()
        self._replace()
        try:
            yield self.manager
        except BaseException as error:
            # Other ranks may not be on their way here: the save in flight is waited for, nobody else is.
            self.manager.__exit__(type(error), error, error.__traceback__)
            raise
        self.manager.wait()
        self.manager.due()
        self.preempted = self.manager.preempted
        self._options = self._at_rest()
        self._replace()

    def begin(self, step: int) -> None:
        """Begin, or try again: from less than was saved, and from no checkpoint, on a line of its own."""
        if self.saved_step is not None and step < self.saved_step:
            self._replace()
        self.saved_step = None

    def close(self) -> None:
        """Wait for the save in flight and give the output directory back; harmless when repeated.

        Raises:
            SaveError: the save in flight failed.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.manager.close()
        finally:
            self.coordinator.close()

    def _replace(self) -> None:
        self.manager.close()
        self.manager = self._manager(self._options)
        self.saved_step = None

    def _manager(self, options: CheckpointOptions) -> CheckpointManager:
        return CheckpointManager(
            self._storage, options=options, coordinator=self.coordinator, sinks=self._sinks
        )

    def _in_training(self) -> CheckpointOptions:
        settings, options = self._settings, self._settings.options
        keep = retention(options.keep, self._trainer.args)
        # `save_total_limit` is about what an earlier run has left in the output directory, too.
        prunes = keep is not None and not settings.given & {"keep", "abandoned"}
        return replace(options, keep=keep, abandoned="prune" if prunes else options.abandoned)

    def _at_rest(self) -> CheckpointOptions:
        return replace(self._in_training(), save=None)
