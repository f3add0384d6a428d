"""Keys of a torch.distributed Store, asked for politely and with a word about it when it is gone."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar, final

from ckpt_core.coordination._line import Line
from ckpt_core.coordination._signer import Signer
from ckpt_core.errors import CoordinationError

T = TypeVar("T")

_SHORTEST_PAUSE = 0.0005
_LONGEST_PAUSE = 0.25
_PAUSE_GROWTH = 1.25
_ANSWER_SECONDS = 5.0
"""What even a sound store may take on a busy machine: less of silence is no reason to call it dead."""


class MessageStore(Protocol):
    """What we use of a torch.distributed Store (whose own stubs leave half of it out)."""

    def set(self, key: str, value: bytes, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def multi_get(self, keys: list[str], /) -> list[bytes]: ...

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...

    def delete_key(self, key: str, /) -> bool: ...


@final
class Mailbox:
    """A store, for one rank and one thread at a time.

    Every method raises `CoordinationError` when the store is gone, or holds what no rank of this job has
    written, and `DeadlineError` when it has not answered within `patience_seconds`.
    """

    def __init__(self, store: MessageStore, rank: int, patience_seconds: float, signer: Signer) -> None:
        self._store = store
        self._rank = rank
        self._patience_seconds = patience_seconds
        self._signer = signer
        self._line = Line()

    def put(self, key: str, message: bytes) -> None:
        """Leave a message."""
        signed = self._signer.sign(key, self._rank, message)
        self._ask(lambda: self._store.set(key, signed))

    def take(self, key: str, sender: int) -> bytes:
        """The message of that rank, which is there; it stays."""
        return self._signer.verify(key, sender, self._ask(lambda: self._store.get(key)))

    def take_all(self, senders: Mapping[str, int]) -> list[bytes]:
        """Messages that are there, in one request.

        Args:
            senders: key -> the rank that has left the message.
        """
        found = self._ask(lambda: self._store.multi_get(list(senders))) if senders else []
        return [
            self._signer.verify(key, sender, message)
            for (key, sender), message in zip(senders.items(), found, strict=True)
        ]

    def has(self, keys: Sequence[str]) -> bool:
        """Whether all of these messages are there, in one request."""
        return self._ask(lambda: self._store.check(list(keys)))

    def claim(self, key: str, word: str) -> str:
        """Leave a word that stands for good, unless one stands there already; the word that stands."""
        own = self._signer.sign_word(key, self._rank, word)
        return self._signer.verify_word(key, self._ask(lambda: self._store.compare_set(key, "", own)))

    def wait(self, keys: Sequence[str], deadline: float) -> bool:
        """Whether all of these messages are there before `deadline`, on the monotonic clock."""
        # Asked again and again: a store that waits for us writes a line to stderr whenever its time is up.
        # The longer it takes, the less a moment more matters.
        pause = _SHORTEST_PAUSE
        while not self._ask(lambda: self._store.check(list(keys)), deadline):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(pause * _PAUSE_GROWTH, _LONGEST_PAUSE)
        return True

    def delete(self, keys: Sequence[str]) -> None:
        """Take messages away."""
        for key in keys:
            self._ask(partial(self._store.delete_key, key))

    def _ask(self, question: Callable[[], T], deadline: float | None = None) -> T:
        now, patience = time.monotonic(), self._patience_seconds
        # Time for the answer, even if the deadline has nearly passed: then it is the ranks who are late.
        latest = now + patience if deadline is None else max(deadline, now + min(_ANSWER_SECONDS, patience))
        try:
            return self._line.ask(question, latest)
        except RuntimeError as error:
            raise CoordinationError(
                f"the job's store is gone: {error}. "
                "The process that serves it (rank 0 or the launcher) has died, or its file was removed"
            ) from error
