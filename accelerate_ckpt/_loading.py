"""Which checkpoint `load_state` loads: ours, one of stock Accelerate, or none yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, final

from accelerate import Accelerator

from accelerate_ckpt._places import Place, kind_of, newest_stock, torn_in
from accelerate_ckpt._progress import Progress
from accelerate_ckpt._roots import Roots
from accelerate_ckpt._small import load_by_stock, read_small
from accelerate_ckpt._small_files import Pickles
from accelerate_ckpt._state import AcceleratorState, model_part
from accelerate_ckpt._steps import steps_made
from accelerate_ckpt._stock import StockMethods
from ckpt_core import (
    CheckpointManager,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UnsafeCheckpointError,
)
from ckpt_core.commit import require_trusted
from ckpt_core.disclosure import logger_of
from ckpt_core.lifecycle import everywhere
from ckpt_core.names import MARKER, METADATA
from ckpt_core.storage import LocalStorage, Storage

_logger = logger_of(__name__)


@final
class Loading:
    """Loads into one accelerator. Main thread only, collective.

    Args:
        accelerator: what to load into.
        roots: where checkpoints are.
        stock: the accelerator's own methods.
        progress: of the accelerator.
        pickles: reads small files.
        state: makes the state of the accelerator, for a manager.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        roots: Roots,
        stock: StockMethods,
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

    def newest(self, arguments: Mapping[str, Any]) -> bool:
        """Load the newest that verifies; False, and a line in the log, if there is nothing yet."""
        manager = self._roots.only()
        self._refuse_to_unpickle(arguments)
        state = self._state(manager)
        if arguments.get("strict", True) is True:
            found = manager.resume(state) is not None
        else:
            found = self._roots.coordinator.run_on_coordinator(
                lambda: bool(manager.checkpoints(abandoned=True))
            )
            if found:
                manager.load(state, strict=arguments["strict"])
        if found:
            return True
        name = self._roots.coordinator.run_on_coordinator(lambda: newest_stock(manager.storage))
        if name is not None:
            self._load_stock(manager, name, arguments)
            return True
        torn = self._roots.coordinator.run_on_coordinator(lambda: torn_in(manager.storage))
        _logger.log(
            logging.WARNING if torn else logging.INFO,
            "nothing has been committed to %s yet%s: training starts afresh",
            manager.storage.url,
            f" ({', '.join(torn)}: interrupted saves, look at them with `ckpt ls`)" if torn else "",
        )
        return False

    def place(self, place: Place, arguments: Mapping[str, Any]) -> None:
        """Load the checkpoint of that name.

        Raises:
            CheckpointNotFoundError: there is none.
            ConfigError: what was named is a file, or holds checkpoints but is none.
            CorruptCheckpointError: it was never committed, or is damaged; nothing was touched.
        """
        manager = self._roots.at(place.root)
        self._refuse_to_unpickle(arguments)
        where = f"{manager.storage.url}/{place.name}"
        kind, problem = self._roots.coordinator.run_on_coordinator(
            lambda: _looked_at(manager.storage, place.name)
        )
        if problem:
            raise ConfigError(f"{where} is no checkpoint: {problem}")
        if kind == "missing":
            raise CheckpointNotFoundError(f"there is no checkpoint at {where}")
        if kind == "torn":
            raise CorruptCheckpointError(
                f"{where} was never committed: its save was interrupted, and nothing was loaded. Load "
                "another one, or call load_state() without a directory to get the newest that is whole"
            )
        if kind == "stock":
            self._load_stock(manager, place.name, arguments)
        else:
            self._load(manager, place.name, arguments)

    def _load(self, manager: CheckpointManager, name: str, arguments: Mapping[str, Any]) -> None:
        manager.load(self._state(manager), name=name, strict=arguments.get("strict", True))

    def _load_stock(self, manager: CheckpointManager, name: str, arguments: Mapping[str, Any]) -> None:
        """Load what stock Accelerate wrote: its shards ourselves, for it loses FSDP1's optimizer state."""
        storage, accelerator = manager.storage, self._accelerator
        _logger.info("%s/%s was written by stock Accelerate", storage.url, name)
        verify = manager.options.manifest_verifier
        self._roots.coordinator.run_on_coordinator(lambda: require_trusted(storage, name, verify))
        if storage.exists(f"{name}/{model_part(0)}/{METADATA}"):
            self._load(manager, name, arguments)
        elif not isinstance(storage, LocalStorage):
            raise ConfigError(
                f"{storage.url}/{name}: stock Accelerate reads what it wrote from local directories"
            )
        else:
            small = everywhere(
                self._roots.coordinator,
                lambda: read_small(accelerator, storage, name, self._pickles, committed=False),
                f"{storage.url}/{name} could not be read, and nothing was loaded",
                what="reading small files",
            )
            load_by_stock(
                accelerator,
                self._stock,
                storage.local_path(name),
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
                "If you trust who wrote it, give enable() allow_pickle=True"
            )


def _looked_at(storage: Storage, name: str) -> tuple[str, str]:
    """The kind of what was named, and why it cannot be meant, if so."""
    try:
        kind = kind_of(storage, name)
    except NotADirectoryError:
        return "missing", "it is a file; give load_state the directory that it is in"
    # Stock Accelerate, too, writes the random states of every rank directly into a checkpoint.
    if kind in {"committed", "torn"} or storage.exists(f"{name}/random_states_0.pkl"):
        return kind, ""
    inside = [entry.name for entry in storage.list(name) if storage.exists(f"{name}/{entry.name}/{MARKER}")]
    if not inside:
        return kind, ""
    return kind, f"it holds {len(inside)}; load one of them, such as {storage.url}/{name}/{inside[-1]}"
