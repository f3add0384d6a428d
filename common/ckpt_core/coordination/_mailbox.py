"""Keys of a torch.distributed Store, asked for politely and with a word about it when it is gone."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Protocol, final

import torch.distributed as dist

from ckpt_core.errors import CoordinationError

_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.25
_PAUSE_GROWTH = 1.25


class MessageStore(Protocol):
    """What we use of a torch.distributed Store (whose own stubs leave half of it out)."""

    def set(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def delete_key(self, key: str, /) -> bool: ...


@final
class Mailbox:
    """A store, for one thread at a time; every method raises `CoordinationError` when the store is gone."""

    def __init__(self, store: MessageStore) -> None:
        self._store = store

    def put(self, key: str, message: bytes) -> None:
        """Leave a message."""
        with _told_if_gone():
            self._store.set(key, message)

    def take(self, key: str) -> bytes:
        """A message that is there; it stays."""
        with _told_if_gone():
            return self._store.get(key)

    def take_all(self, keys: Sequence[str]) -> list[bytes]:
        """Messages that are there, in one request."""
        if not keys:
            return []
        with _told_if_gone():
            return self._store.multi_get(list(keys))

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these messages are there, in one request."""
        with _told_if_gone():
            return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], deadline: float) -> bool:
        """Whether all of these messages are there before `deadline`, on the monotonic clock."""
        # Asked again and again: a store that waits for us cannot be interrupted by Ctrl-C, and writes a line
        # to stderr whenever its time is up. The longer it takes, the less a moment more matters.
        pause = _SHORTEST_PAUSE
        while not self.has(keys):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE)
        return True

    def _set(self, key: str, value: bytes) -> None:
        with _told_if_gone():
            self._store.set(key, value)

    def _get(self, key: str) -> bytes:
        with _told_if_gone():
            return self._store.get(key)

    def _has(self, keys: list[str]) -> bool:
        with _told_if_gone():
            return self._store.check(keys)

    def delete(self, keys: Sequence[str]) -> None:
        """Take messages away."""
        with _told_if_gone():
            for key in keys:
                self._store.delete_key(key)


@contextmanager
def _told_if_gone() -> Generator[None]:
    """Turn the loss of the store into an error for people; a time-out of `wait` passes."""
    try:
        yield
    except dist.DistStoreError:
        raise
    except RuntimeError as error:
        raise CoordinationError(
            f"the job's store is gone: {error}. "
            "The process that serves it (rank 0 or the launcher) has probably died"
        ) from error
