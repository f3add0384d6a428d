"""One of the roots that hold the checkpoints of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_core.commit import Catalog, Survey, file_as_root
from ckpt_core.options import CheckpointOptions
from ckpt_core.storage import LayeredStorage, Storage, open_storage
from ckpt_core.types import CheckpointInfo

if TYPE_CHECKING:  # the command line runs without torch
    from ckpt_core.coordination import Coordinator


class Tier:
    """One of the roots that hold the checkpoints of a run.

    Subclasses are for roots that are not the same for all ranks, such as disks of one node each.

    Attributes:
        label: for messages: a path, or a URL without secrets.
        storage: the root, as this process sees it.
        shared: whether every process of the job sees the same files.
    """

    shared = True

    def __init__(self, label: str, storage: Storage) -> None:
        self.label = label
        self.storage = storage

    def survey(self) -> Survey:
        """List the root as this process sees it. Not collective.

        Raises:
            ConfigError: it is a file.
            OSError: storage failed.
        """
        try:
            return Catalog(self.storage).survey()
        except NotADirectoryError:
            raise file_as_root(self.storage.url) from None

    def survey_for_all(self, coordinator: Coordinator) -> Survey:
        """List the root, equal on every rank. Collective; errors as by `survey`."""
        return coordinator.run_on_coordinator(self.survey, what="looking for checkpoints")

    def reading(self, info: CheckpointInfo, coordinator: Coordinator) -> Storage:
        """Return the storage from which this rank reads a checkpoint. Collective."""
        del info, coordinator
        return self.storage


def read_through(nearest: Storage, options: CheckpointOptions) -> Storage:
    """Return the nearest storage, or one that reads through it into further tiers.

    For looking at a run before it has a manager. The same name is the same checkpoint here.
    """
    storages = [tier.storage for tier in open_tiers(nearest, options)]
    return nearest if len(storages) == 1 else LayeredStorage(*storages)


def open_tiers(nearest: Storage, options: CheckpointOptions) -> tuple[Tier, ...]:
    """Open the tiers of a run: its root, then those of the option `upload`.

    Raises:
        ConfigError: one cannot be opened, or its extra is not installed.
    """
    found = [Tier(nearest.url, nearest)]
    for each in options.uploads:
        to: Any = each.to  # a Storage has a `url`, and `open_storage` refuses what is none
        storage = open_storage(to, each.storage_options, deadline_seconds=options.deadline_seconds)
        found.append(Tier(each.url, storage))
    return tuple(found)
