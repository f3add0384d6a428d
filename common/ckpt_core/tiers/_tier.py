"""One of the roots that hold the checkpoints of a run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from ckpt_core.commit import Catalog, Survey, file_as_root
from ckpt_core.options import CheckpointOptions, Upload
from ckpt_core.storage import LayeredStorage, Storage, open_storage
from ckpt_core.tiers._asking import Asked, ask
from ckpt_core.types import CheckpointInfo

if TYPE_CHECKING:  # the command line runs without torch
    from ckpt_core.coordination import Coordinator

_PATIENCE_SECONDS: Final = 60.0
"""The longest wait for a listing of a further tier, unless its options allow a request more."""


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


@final
class FurtherTier(Tier):
    """A tier behind the root, which may be down: a listing of it never hangs.

    Attributes:
        patience_seconds: the longest wait for a listing.
    """

    def __init__(self, label: str, storage: Storage, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        super().__init__(label, storage)
        self.patience_seconds = patience_seconds
        self._listed: Asked[Survey] | None = None

    @override
    def survey(self) -> Survey:
        """List the tier.

        The first reader gets the listing that was made when the tier was claimed.

        Raises:
            ConfigError: it is a file.
            OSError: storage failed, or has not answered in time.
        """
        listed, self._listed = self._listed, None
        if listed is None or time.monotonic() - listed.at > 2 * self.patience_seconds:
            listed = ask(super().survey)
        return listed.result(self.label, self.patience_seconds)

    def note(self, listed: Asked[Survey] | None) -> None:
        """Note a listing that has just begun; None if the tier may change from now on."""
        self._listed = listed


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
    return (Tier(nearest.url, nearest), *(_further(each, options) for each in options.uploads))


def _further(upload: Upload, options: CheckpointOptions) -> FurtherTier:
    to: Any = upload.to  # a Storage has a `url`, and `open_storage` refuses what is none
    storage = open_storage(to, upload.storage_options, deadline_seconds=options.deadline_seconds)
    patience = min(_PATIENCE_SECONDS, options.deadline_seconds / 3)
    given = upload.storage_options.get("request_seconds")
    return FurtherTier(upload.url, storage, float(given) if given else patience)
