"""Messages over a torch.distributed Store: small, ordered, with deadlines that name who is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

from ckpt_core import messages
from ckpt_core.coordination._mailbox import Mailbox, MessageStore
from ckpt_core.coordination._signer import Signer
from ckpt_core.disclosure import logger_of
from ckpt_core.errors import CheckpointError, CoordinationError, DeadlineError, Failure

_logger = logger_of(__name__)

_GRACE_SECONDS = 5.0  # so that the coordinator's verdict, which names the missing, arrives first
_DECIDING = "deciding"
_DECIDED = "decided"


@messages.message
@final
@dataclass(frozen=True, slots=True)
class _Word:
    """What one rank tells another: a value, why it has none, or the error that all are to raise."""

    kind: Literal["value", "failure", "error"]
    content: object


@final
class Channel:
    """One rank's end of a line of exchanges; used by one thread at a time.

    Messages are plain values (see `ckpt_core.messages`), signed with what only the ranks of the job know.
    The coordinator reads all messages of an exchange in one request, and every rank deletes its own: with
    thousands of ranks the coordinator would otherwise be busy with the store alone.

    Of every exchange either all ranks hear the same end, or none is told that it went well: before the
    coordinator decides, and before another rank gives up, it leaves its word under one key, where the first
    stands. So a coordinator that wakes up after the others have given up decides nothing any more.
    """

    def __init__(
        self,
        store: MessageStore,
        rank: int,
        world_size: int,
        *,
        patience_seconds: float = 1800.0,
        signer: Signer | None = None,
    ) -> None:
        self._mail = Mailbox(store, rank, patience_seconds, signer or Signer())
        self._rank = rank
        self._world_size = world_size
        self._stale: list[str] = []

    def broadcast(self, topic: str, value: Any, deadline_seconds: float) -> Any:
        """The coordinator's value on every rank."""
        return self.announce(topic, lambda: value, deadline_seconds)

    def announce(self, topic: str, make: Callable[[], Any], deadline_seconds: float) -> Any:
        """What the coordinator alone makes, or the error of making it; see `Coordinator.announce`."""
        key = f"{topic}/said"
        if self._rank != 0:
            return _opened(self._await(key, topic, deadline_seconds), None)
        self._stale.append(key)

        def answer() -> tuple[Any, dict[str, bytes]]:
            made = make()
            return made, {key: _packed("value", made)}

        return self._decided(topic, answer, [key], None)

    def exchange(
        self,
        topic: str,
        value: Any,
        decide: Callable[[list[Any]], list[Any]],
        deadline_seconds: float,
        *,
        waited_seconds: float = 0.0,
    ) -> Any:
        """Values to the coordinator, to each rank its answer; see `Coordinator.exchange`.

        `waited_seconds` is how long the ranks have been waited for by other means already.
        """
        if self._rank:
            key = f"{topic}/depart/{self._rank}"
            reply, cause = self._follow(topic, value, key, deadline_seconds, waited_seconds=waited_seconds)
            self._forget([f"{topic}/arrive/{self._rank}", key])
            return _opened(reply, cause)
        keys = [f"{topic}/depart/{rank}" for rank in range(1, self._world_size)]

        def answer() -> tuple[Any, dict[str, bytes]]:
            answers = decide(self._collect(topic, value, deadline_seconds, waited_seconds))
            word = self._mail.claim(f"{topic}/outcome", _DECIDED)
            self._stale.append(f"{topic}/outcome")
            if word != _DECIDED:
                raise _came_late(topic, word)
            # Packed before the first is sent: what cannot be sent must not leave ranks waiting.
            return answers[0], {
                key: _packed("value", answers[rank]) for rank, key in enumerate(keys, start=1)
            }

        return self._decided(topic, answer, keys, value)

    def meet(
        self, topic: str, value: Any, commit: Callable[[list[Any]], Any], deadline_seconds: float
    ) -> Any:
        """Values to the coordinator, one answer to all; see `Coordinator.meet`."""
        key = f"{topic}/depart"
        if self._rank:
            reply, cause = self._follow(topic, value, key, deadline_seconds)
            self._forget([f"{topic}/arrive/{self._rank}"])
            return _opened(reply, cause)

        def answer() -> tuple[Any, dict[str, bytes]]:
            committed = commit(self._collect(topic, value, deadline_seconds))
            return committed, {key: _packed("value", committed)}

        try:
            return self._decided(topic, answer, [key], value, irrevocable=True)
        finally:
            self._stale.append(key)

    def _follow(
        self,
        topic: str,
        value: Any,
        reply_key: str,
        deadline_seconds: float,
        *,
        waited_seconds: float = 0.0,
    ) -> tuple[_Word, BaseException | None]:
        """Bring a value and hear how it ended; with it the error that kept this rank from having a value.

        Raises:
            CoordinationError: nothing was heard; `in_doubt` if the coordinator may have gone on all the same.
        """
        message, cause = _packed_value(value)
        try:
            self._mail.put(f"{topic}/arrive/{self._rank}", message)
            return (
                self._await(
                    reply_key, topic, deadline_seconds, may_be_deciding=True, waited_seconds=waited_seconds
                ),
                cause,
            )
        except CoordinationError as error:
            # Whoever brought an error, or has left word that it gives up, knows that nothing will be done.
            given_up = isinstance(error, DeadlineError) and bool(error.awaited)
            if given_up or cause is not None:
                raise
            raise error.retold(
                f"{topic}: {error}; rank {self._rank} had told rank 0 that it was ready by then, so whether "
                "rank 0 came to its end is not known here",
                in_doubt=True,
            ) from error

    def _decided(
        self,
        topic: str,
        decide: Callable[[], tuple[Any, dict[str, bytes]]],
        reply_keys: Sequence[str],
        value: Any,
        *,
        irrevocable: bool = False,
    ) -> Any:
        """Decide, and send the replies; an error goes to every rank before it is raised.

        What is `irrevocable` is done when it is decided, whether or not the replies can be sent.
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
                _told(topic, f"rank 0: {found.text}"), failures={0: found.text}, causes={0: found}
            )
            self._refuse(reply_keys, refusal)
            raise refusal from error
        try:
            for key, reply in replies.items():
                self._mail.put(key, reply)
        except CoordinationError as error:
            if not irrevocable:
                raise
            _logger.warning("%s is done, but the other ranks cannot be told: %s", topic, error)
        return answer

    def _refuse(self, reply_keys: Sequence[str], error: CheckpointError) -> None:
        reply = messages.encode(_Word("error", error))
        try:
            for key in reply_keys:
                self._mail.put(key, reply)
        except CoordinationError as lost:
            _logger.warning("the other ranks cannot be told what went wrong: %s", lost)

    def _collect(
        self, topic: str, value: Any, deadline_seconds: float, waited_seconds: float = 0.0
    ) -> list[Any]:
        deadline = time.monotonic() + deadline_seconds
        causes = {0: Failure.of(value)} if isinstance(value, BaseException) else dict[int, Failure]()
        keys = [f"{topic}/arrive/{rank}" for rank in range(1, self._world_size)]
        if keys and not self._mail.wait(keys, deadline):
            missing = [rank for rank, key in enumerate(keys, start=1) if not self._mail.has([key])]
            causes |= _failures(self._arrived(keys, missing))
            raise _missing(topic, missing or [len(keys)], waited_seconds + deadline_seconds, causes)
        words = self._arrived(keys, ())
        self._forget()
        self._stale.append(f"{topic}/verdict")
        if causes := causes | _failures(words):
            raise CoordinationError(
                _told(topic, _list_failures(causes)), failures=_texts(causes), causes=causes
            )
        word = self._mail.claim(f"{topic}/verdict", _DECIDING)
        if word != _DECIDING:
            raise _came_late(topic, word)
        return [value, *(each.content for each in words.values())]

    def _arrived(self, keys: Sequence[str], missing: Collection[int]) -> dict[int, _Word]:
        """The messages by rank, in order, without those that are missing."""
        there = {key: rank for rank, key in enumerate(keys, start=1) if rank not in missing}
        found = self._mail.take_all(there)
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
        """What the coordinator leaves under `key`; it gets a second chance if it is known to be at it."""
        grace = min(_GRACE_SECONDS, deadline_seconds)
        if self._mail.wait([key], time.monotonic() + deadline_seconds + grace):
            return _read(key, self._mail.take(key, 0))
        if not may_be_deciding or self._mail.claim(f"{topic}/verdict", f"rank {self._rank}") != _DECIDING:
            raise _missing(topic, [0], waited_seconds + deadline_seconds, {})
        if self._mail.wait([key], time.monotonic() + deadline_seconds):
            return _read(key, self._mail.take(key, 0))
        # Of an exchange the coordinator hears in time that it is no use; a commit cannot be taken back.
        if self._mail.claim(f"{topic}/outcome", f"rank {self._rank}") == _DECIDED:
            return self._await(key, topic, deadline_seconds)
        raise DeadlineError(
            f"{topic}: rank(s) 0 had heard from all ranks, and has not told within {deadline_seconds:g} s "
            "how it ended: it has died or hangs; whether it came to its end is not known here",
            awaited=(0,),
            in_doubt=True,
        )

    def _forget(self, keys: Sequence[str] | None = None) -> None:
        """Delete what all ranks have read: these keys, else what was left before a later exchange."""
        try:
            self._mail.delete(self._stale if keys is None else keys)
        except CoordinationError as error:
            # What was heard counts all the same; the next message will say that the store is gone.
            _logger.debug("messages stay in the job's store: %s", error)
        if keys is None:
            self._stale.clear()


def _packed(kind: Literal["value", "failure"], content: object) -> bytes:
    return messages.encode(_Word(kind, content))


def _packed_value(value: object) -> tuple[bytes, BaseException | None]:
    """A rank's message and the error in it, if it is one; what cannot travel is one, too."""
    if not isinstance(value, BaseException):
        try:
            return _packed("value", value), None
        except Exception as error:  # noqa: BLE001 - every rank is told through the message below
            value = error
    return _packed("failure", Failure.of(value)), value


