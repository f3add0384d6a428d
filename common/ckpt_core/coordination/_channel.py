"""Broadcast, gather and commit over a torch.distributed Store."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple, cast, final

from typing_extensions import override

from ckpt_core import messages
from ckpt_core.coordination._base import CommitChannel, R, T
from ckpt_core.coordination._talks import StoreThread
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError, Failure

_logger = logger_of(__name__)

_GRACE_SECONDS = 5.0  # so that the coordinator's verdict, which names the missing ranks, arrives first
_DECIDING = "deciding"
_DECIDED = "decided"


_VALUE, _BYTES, _FAILURE, _ERROR = b"v", b"b", b"f", b"e"
"""What a message begins with; bytes follow as they are."""


@final
class _Word(NamedTuple):
    """A value, the failure to make one, or an error for all ranks."""

    kind: bytes
    content: object


@final
class Channel(CommitChannel):
    """Exchanges messages with the other ranks; used by one thread at a time.

    Messages are plain values (see `ckpt_core.messages`). The coordinator reads all messages of a call in one
    request, and every rank deletes its own, so that the coordinator's work hardly grows with the number of
    ranks.

    All ranks agree on the outcome of a call, unless it is reported as in doubt: before the coordinator
    decides, and before another rank gives up waiting, it claims one key, where the first claim wins. So a
    coordinator that wakes up after the others gave up decides nothing.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, patience_seconds: float = 1800.0) -> None:
        self._store = StoreThread(store, patience_seconds)
        self.rank = rank
        self._world_size = world_size
        self._stale: list[str] = []

    @override
    def broadcast(self, name: str, make: Callable[[], T], deadline_seconds: float) -> T:
        key = f"{name}/said"
        if self.rank != 0:
            return cast("T", _content(self._await(key, name, deadline_seconds), None))
        self._stale.append(key)

        def answer() -> tuple[Any, dict[str, bytes]]:
            made = make()
            return made, {key: _packed(made)}

        return cast("T", self._decided(name, answer, [key], None))

    def gather_scatter(
        self,
        topic: str,
        value: Any,
        decide: Callable[[list[Any]], list[Any]],
        deadline_seconds: float,
        *,
        prefix: str = "",
        waited_seconds: float = 0.0,
    ) -> Any:
        """Gather values, send answers; see `Coordinator.gather_scatter`.

        The topic is unique, and equal on all ranks; the prefix that of messages of failures, where the time
        already spent on a collective that failed counts, too.
        """
        if self.rank:
            key = f"{topic}/depart/{self.rank}"
            reply, cause = self._follow(topic, value, key, deadline_seconds, waited_seconds=waited_seconds)
            self._forget([f"{topic}/arrive/{self.rank}", key])
            return _content(reply, cause)
        keys = [f"{topic}/depart/{rank}" for rank in range(1, self._world_size)]

        def answer() -> tuple[Any, dict[str, bytes]]:
            answers = decide(self._collect(topic, value, deadline_seconds, waited_seconds, prefix=prefix))
            word = self._claim(f"{topic}/outcome", _DECIDED)
            self._stale.append(f"{topic}/outcome")
            if word != _DECIDED:
                raise _came_late(topic, word)
            # Packed before the first is sent: what cannot be sent must not leave ranks waiting.
            return answers[0], {key: _packed(answers[rank]) for rank, key in enumerate(keys, start=1)}

        return self._decided(topic, answer, keys, value, prefix=prefix)

    @override
    def commit_barrier(
        self, name: str, payload: T | BaseException, commit: Callable[[list[T]], R], deadline_seconds: float
    ) -> R:
        key = f"{name}/depart"
        if self.rank:
            reply, cause = self._follow(name, payload, key, deadline_seconds)
            self._forget([f"{name}/arrive/{self.rank}"])
            return cast("R", _content(reply, cause))

        def answer() -> tuple[Any, dict[str, bytes]]:
            committed = commit(self._collect(name, payload, deadline_seconds))
            return committed, {key: _packed(committed)}

        try:
            return cast("R", self._decided(name, answer, [key], payload, irrevocable=True))
        finally:
            self._stale.append(key)

    @override
    def close(self) -> None:
        self._store.close()

    def _put(self, key: str, message: bytes) -> None:
        self._store.ask(lambda store: store.set(key, message))

    def _claim(self, key: str, word: str) -> str:
        """Store a word if the key is unset; return the stored word."""
        stored: bytes = self._store.ask(lambda store: store.compare_set(key, "", word))
        return stored.decode("utf-8", "replace")

    def _follow(
        self, topic: str, value: Any, reply_key: str, deadline_seconds: float, *, waited_seconds: float = 0.0
    ) -> tuple[_Word, BaseException | None]:
        """Send a value, return the reply and the error that `value` may be.

        Raises:
            CoordinationError: no reply; `in_doubt` if the coordinator may have decided all the same.
        """
        message, cause = _packed_value(value)
        try:
            self._put(f"{topic}/arrive/{self.rank}", message)
            reply = self._await(
                reply_key, topic, deadline_seconds, may_be_deciding=True, waited_seconds=waited_seconds
            )
        except CoordinationError as error:
            # After this rank's error, or its claim that it gave up, the coordinator decides nothing.
            given_up = isinstance(error, DeadlineError) and bool(error.awaited)
            if given_up or cause is not None:
                raise
            raise error.retold(
                f"{topic}: {error}; rank {self.rank} had reported to rank 0 before, so the outcome on "
                "rank 0 is not known here",
                in_doubt=True,
            ) from error
        return reply, cause

    def _decided(
        self,
        topic: str,
        decide: Callable[[], tuple[Any, dict[str, bytes]]],
        reply_keys: Sequence[str],
        value: Any,
        *,
        irrevocable: bool = False,
        prefix: str = "",
    ) -> Any:
        """Decide and send the replies.

        An error is sent to every rank before it is raised. An `irrevocable` decision stands even if the
        replies cannot be sent.
        """
        cause = value if isinstance(value, BaseException) else None
        try:
            answer, replies = decide()
        except CheckpointError as error:
            self._refuse(reply_keys, error)
            raise error from cause or error.__cause__
        except Exception as error:
            found = Failure.of(error)
            refusal = CoordinationError(
                f"{prefix}rank 0: {found.text}", failures={0: found.text}, causes={0: found}
            )
            self._refuse(reply_keys, refusal)
            raise refusal from error
        try:
            for key, reply in replies.items():
                self._put(key, reply)
        except CoordinationError as error:
            if not irrevocable:
                raise
            _logger.warning("%s succeeded, but its reply cannot be sent to other ranks: %s", topic, error)
        return answer

    def _refuse(self, reply_keys: Sequence[str], error: CheckpointError) -> None:
        reply = _packed(error, _ERROR)
        try:
            for key in reply_keys:
                self._put(key, reply)
        except CoordinationError as lost:
            _logger.warning("the failure cannot be reported to the other ranks: %s", lost)

    def _collect(
        self,
        topic: str,
        value: Any,
        deadline_seconds: float,
        waited_seconds: float = 0.0,
        *,
        prefix: str = "",
    ) -> list[Any]:
        deadline = time.monotonic() + deadline_seconds
        causes = {0: Failure.of(value)} if isinstance(value, BaseException) else dict[int, Failure]()
        keys = [f"{topic}/arrive/{rank}" for rank in range(1, self._world_size)]
        if keys and not self._store.wait(keys, deadline):
            missing = [rank for rank, key in enumerate(keys, start=1) if not self._store.has([key])]
            causes |= _failures(self._arrived(keys, missing))
            raise _missing(topic, missing or [len(keys)], waited_seconds + deadline_seconds, causes)
        words = self._arrived(keys, ())
        self._forget()
        self._stale.append(f"{topic}/verdict")
        if causes := causes | _failures(words):
            raise CoordinationError(
                f"{prefix}{_list_failures(causes)}", failures=_texts(causes), causes=causes
            )
        word = self._claim(f"{topic}/verdict", _DECIDING)
        if word != _DECIDING:
            raise _came_late(topic, word)
        return [value, *(each.content for each in words.values())]

    def _arrived(self, keys: Sequence[str], missing: Collection[int]) -> dict[int, _Word]:
        """Return the messages by rank, in order, without the missing ones."""
        there = {key: rank for rank, key in enumerate(keys, start=1) if rank not in missing}
        found = self._store.ask(lambda store: store.multi_get(list(there))) if there else []
        return {rank: _read(key, message) for (key, rank), message in zip(there.items(), found, strict=True)}

    def _await(
        self,
        key: str,
        topic: str,
        deadline_seconds: float,
        *,
        may_be_deciding: bool = False,
        waited_seconds: float = 0.0,
    ) -> _Word:
        """Return the coordinator's message.

        Waits twice as long if the coordinator is known to be deciding.
        """
        grace = min(_GRACE_SECONDS, deadline_seconds)
        if self._store.wait([key], time.monotonic() + deadline_seconds + grace):
            return _read(key, self._store.ask(lambda store: store.get(key)))
        if not may_be_deciding or self._claim(f"{topic}/verdict", f"rank {self.rank}") != _DECIDING:
            raise _missing(topic, [0], waited_seconds + deadline_seconds, {})
        if self._store.wait([key], time.monotonic() + deadline_seconds):
            return _read(key, self._store.ask(lambda store: store.get(key)))
        # A late coordinator can still drop the answers of a gather_scatter; a commit cannot be undone.
        if self._claim(f"{topic}/outcome", f"rank {self.rank}") == _DECIDED:
            return self._await(key, topic, deadline_seconds)
        raise DeadlineError(
            f"{topic}: rank(s) 0 had heard from all ranks, and sent no outcome within "
            f"{deadline_seconds:g} s: it has died or hangs; the outcome on rank 0 is not known here",
            awaited=(0,),
            in_doubt=True,
        )

    def _forget(self, keys: Sequence[str] | None = None) -> None:
        """Delete these messages, or those of earlier calls."""
        try:
            for key in self._stale if keys is None else keys:
                self._store.ask(methodcaller("delete_key", key))
        except CoordinationError as error:
            # The reply that was read counts all the same; the next message reports the lost store.
            _logger.debug("messages stay in the job's store: %s", error)
        if keys is None:
            self._stale.clear()


