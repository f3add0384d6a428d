"""Weights in the place of whole checkpoints, for the owner of a root.

A draft is written beside the training, and counts for nothing. The owner commits it under the name of the
checkpoint and `.weights`; only then does a prune remove the whole one. What a kill leaves is a torn draft, or
both, of which the next prune removes the whole one.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple, Self, final

from ckpt_core.commit import (
    Manifest,
    abandon,
    commit_copy,
    note_measured,
    read_notes,
    working_name,
    write_signature,
)
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, ConfigError, SaveError, failure_text
from ckpt_core.names import MARKER, SIGNATURE, WEIGHTS_SUFFIX, run_name
from ckpt_core.options import SignManifest
from ckpt_core.storage import Storage
from ckpt_core.types import CheckpointInfo

_logger = logger_of(__name__)
_MOST_TRIES: Final = 3
_LOOK_SECONDS: Final = 0.2
_END_SECONDS: Final = 2.0


class WeightsDraft(NamedTuple):
    """Where the weights of a checkpoint go: the same for the same, in every tier."""

    name: str
    save_id: str
    working: str

    @classmethod
    def of(cls, storage: Storage, info: CheckpointInfo, dtype: str | None) -> Self:
        """Return where, which is another name if an earlier lineage's have its own."""
        save_id = hashlib.sha256(f"{info.save_id} {dtype}".encode()).hexdigest()[:24]
        name = info.name + WEIGHTS_SUFFIX
        if storage.exists(f"{name}/{MARKER}"):
            name = run_name(info.name, info.lineage.id) + WEIGHTS_SUFFIX
        return cls(name, save_id, working_name(storage, name, save_id))


@final
class Demoter:
    """Makes weights of checkpoints, one at a time.

    Concurrency: the thread that prunes, but for `close`; drafts are written on a thread of their own.

    Args:
        storage: the root.
        draft: writes a draft, and calls its last argument again and again, which raises to leave it.
        size: returns how many bytes the weights will have.
        close: ends what writes drafts, also in the middle of one.
        sign: as `CheckpointOptions.sign_manifest`.
    """

    def __init__(
        self,
        storage: Storage,
        *,
        draft: Callable[[CheckpointInfo, str | None, Callable[[], None]], None],
        size: Callable[[CheckpointInfo, str | None], int],
        close: Callable[[], None],
        sign: SignManifest | None = None,
    ) -> None:
        self._storage, self._write, self._size, self._sign = storage, draft, size, sign
        self._close = close
        self._tries, self._sizes = Counter[str](), dict[tuple[str, str | None], int]()
        self._running: tuple[CheckpointInfo, WeightsDraft, threading.Thread] | None = None
        self._error: CheckpointError | OSError | None = None
        self._left = threading.Event()

    def weights_bytes(self, info: CheckpointInfo, dtype: str | None) -> int:
        """Return what a checkpoint will take, as far as is known; see `plan_prune`."""
        key = info.save_id, dtype
        if key not in self._sizes and self._tries[info.save_id] < _MOST_TRIES:
            with suppress(CheckpointError, OSError):
                self._sizes[key] = info.size_bytes if self.refusal(info) else self._size(info, dtype)
        given_up = self._tries[info.save_id] >= _MOST_TRIES
        return info.size_bytes if given_up else self._sizes.get(key, info.size_bytes)

    def refusal(self, info: CheckpointInfo) -> str | None:
        """Say why a checkpoint stays whole here, whatever the rules say; None if it need not."""
        if self._storage.num_disks > 1:
            return "is on disks of several nodes, where nothing is demoted: give the rule to an Upload"
        if self._sign is None and self._storage.exists(f"{info.name}/{SIGNATURE}"):
            return "is signed, and its weights would not be: demote it in a run, with sign_manifest="
        return None

    def begin(self, wanted: Sequence[tuple[CheckpointInfo, str | None]]) -> bool:
        """Begin a draft of the first that has not failed; return whether one is under way."""
        todo = [each for each in wanted if self._tries[each[0].save_id] < _MOST_TRIES]
        if todo and self._storage.num_disks > 1:
            self._tries.update({info.save_id: _MOST_TRIES for info, _ in wanted})
            _logger.warning("%s %s", self._storage.url, self.refusal(todo[0][0]))
            return False
        if self._running is None and todo and not self._left.is_set():
            info, dtype = todo[0]
            draft = WeightsDraft.of(self._storage, info, dtype)
            # A daemon: the process must be able to end while storage hangs.
            thread = threading.Thread(
                target=self._run, args=(info, dtype, draft), name="ckpt-demote", daemon=True
            )
            self._running = info, draft, thread
            thread.start()
        return self._running is not None

    @property
    def is_busy(self) -> bool:
        """Whether a draft is being written."""
        return self._running is not None and self._running[2].is_alive()

    def wait(self) -> None:
        """Wait a moment for the draft under way."""
        if self._running is not None:
            self._running[2].join(_LOOK_SECONDS)

    def take(
        self, check: Callable[[], None], note: Callable[[CheckpointInfo], None] = lambda _: None
    ) -> CheckpointError | OSError | None:
        """Commit the draft if it is finished, and `note` what was committed.

        Returns:
            Why it could not be; it is logged, and harms nothing.

        Raises:
            CheckpointError: from `check`: another job has taken the root.
        """
        if self._running is None or self._running[2].is_alive():
            return None
        check()
        (info, draft, _), self._running = self._running, None
        error, self._error = self._error, None
        storage = self._storage
        try:
            if error is not None:
                raise error
            manifest = Manifest.read(storage, draft.working)
            note_measured(storage, draft.save_id, read_notes(storage).measured(info.save_id))
            if self._sign is not None:
                write_signature(storage, draft.working, manifest, partial(self._sign, draft.name))
            note(commit_copy(storage, draft.working, draft.name, manifest, check=check))
        except (CheckpointError, OSError) as failure:
            self._tries[info.save_id] += _MOST_TRIES if isinstance(failure, ConfigError) else 1
            if not (isinstance(failure, SaveError) and failure.in_doubt):
                abandon(storage, draft.working)
            _logger.warning(
                "%s/%s stays whole for now, because its weights could not be written: %s",
                storage.url,
                info.name,
                failure_text(failure),
            )
            return failure
        _logger.info("%s/%s has its weights in %s", storage.url, info.name, draft.name)
        return None

    def close(self) -> None:
        """Leave the draft under way; what it has written is removed by the next job."""
        self._left.set()
        self._close()
        if self._running is not None:
            self._running[2].join(_END_SECONDS)

    def _run(self, info: CheckpointInfo, dtype: str | None, draft: WeightsDraft) -> None:
        try:
            if (refusal := self.refusal(info)) is not None:
                raise ConfigError(f"it {refusal}")
            abandon(self._storage, draft.working)  # of an attempt that was killed
            self._write(info, dtype, self._raise_if_left)
        except (CheckpointError, OSError) as error:
            self._error = error

    def _raise_if_left(self) -> None:
        if self._left.is_set():
            raise CheckpointError("it was left")
