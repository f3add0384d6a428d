"""One manager for every directory that checkpoints go to, all with the same coordinator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import final

from accelerate import Accelerator

from accelerate_ckpt._places import Place, automatic_name, automatic_root, next_number
from accelerate_ckpt._settings import Settings
from ckpt_core import CheckpointManager, CheckpointOptions, ConfigError, KeepLatest
from ckpt_core.coordination import Coordinator, coordinator_for_job
from ckpt_core.storage import Storage
from ckpt_core.telemetry import Sink

_NO_ROOT = (
    "give save_state() an output_dir, or enable() a root, or ProjectConfiguration a project_dir with "
    "automatic_checkpoint_naming=True"
)


@final
class Roots:
    """The roots in use by one accelerator. Main thread only; making a manager is collective.

    Args:
        accelerator: whose checkpoints they hold.
        settings: the root for automatic names, and options of the managers.
        sinks: receivers of telemetry events.
        listen: whether managers hear signals before they are first asked whether to save.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        settings: Settings,
        sinks: Sequence[Sink],
        *,
        listen: bool,
    ) -> None:
        root = settings.root
        self._accelerator = accelerator
        self._listen = listen
        self._options = settings.options
        self._abandoned_given = "abandoned" in settings.given
        self._sinks = sinks
        self._managers: dict[str, CheckpointManager] = {}
        self._ended = set[str]()
        self._coordinator: Coordinator | None = None
        self._given = root if isinstance(root, Storage) else None
        self._root = None if root is None else root.url if isinstance(root, Storage) else os.fspath(root)

    @property
    def coordinator(self) -> Coordinator:
        """How ranks agree; made on first use, anew after `close`."""
        if self._coordinator is None:
            self._coordinator = coordinator_for_job(deadline_seconds=self._options.deadline_seconds)
        return self._coordinator

    def automatic(self) -> CheckpointManager | None:
        """The manager of the root for automatic names, if there is one."""
        root = automatic_root(self._accelerator, self._root)
        return None if root is None else self.at(root)

    def only(self) -> CheckpointManager:
        """The manager for automatic names, or of the only root in use.

        Raises:
            ConfigError: there is neither.
        """
        manager = self.automatic()
        if manager is None and len(self._managers) == 1:
            (manager,) = self._managers.values()
        if manager is None:
            raise ConfigError(f"there is no single root of checkpoints: {_NO_ROOT}")
        return manager

    def at(self, root: str) -> CheckpointManager:
        """The manager of a root, made on first use."""
        key = root if "://" in root else str(Path(root).expanduser().absolute())
        if key not in self._managers:
            given = self._given if root == self._root else None
            self._managers[key] = CheckpointManager(
                root if given is None else given,
                options=self._options_for(root),
                coordinator=self.coordinator,
                sinks=self._sinks,
                listen=self._listen,
            )
            if key in self._ended or self._is_users(root):
                self._managers[key].start_afresh()
        return self._managers[key]

    def place(self, output_dir: str | os.PathLike[str] | None) -> Place:
        """Where a save goes that was given `output_dir`; as in stock, automatic naming overrides it.

        Raises:
            ConfigError: it was given none, and there is no automatic name.
        """
        automatic = self._accelerator.project_configuration.automatic_checkpoint_naming
        root = automatic_root(self._accelerator, self._root)
        if root is not None and (automatic or output_dir is None):
            return Place(root=root, name=automatic_name(self._accelerator.save_iteration))
        if output_dir is None:
            raise ConfigError(f"there is no directory to save to: {_NO_ROOT}")
        return Place.of(output_dir)

    def continue_numbering(self) -> None:
        """Let the next automatic name follow what is on storage; stock starts at 0 after every restart."""
        manager = self.automatic()
        if manager is not None:
            number = self.coordinator.run_on_coordinator(lambda: next_number(manager.storage))
            self._accelerator.project_configuration.iteration = number

    def wait(self) -> None:
        """Wait for every save in flight; raises what failed."""
        for manager in self._managers.values():
            manager.wait()

    @property
    def preempted(self) -> bool:
        """Whether training is to stop for a preemption, as of the last look for one."""
        return any(manager.preempted for manager in self._managers.values())

    def check_preemption(self) -> bool:
        """Look for a preemption, and return `preempted`; collective."""
        for manager in self._managers.values():
            manager.due()
        return self.preempted

    def begin_anew(self) -> None:
        """Close every manager, whatever the others do; the next use of a root begins a run of its own."""
        managers, self._managers = self._managers, {}
        self._ended.update(managers)
        with ExitStack() as closing:
            for manager in managers.values():
                closing.callback(manager.close)

    def close(self) -> None:
        """Close every manager and the coordinator; harmless when repeated."""
        with ExitStack() as closing:
            if self._coordinator is not None:
                closing.callback(self._coordinator.close)
                self._coordinator = None
            self.begin_anew()

    def _is_users(self, root: str) -> bool:
        """Whether nothing but the names that a script gives says which checkpoints belong together."""
        return self._options.keep is None and root != automatic_root(self._accelerator, self._root)

    def _options_for(self, root: str) -> CheckpointOptions:
        limit = self._accelerator.project_configuration.total_limit
        # As in stock, `total_limit` is about automatic names, of whatever run they are; what a user named is
        # only removed on `keep`.
        if self._options.keep is not None or limit is None:
            return self._options
        if root != automatic_root(self._accelerator, self._root):
            return self._options
        abandoned = self._options.abandoned if self._abandoned_given else "prune"
        return replace(self._options, keep=KeepLatest(limit), abandoned=abandoned)