def _packed(content: object, kind: bytes = _VALUE) -> bytes:
    return _BYTES + content if type(content) is bytes else kind + messages.encode(content)


def _packed_value(value: object) -> tuple[bytes, BaseException | None]:
    """Encode a value or an error; an unsendable value becomes an error."""
    if not isinstance(value, BaseException):
        try:
            return _packed(value), None
        except Exception as error:  # noqa: BLE001 - the message below reports it to every rank
            value = error
    return _packed(Failure.of(value), _FAILURE), value


def _read(key: str, message: bytes) -> _Word:
    kind, rest = message[:1], message[1:]
    try:
        content = rest if kind == _BYTES else messages.decode(rest)
    except messages.MessageError as error:
        raise CoordinationError(f"{key}: a message that cannot be read ({error})") from error
    match kind, content:
        case (b"v" | b"b", _) | (b"f", Failure()) | (b"e", CheckpointError()):
            return _Word(kind, content)
        case _:
            raise CoordinationError(f"{key}: a message that is not of a rank")


def _content(reply: _Word, cause: BaseException | None) -> Any:
    if isinstance(reply.content, CheckpointError) and reply.kind == _ERROR:
        raise reply.content from cause
    return reply.content


def _failures(words: Mapping[int, _Word]) -> dict[int, Failure]:
    return {
        rank: word.content
        for rank, word in words.items()
        if word.kind == _FAILURE and isinstance(word.content, Failure)
    }


def _texts(causes: Mapping[int, Failure]) -> dict[int, str]:
    return {rank: cause.text for rank, cause in causes.items()}


def _list_failures(causes: Mapping[int, Failure]) -> str:
    return "; ".join(f"rank {rank}: {cause.text}" for rank, cause in sorted(causes.items()))


def _came_late(topic: str, word: str) -> DeadlineError:
    return DeadlineError(f"{topic}: {word} gave up waiting for rank 0, which was too late", awaited=(0,))


def _missing(
    topic: str, ranks: Sequence[int], seconds: float, causes: Mapping[int, Failure]
) -> DeadlineError:
    known = f" ({_list_failures(causes)})" if causes else ""
    names = ", ".join(str(rank) for rank in ranks)
    return DeadlineError(
        f"{topic}: rank(s) {names} did not arrive within {seconds:g} s{known}; "
        "they have died, hang, or did not make the same call",
        awaited=tuple(ranks),
        failures=_texts(causes),
        causes=dict(causes),
    )
