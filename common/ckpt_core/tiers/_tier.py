"""One of the roots that hold the checkpoints of a run, which may not answer."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from itertools import combinations
from typing import TYPE_CHECKING, Any, Final, final

from typing_extensions import override

from ckpt_core.commit import Catalog, Survey, file_as_root
from ckpt_core.disclosure import logger_of, public_url
from ckpt_core.errors import ConfigError
from ckpt_core.options import CheckpointOptions
from ckpt_core.storage import LayeredStorage, LocalStorage, ObjectStorage, Storage, open_storage
from ckpt_core.types import CheckpointInfo

if TYPE_CHECKING:  # the command line runs without torch
    from ckpt_core.coordination import Coordinator

_logger = logger_of(__name__)

_SAID_AFTER: Final = 5.0
_PATIENCE_SECONDS: Final = 60.0
"""The longest wait for a listing of a further tier, unless its options allow a request more."""
_ALIASES: Final = {"s3a": "s3", "gcs": "gs", "abfs": "az"}


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
    """A tier behind the root, which may be down.

    It is asked on a thread, so that a listing never hangs.

    Attributes:
        patience_seconds: the longest wait for a listing.
    """

    def __init__(self, label: str, storage: Storage, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        super().__init__(label, storage)
        self.patience_seconds = patience_seconds
        self._answer: Future[Survey] | None = None
        self._asked_at = 0.0

    @override
    def survey(self) -> Survey:
        """List the tier; the first reader gets the listing of its claim.

        Raises:
            ConfigError: it is a file.
            OSError: storage failed, or has not answered in time.
        """
        answer, self._answer = self._answer, None
        if answer is None or time.monotonic() - self._asked_at > 2 * self.patience_seconds:
            answer = self._put(super().survey)
        return self.wait_for(answer)

    def ask(self, question: Callable[[], Survey]) -> Future[Survey]:
        """List the tier by a question; the next `survey` takes that answer, too."""
        self._answer = self._put(question)
        return self._answer

    def forget(self) -> None:
        """Forget what was heard: the tier may change from now on."""
        self._answer = None

    def wait_for(self, answer: Future[Survey]) -> Survey:
        """Return the answer to the last question; say after a while what is waited for.

        Raises:
            TimeoutError: there is none.
            Exception: what the question raised.
        """
        limit = self.patience_seconds
        soon = min(_SAID_AFTER, limit)
        wait([answer], self._left(soon))
        if not answer.done() and self._left(limit):
            _logger.warning(
                "%s has not answered for %g s. It may hold the newest checkpoint, so it is waited for, "
                "%g s in all. To go on without it, stop, and load a checkpoint of another tier by its step "
                "or path",
                self.label,
                soon,
                limit,
            )
            wait([answer], self._left(limit))
        if not answer.done():
            raise TimeoutError(errno.ETIMEDOUT, f"no answer to a listing within {limit:g} s", self.label)
        return answer.result()

    def _left(self, seconds: float) -> float:
        return max(0.0, self._asked_at + seconds - time.monotonic())

    def _put(self, question: Callable[[], Survey]) -> Future[Survey]:
        """Put a question on a thread of its own."""
        answer: Future[Survey] = Future()
        self._asked_at = time.monotonic()

        def run() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:  # noqa: BLE001 - raised on the thread that awaits the answer
                answer.set_exception(error)

        # A daemon: the process must be able to end while storage hangs.
        thread = threading.Thread(target=run, name="ckpt-tier", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is ending
            run()
        return answer


def read_through(nearest: Storage, options: CheckpointOptions) -> Storage:
    """Return the nearest storage, or one that reads through it into further tiers.

    For looking at a run before it has a manager. The same name is the same checkpoint here.
    """
    storages = [tier.storage for tier in open_tiers(nearest, options)]
    return nearest if len(storages) == 1 else LayeredStorage(*storages)


def open_tiers(nearest: Storage, options: CheckpointOptions) -> tuple[Tier, ...]:
    """Open the tiers of a run: its root, then those of the option `upload`.

    Raises:
        ConfigError: one cannot be opened, its extra is not installed, or two of them are one place.
    """
    tiers = [Tier(nearest.url, nearest)]
    places = [(nearest, _parts(nearest.own, options.storage_options))]
    for upload in options.uploads:
        to: Any = upload.to  # a Storage has a `url`, and `open_storage` refuses what is none
        storage = open_storage(to, upload.storage_options, deadline_seconds=options.deadline_seconds)
        patience = min(_PATIENCE_SECONDS, options.deadline_seconds / 3)
        given = upload.storage_options.get("request_seconds")
        tiers.append(FurtherTier(upload.url, storage, float(given) if given else patience))
        places.append((storage, _parts(storage.own, upload.storage_options)))
    for (one, parts), (other, others) in combinations(places, 2):
        shorter = min(len(parts), len(others))
        if parts[:shorter] == others[:shorter]:
            raise ConfigError(
                f"upload: {public_url(other.url)} and {public_url(one.url)} are the same place, or one is in "
                "the other; a further tier needs a place of its own"
            )
    return tuple(tiers)


def _parts(storage: Storage, options: Mapping[str, Any]) -> list[object]:
    """Return the parts of a place, which begin with those of any place that it is in."""
    if isinstance(storage, LocalStorage):
        return ["local", *os.path.realpath(storage.url).rstrip("/").split("/")]
    if not isinstance(storage, ObjectStorage):
        return [id(storage)]
    client = options.get("client_kwargs")
    inner = client.get("endpoint_url") if isinstance(client, Mapping) else None
    endpoint = options.get("endpoint_url") or options.get("endpoint") or inner
    scheme, _, rest = storage.url.partition("://")
    return ["bucket", endpoint, _ALIASES.get(scheme, scheme), *rest.rstrip("/").split("/")]
