"""One of the roots of a run, which may not answer; and the record of all.

The record, `tiers.json`, is for people and commands, and never decides what counts: that each tier says by
itself. It holds no secrets; credentials are given to a command as for any other URL.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

from typing_extensions import override

from ckpt_core.commit import Catalog, Survey, file_as_root
from ckpt_core.disclosure import logger_of
from ckpt_core.formats import codec
from ckpt_core.names import FORMAT_VERSION, TIERS
from ckpt_core.options import CheckpointOptions
from ckpt_core.storage import LayeredStorage, Storage, open_storage, read_small
from ckpt_core.types import CheckpointInfo

if TYPE_CHECKING:
    from ckpt_core.coordination import Coordinator

_logger = logger_of(__name__)

T = TypeVar("T")


_SAID_AFTER: Final = 5.0
_PATIENCE_SECONDS: Final = 60.0
"""The longest wait for a listing of a further tier, unless its options allow a request more."""


@final
class Asked(Generic[T]):
    """A question that was put to a tier, `at` monotonic seconds."""

    def __init__(self) -> None:
        self.answer: Future[T] = Future()
        self.at = time.monotonic()

    def result(self, label: str, seconds: float) -> T:
        """Return the answer; say after a while what is waited for.

        Raises:
            TimeoutError: there is none `seconds` after it was asked.
            BaseException: what the question raised.
        """
        soon = min(_SAID_AFTER, seconds)
        self._wait(soon)
        if not self.answer.done() and self._left(seconds):
            _logger.warning(
                "%s has not answered for %g s. It may hold the newest checkpoint, so it is waited for, "
                "%g s in all. To go on without it, stop, and load a checkpoint of another tier by its step "
                "or path",
                label,
                soon,
                seconds,
            )
            self._wait(seconds)
        if not self.answer.done():
            raise TimeoutError(errno.ETIMEDOUT, f"no answer to a listing within {seconds:g} s", label)
        return self.answer.result()

    def _left(self, seconds: float) -> float:
        return max(0.0, self.at + seconds - time.monotonic())

    def _wait(self, seconds: float) -> None:
        wait([self.answer], self._left(seconds))


def ask(question: Callable[[], T]) -> Asked[T]:
    """Call a function on a thread of its own."""
    asked = Asked[T]()

    def run() -> None:
        try:
            asked.answer.set_result(question())
        except BaseException as error:  # noqa: BLE001 - raised on the thread that awaits the answer
            asked.answer.set_exception(error)

    # A daemon: the process must be able to end while storage hangs.
    thread = threading.Thread(target=run, name="ckpt-tier", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending
        run()
    return asked


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

    def survey(self, *, noted: bool = True) -> Survey:
        """List the root as this process sees it, with the notes of others. Not collective.

        Raises:
            ConfigError: it is a file.
            OSError: storage failed.
        """
        try:
            return Catalog(self.storage).survey(noted=noted)
        except NotADirectoryError:
            raise file_as_root(self.storage.url) from None

    def survey_for_all(self, coordinator: Coordinator) -> Survey:
        """List the root for a load, equal on every rank. Collective; raises as `survey`."""
        listed = partial(self.survey, noted=False)  # they choose no checkpoint
        return coordinator.run_on_coordinator(listed, what="looking for checkpoints")

    def reading(self, info: CheckpointInfo, coordinator: Coordinator) -> Storage:
        """Return the storage from which this rank reads a checkpoint. Collective."""
        del info, coordinator
        return self.storage


@final
class FurtherTier(Tier):
    """A tier behind the root, which may be down: a listing of it never hangs."""

    def __init__(self, label: str, storage: Storage, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        super().__init__(label, storage)
        self.patience_seconds = patience_seconds
        self._listed: Asked[Survey] | None = None

    @override
    def survey(self, *, noted: bool = True) -> Survey:
        """List the tier.

        The first reader gets the listing that was made when the tier was claimed.
        """
        del noted
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
    tiers: list[Tier] = [Tier(nearest.url, nearest)]
    patience = min(_PATIENCE_SECONDS, options.deadline_seconds / 3)
    for upload in options.uploads:
        to: Any = upload.to  # a Storage has a `url`, and `open_storage` refuses what is none
        storage = open_storage(to, upload.storage_options, deadline_seconds=options.deadline_seconds)
        given = upload.storage_options.get("request_seconds")
        tiers.append(FurtherTier(upload.url, storage, float(given) if given else patience))
    return tuple(tiers)


_MAX_BYTES: Final = 1 << 20


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Uploading:
    """The upload that is running, or was when the job died.

    `done_bytes` has those found at the target.
    """

    name: str
    done_bytes: int
    size_bytes: int


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TierRecord:
    """One tier that a root is uploaded to.

    Attributes:
        url: path or URL, without secrets.
        every: every n-th checkpoint is uploaded.
        due: names of local checkpoints whose upload has not ended, the next one first.
        uploading: the present upload; None if there is none.
    """

    url: str
    every: int = 1
    due: Sequence[str] = ()
    uploading: Uploading | None = None


def write_tiers(storage: Storage, tiers: Sequence[TierRecord]) -> None:
    """Replace `tiers.json` in one step; the caller owns the root."""
    records = [{name: known for name, known in asdict(tier).items() if known is not None} for tier in tiers]
    fields = {"format_version": FORMAT_VERSION, "tiers": records}
    # In ASCII: the name of a directory need not be valid Unicode.
    storage.replace(TIERS, codec.add_checksum(json.dumps(fields, separators=(",", ":")).encode()))


def read_tiers(storage: Storage) -> list[TierRecord]:
    """Read `tiers.json`; none if the root is not uploaded.

    Raises:
        CorruptCheckpointError: it is malformed, or has changed since it was written.
        IncompatibleCheckpointError: it was written by a newer version.
        OSError: it cannot be read.
    """
    try:
        content = read_small(storage, TIERS, _MAX_BYTES)
    except FileNotFoundError:
        return []
    with codec.Fields.parse(content, source=TIERS, summed=True) as fields:
        return [_tier(each) for each in fields.objects("tiers")]


def _tier(fields: codec.Fields) -> TierRecord:
    running = fields.optional("uploading")
    return TierRecord(
        url=fields.get("url", str),
        every=fields.count("every", least=1),
        due=_names(fields.get("due", list)),
        uploading=None if running is None else _uploading(running),
    )


def _names(values: list[Any]) -> tuple[str, ...]:
    if not {str}.issuperset(map(type, values)):
        raise ValueError("'due' should hold only names")
    return tuple(values)


def _uploading(fields: codec.Fields) -> Uploading:
    return Uploading(
        name=fields.get("name", str),
        done_bytes=fields.count("done_bytes"),
        size_bytes=fields.count("size_bytes"),
    )