def _read(key: str, message: bytes) -> _Word:
    try:
        word = messages.decode(message)
        if isinstance(word, _Word) and _KINDS[word.kind](word.content):
            return word
    except messages.MessageError as error:
        raise CoordinationError(f"{key}: a message that cannot be read ({error})") from error
    raise CoordinationError(f"{key}: a message that is none of a rank")


_KINDS: Mapping[str, Callable[[object], bool]] = {
    "value": lambda _: True,
    "failure": lambda content: isinstance(content, Failure),
    "error": lambda content: isinstance(content, CheckpointError),
}


def _opened(reply: _Word, cause: BaseException | None) -> Any:
    if isinstance(reply.content, CheckpointError) and reply.kind == "error":
        raise reply.content from cause
    return reply.content


def _failures(words: Mapping[int, _Word]) -> dict[int, Failure]:
    return {
        rank: word.content
        for rank, word in words.items()
        if word.kind == "failure" and isinstance(word.content, Failure)
    }


def _texts(causes: Mapping[int, Failure]) -> dict[int, str]:
    return {rank: cause.text for rank, cause in causes.items()}


def _list_failures(causes: Mapping[int, Failure]) -> str:
    return "; ".join(f"rank {rank}: {cause.text}" for rank, cause in sorted(causes.items()))


def _told(topic: str, text: str) -> str:
    """The text, with what the ranks were at, where the topic tells it in words."""
    return f"{topic}: {text}" if topic.startswith("while ") else text


def _came_late(topic: str, word: str) -> DeadlineError:
    return DeadlineError(f"{topic}: {word} gave up waiting for rank 0, which came too late", awaited=(0,))


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
