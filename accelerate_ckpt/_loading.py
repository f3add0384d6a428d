"""The choice of what `load_state` loads: ours, stock Accelerate's, or nothing yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, final

from accelerate import Accelerator

from accelerate_ckpt._progress import Progress, steps_made
from accelerate_ckpt._roots import Roots, newest_stock, torn_in
from accelerate_ckpt._small_files import Pickles, load_by_stock, read_small
from accelerate_ckpt._state import AcceleratorState, model_part
from ckpt_core import (
    CheckpointManager,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
)
from ckpt_core.collective import collective_phase
from ckpt_core.commit import require_trusted
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import ALLOW_PICKLE
from ckpt_core.groups import local_part
from ckpt_core.hosting import CheckpointPath, Kind, kind_of
from ckpt_core.names import MARKER, METADATA
from ckpt_core.storage import Storage

_logger = logger_of(__name__)


@final
class Loading:
    """Loads into one accelerator. Main thread only, collective."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        roots: Roots,
        stock: SimpleNamespace,
        progress: Progress,
        pickles: Pickles,
        state: Callable[[CheckpointManager], AcceleratorState],
    ) -> None:
        self._accelerator = accelerator
        self._roots = roots
        self._stock = stock
        self._progress = progress
        self._pickles = pickles
        self._state = state
        self._changed: CheckpointManager | None = None

    def require_change(self, manager: CheckpointManager) -> None:
        """Refuse a save that would not say which hyperparameters were changed.

        Raises:
            ConfigError: `override` is given, and nothing was loaded from this root.
        """
        if self._roots.override and manager is not self._changed:
            raise ConfigError(
                f"override= changes a training midway, and nothing was loaded from {manager.storage.url}: "
                "call load_state() before the first save, and save to the directory that it loads from; or "
                "begin with these values in the script and without override="
            )

    def newest(self, arguments: Mapping[str, Any]) -> bool:
        """Load the newest checkpoint that verifies; log and return False if there is none."""
        manager = self._roots.only()
        self._refuse_to_unpickle(arguments)
        manager.fetcher.fetch()
        state = self._state(manager)
        if arguments.get("strict", True) is True:
            found = manager.resume(state, override=self._roots.override.values) is not None
        else:
            found = self._roots.managers.once(lambda: bool(manager.checkpoints(abandoned=True)))
            if found:
                manager.load(state, strict=arguments["strict"], override=self._roots.override.values)
        if found:
            self._loaded_by(manager)
            self._tell(manager, state.restored)
            return True
        name = self._roots.managers.once(lambda: newest_stock(manager.storage))
        if name is not None:
            self._load_stock(manager, name, arguments)
            self._tell(manager, name)
            return True
        torn = self._roots.managers.once(lambda: torn_in(manager.storage))
        _logger.log(
            logging.WARNING if torn else logging.INFO,
            "nothing has been committed to %s yet%s: training starts afresh",
            manager.storage.url,
            f" ({', '.join(torn)}: interrupted saves, look at them with `ckpt ls`)" if torn else "",
        )
        return False

    def place(self, place: CheckpointPath, arguments: Mapping[str, Any]) -> None:
        """Load the checkpoint of that name.

        Raises:
            CheckpointNotFoundError: there is none.
            ConfigError: what was named is a file, or holds checkpoints but is none.
            CorruptCheckpointError: it was never committed, or is damaged; nothing was touched.
        """
        manager = self._roots.managers.at(place.root)
        self._refuse_to_unpickle(arguments)
        manager.fetcher.fetch(name=place.name)
        where = f"{manager.storage.url}/{place.name}"
        kind, problem = self._roots.managers.once(lambda: _looked_at(manager.storage, place.name))
        if problem:
            raise ConfigError(f"{where} is no checkpoint: {problem}")
        if kind is Kind.NOTHING:
            raise CheckpointNotFoundError(f"there is no checkpoint at {where}")
        if kind is Kind.TORN:
            raise CorruptCheckpointError(
                f"{where} was never committed: its save was interrupted, and nothing was loaded. Load "
                "another one, or call load_state() without a directory to get the newest that is whole"
            )
        if kind is Kind.STOCK:
            self._load_stock(manager, place.name, arguments)
        else:
            self._load(manager, place.name, arguments)
        self._tell(manager, place.name)

    def _load(self, manager: CheckpointManager, name: str, arguments: Mapping[str, Any]) -> None:
        strict, state = arguments.get("strict", True), self._state(manager)
        manager.load(state, name=name, strict=strict, override=self._roots.override.values)
        self._loaded_by(manager)

    def _loaded_by(self, manager: CheckpointManager) -> None:
        self._changed = manager
        self._roots.managers.loaded(manager)

    def _tell(self, manager: CheckpointManager, name: str) -> None:
        if self._accelerator.is_main_process:
            tell_restored(self._progress.steps.step, manager.storage.url, name)

    def _load_stock(self, manager: CheckpointManager, name: str, arguments: Mapping[str, Any]) -> None:
        """Load what stock wrote; shards by the core: stock loses FSDP1's optimizer."""
        storage, accelerator = manager.storage, self._accelerator
        _logger.info("%s/%s was written by stock Accelerate", storage.url, name)
        verify = manager.options.manifest_verifier
        self._roots.managers.once(lambda: require_trusted(storage, name, verify))
        if storage.exists(f"{name}/{model_part(0)}/{METADATA}"):
            self._load(manager, name, arguments)
        elif self._roots.override:
            raise ConfigError(
                f"override= changes checkpoints of ours, and stock Accelerate wrote {storage.url}/{name}: "
                "load it without, and save once"
            )
        elif (local := local_part(storage)) is None:
            raise ConfigError(
                f"{storage.url}/{name}: stock Accelerate reads what it wrote from local directories"
            )
        else:
            untouched = f"{storage.url}/{name} could not be read, and nothing was loaded"
            with collective_phase(self._roots.managers.coordinator, untouched, what="reading small files"):
                small = read_small(accelerator, storage, name, self._pickles, committed=False)
            load_by_stock(
                accelerator,
                self._stock,
                local.local_path(name),
                small=small,
                pickles=self._pickles,
                arguments=arguments,
            )
        self._progress.steps.restore(steps_made(self._accelerator._optimizers))

    def _refuse_to_unpickle(self, arguments: Mapping[str, Any]) -> None:
        asked = (arguments.get("load_kwargs") or {}).get("weights_only", True)
        if not asked and not self._pickles.allowed:
            raise UnsafeCheckpointError(
                'load_kwargs={"weights_only": False} lets a checkpoint run any code, and nothing was loaded. '
                f"If you trust who wrote it, give {ALLOW_PICKLE}"
            )


def tell_restored(step: int, root: str, name: str) -> None:
    """Say what a run goes on from, where a script without a logging setup shows it."""
    _logger.warning("Restored step %d of %s (checkpoint %s)", step, root, name)


def _looked_at(storage: Storage, name: str) -> tuple[Kind, str]:
    """Return the kind of what was named, and why it cannot be meant, if so."""
    try:
        kind = kind_of(storage, name)
    except NotADirectoryError:
        return Kind.NOTHING, "it is a file; give load_state the directory that it is in"
    # Stock Accelerate, too, writes the random states of every rank directly into a checkpoint.
    if kind in {Kind.COMMITTED, Kind.TORN} or storage.exists(f"{name}/random_states_0.pkl"):
        return kind, ""
    inside = [entry.name for entry in storage.list(name) if storage.exists(f"{name}/{entry.name}/{MARKER}")]
    if not inside:
        return kind, ""
    return kind, f"it holds {len(inside)}; load one of them, such as {storage.url}/{name}/{inside[-1]}"
